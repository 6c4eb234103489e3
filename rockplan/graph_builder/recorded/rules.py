"""Legality of a recorded run: a table of rules, each a function that yields what breaks it.

takes: a Capture. `oracles.graph_rules.check` applies them after each pass if `CHECKED` is on;
`oracles.graph_rules` has those of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.recorded.specs import needed_bytes
from rockplan.values.graph import Phase, is_kernel, refs

Rule = Callable[[Capture], Iterator[str]]
"""Yields what breaks the rule; its docstring says what must hold."""


def values_are_there(run: Capture) -> Iterator[str]:
    """A call names values of the run."""
    known = range(len(run.values))
    for position, recorded in enumerate(run.calls):
        named = (*recorded.reads, *recorded.writes, *recorded.call.made)
        for value in named:
            if value not in known:
                yield f"call {position} names value {value} of {len(known)}"


def reads_are_arguments(run: Capture) -> Iterator[str]:
    """A call reads what its arguments name, and writes to what it reads."""
    for position, recorded in enumerate(run.calls):
        named = {ref.index for ref in refs(recorded.call)}
        if named != {*recorded.reads}:
            yield f"call {position}, {recorded.call.op}, reads {recorded.reads} of {sorted(named)}"
        if not named >= {*recorded.writes}:
            yield f"call {position}, {recorded.call.op}, writes to {recorded.writes}"


def made_before_read(run: Capture) -> Iterator[str]:
    """Nothing is read before it is made."""
    made = set(run.view.given)
    for position, recorded in enumerate(run.calls):
        for value in recorded.reads:
            if value not in made:
                yield f"call {position}, {recorded.call.op}, reads value {value}"
        made.update(recorded.call.made)
    wanted = [("output", o.value) for o in run.outputs if o.value is not None]
    wanted += [("gradient", g) for _, g in run.gradients if g is not None]
    for role, value in (*wanted, *(("copy", copy) for _, copy in run.copies)):
        if value not in made:
            yield f"the {role} {value} is never made"


def made_once(run: Capture) -> Iterator[str]:
    """A value is made by one call, or given by the caller."""
    made = set(run.view.given)
    for position, recorded in enumerate(run.calls):
        for value in {*recorded.call.made} - {*recorded.reads}:
            if value in made:
                yield f"call {position}, {recorded.call.op}, makes value {value} again"
            made.add(value)


def views_read_what_they_share(run: Capture) -> Iterator[str]:
    """A result in an existing storage is a view of an operand of its call."""
    existing = run.view.storages(run.view.given)
    for position, recorded in enumerate(run.calls):
        read = run.view.storages(recorded.reads)
        results = run.view.storages(recorded.call.made)
        for storage in (results & existing) - read:
            yield f"call {position}, {recorded.call.op}, has a result in storage {storage}"
        existing |= results


def values_fit_their_storage(run: Capture) -> Iterator[str]:
    """A value lies within its storage, and all values of a storage agree on its size."""
    sizes: dict[int, int] = {}
    for index, value in enumerate(run.values):
        known_bytes = sizes.setdefault(value.storage, value.storage_bytes)
        if value.storage_bytes != known_bytes:
            yield f"storage {value.storage} has {known_bytes} and {value.storage_bytes} bytes"
        if value.spec.device == "cpu" and needed_bytes(value.spec) > value.storage_bytes:
            yield f"value {index}, {value.spec}, is in a storage of {value.storage_bytes} bytes"


def forward_comes_first(run: Capture) -> Iterator[str]:
    """Calls of the forward phase come before those of the backward phase."""
    is_backward = [recorded.phase is Phase.BACKWARD for recorded in run.calls]
    if is_backward != sorted(is_backward):
        yield f"call {is_backward.index(True)} is one of the backward phase"


def kernels_are_known(run: Capture) -> Iterator[str]:
    """A called kernel is one of the run's kernels."""
    known = {kernel.op for kernel in run.kernels}
    for position, recorded in enumerate(run.calls):
        if is_kernel(recorded.call.op) and recorded.call.op not in known:
            yield f"call {position} is of {recorded.call.op}"


RULES: tuple[Rule, ...] = (
    values_are_there,
    reads_are_arguments,
    made_before_read,
    made_once,
    views_read_what_they_share,
    values_fit_their_storage,
    forward_comes_first,
    kernels_are_known,
)
