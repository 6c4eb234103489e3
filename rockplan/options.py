"""How to plan: the options of `solve`, `plan` and `pareto`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, NamedTuple

from rockplan.budget import Budget, parse_budget
from rockplan.errors import InvalidBudget, InvalidInput


class SizeRange(NamedTuple):
    """The sizes that a dimension has, from `least` to `most`. argument: name of the tensor, '' for
    all tensors that have the dimension."""

    argument: str
    dimension: int
    least: int
    most: int


Range = tuple[int, int]
Sizes = Mapping[int, Range] | Mapping[str, Mapping[int, Range]] | tuple[SizeRange, ...]
"""Ranges as users write them: {1: (64, 2048)}, or by tensor {'input_ids': {1: (64, 2048)}}; both
may be mixed. `Options` turns them into a tuple of SizeRange."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan.

    on_mismatch: what a planned module does with a call that differs from everything that was
    planned (docs/behaviour.md): 'replan' plans for it, 'original' runs the original forward,
    'error' raises StalePlan.
    on_infeasible: what happens if no plan fits the budget: 'error' raises InfeasibleBudget,
    'smallest' takes the smallest plan and the logger says by how much it exceeds the budget,
    'original' runs the original forward for calls like this one (`solve` raises). None: 'smallest'
    for a share, which is a wish, 'error' for bytes, which are a limit.
    differentiated: leaves of the result that backward starts from, by position among all leaves;
    None: a scalar called `loss` that reaches all; else scalars from which no scalar is computed;
    else all that require a gradient. Name all that are ever differentiated.
    released: leaves of the result, by position, that the caller drops before backward, such as
    logits if only the loss is used. Where the caller holds them, they come on top of the peak.
    only_loss: the caller uses only the loss of a planned call, as trainers do. Larger leaves that
    the call would compute (logits) are not in training: a tensor without memory stands for each,
    and raises ResultNotMade if it is read.
    time_limit_s: seconds of CPU time to plan at most, after the model is captured and measured;
    then the best plan so far is returned, and its status says so. For `pareto` it is the limit of
    each of about 16 plans, for `solve_blocks` of each of some 12 to 30 options of a kind of block.
    check: run two steps of the original and of the planned module on the sample, compare bit for
    bit, and raise CheckFailed if they differ; needs the memory of both. If the original differs
    from run to run, CheckFailed if the planned module does not, else a warning. With `compile` the
    original is the same kernels without re-executions, and eager has to be near (docs/compiled.md).
    cache: keep profiles, options of blocks and plans on disk (ROCKPLAN_CACHE_DIR, else the
    platform's cache folder), so that planning again measures and solves nothing.
    bound_time_limit_s: seconds that integer programs may spend on raising the lower bound of the
    certificate, within time_limit_s, after the search; none if the relaxation is enough. The plan
    does not depend on it.
    keep, recompute: patterns of activations that the plan must keep from the forward pass on, or
    must not keep between forward and backward: modules ('layers.*.attn', '*.act'), or activations
    ('layers.*.attn/softmax') as `rockplan.values.names` names them.
    without: names of stages of the search and of passes that make the graph that do not run, for
    experiments (benchmarks/results/ablation.md). With fewer the smallest budget may be larger.
    on_refused: what happens with what cannot be planned: 'error' raises the reason; 'leave', of
    `solve_blocks` and of `solve` without a sample, leaves the block, or the module, as it is and
    logs that; 'blocks', of `solve`, plans the parts of `model` that can be, in place as
    `solve_blocks` does and within the same budget, and logs which are left and why.
    compile: plan kernels that PyTorch's compiler makes of several operators each (C++ on CPU,
    Triton on CUDA), in place of the operators of eager execution; 'near': kernels that round
    between their operators as eager does (docs/compiled.md).
    sizes: range of a dimension of the sample, such as {1: (64, 2048)} for lengths in dimension 1 of
    its tensors, or {'input_ids': {1: (64, 2048)}} for one tensor. The largest sample is planned
    first, then the given one and the smallest, so that `solve` says before training whether all fit
    the budget. `solve_blocks`, `plan` and `pareto` plan the largest.
    solver: of the integer programs of blocks, by its name in PuLP, such as 'GUROBI'; if it is not
    installed, InvalidInput names those at hand. The relaxation of the whole graph and bounds stay
    with HiGHS.
    group: processes that plan together (torch.distributed.group.WORLD): of those with the same
    graph, one measures and solves, and its plan or its error goes to all, so that every process of
    the group has to call the same function. None: the processes among which `fully_shard` has
    shared the parameters of a model plan its blocks together, and others each for itself. A call in
    training is planned by its process alone.
    rerun_collectives: collectives in functional form may run again like other operations; only with
    one plan on all processes that exchange data, each of which has to call what is planned equally
    often and with equal shapes (docs/distributed.md). False: they run once.
    in_flight: most calls that are between forward and backward at once, as microbatches of a
    pipeline are: the budget is that of all of them, the peak of one and what the others keep.
    tile: plan the head of the model (its largest matrix product, with its loss) in parts of its
    rows as well, and take the better plan. True: parts by size; a number of at least 2: so many.
    Sums over rows are rounded otherwise than eager's (docs/tiled.md).
    host: bytes of the host's memory ('8GiB') in which activations may lie between forward and
    backward, if that is faster than to recompute them; of each call in flight and each process.
    True: what the machine has available, for one call of one process; None: nothing leaves the
    device. host_path: of a module on the CPU, the folder of the file that they go to. link: bytes a
    second from device to host and back, both at once ('25GB/s'); None: measured (docs/paging.md).
    numerics: 'best': beside what other options say, also what a training run normally tolerates
    (only_loss, tile, compile, and host on CUDA), each where a plan for this call and budget gains
    by it, as the logger says: they are planned side by side.
    graph: of `solve` and `load` on CUDA: the second call of a kind and later ones are replayed as
    two CUDA graphs, wherever nothing speaks against it, in `plan.pool_bytes` (docs/usage.md).
    """

    on_mismatch: Literal["replan", "original", "error"] = "replan"
    differentiated: tuple[int, ...] | None = None
    time_limit_s: float = 30.0
    check: bool = False
    cache: bool = True
    bound_time_limit_s: float = 0.5
    keep: Sequence[str] = ()
    recompute: Sequence[str] = ()
    released: tuple[int, ...] = ()
    only_loss: bool = False
    on_infeasible: Literal["error", "smallest", "original"] | None = None
    without: Sequence[str] = ()
    on_refused: Literal["error", "leave", "blocks"] = "error"
    compile: bool | Literal["near"] = False
    sizes: Sizes = ()
    tile: bool | int = False
    solver: str = "HiGHS"
    group: Any = None
    in_flight: int = 1
    host: bool | int | str | None = None
    host_path: str | os.PathLike[str] | None = None
    link: int | str | None = None
    rerun_collectives: bool = False
    numerics: Literal["eager", "best"] = "eager"
    graph: bool = False

    @classmethod
    def best(cls, **others: Any) -> Options:
        """Return these options with numerics='best'."""
        return cls(numerics="best", **others)

    def takes_smallest(self, budget: Budget) -> bool:
        """True if the smallest plan is taken where none fits the budget."""
        is_wish = budget.share is not None and self.on_infeasible is None
        return is_wish or self.on_infeasible == "smallest"

    @property
    def host_bytes(self) -> int | None:
        """`host` in bytes; None if the machine decides, or if nothing is paged."""
        return None if self.host is None or self.host is True else _bytes("host", self.host, "")

    @property
    def link_bytes_per_s(self) -> int | None:
        """`link` in bytes a second; None if it is measured."""
        return None if self.link is None else _bytes("link", self.link, "/s")

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            given = getattr(self, name)
            if given is not default:
                object.__setattr__(self, name, ROWS[name].convert(name, given))
        for name, default in _DEFAULTS.items():
            if getattr(self, name) == default:
                continue
            for other, why in ROWS[name].not_with.items():
                if getattr(self, other) != _DEFAULTS[other]:
                    raise InvalidInput(why.format(self))
            needed = ROWS[name].needs
            if needed and getattr(self, needed) == _DEFAULTS[needed]:
                raise InvalidInput(f"{name} is for {_NEEDS[needed]}: pass {needed}, too")


def _bytes(name: str, given: object, per: str) -> int:
    """per: '/s' for bytes a second, which text must end with, '' for bytes."""
    is_text = isinstance(given, str)
    text = given.removesuffix(per) if isinstance(given, str) else given
    try:
        found = parse_budget(text).size_bytes if not is_text or given != text or not per else None
    except InvalidBudget:
        found = None
    if found is None:
        examples = {
            "host": "bytes (8_000_000_000), '8GiB', or True for what the machine leaves",
            "link": "bytes a second (25_000_000_000) or '25GB/s'",
        }
        raise InvalidInput(f"{name} is {given!r}; pass {examples[name]}")
    return found


def _size_ranges(given: object) -> Iterator[SizeRange]:
    if isinstance(given, tuple) and all(isinstance(one, SizeRange) for one in given):
        yield from given
        return
    if not isinstance(given, Mapping):
        raise InvalidInput(f"sizes is {given!r}; {_SIZES}")
    for key, value in given.items():
        if isinstance(key, str) and key and isinstance(value, Mapping):
            yield from (_size_range(key, dimension, one) for dimension, one in value.items())
        else:
            yield _size_range("", key, value)


_SIZES = (
    "write {1: (64, 2048)} where dimension 1 of the sample's tensors is from 64 to 2048, or "
    "{'input_ids': {1: (64, 2048)}} for one tensor"
)


def _size_range(argument: str, dimension: object, given: object) -> SizeRange:
    """argument: name of the tensor, '' for all."""
    place = f"sizes[{argument!r}]" if argument else "sizes"
    if type(dimension) is not int or dimension < 0:
        raise InvalidInput(
            f"{place} has {dimension!r} for a dimension, which count from 0; {_SIZES}"
        )
    sizes = tuple(given) if isinstance(given, tuple | list) else ()
    if len(sizes) != 2 or not all(type(size) is int and size >= 1 for size in sizes):
        raise InvalidInput(
            f"{place}[{dimension}] is {given!r}; pass the smallest and the largest size, two "
            f"numbers of at least 1: {_SIZES}"
        )
    least, most = sizes
    if least > most:
        raise InvalidInput(
            f"{place}[{dimension}] is {given!r}, and {least} is more than {most}; the smallest "
            "size comes first"
        )
    return SizeRange(argument, dimension, least, most)


Convert = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class OptionRow:
    """What holds of an option.

    convert: (name, value as given) -> value as it is kept, or InvalidInput. decides: a plan depends
    on it by more than its graph, so that it is part of the key of the cache. no_effect: function of
    rockplan, or FSDP2, that does not take it -> why, and what to do. not_with: other option -> why
    not both, with the options for {0}. needs: option without which it says nothing.
    """

    convert: Convert = lambda name, given: given  # noqa: E731
    decides: bool = True
    no_effect: Mapping[str, str] = field(default_factory=dict)
    not_with: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""


def _checked(kept: Callable[[Any], Any], says: str) -> Convert:
    """Return a check of values. kept: value as given -> as it is kept, None if it is invalid."""

    def convert(name: str, given: Any) -> Any:
        value = kept(given)
        if value is None:
            raise InvalidInput(f"{name} is {given!r}; {says}")
        return value

    return convert


def _choice(*values: bool | str) -> Convert:
    def kept(given: Any) -> Any:
        return next((v for v in values if isinstance(given, type(v)) and given == v), None)

    *first, last = map(repr, values)
    return _checked(kept, f"choose {', '.join(first)} or {last}")


def _several(kind: type, says: str) -> Convert:
    def kept(given: Any) -> Any:
        several = tuple(given) if isinstance(given, Iterable) else (None,)
        fits = not isinstance(given, str) and all(
            isinstance(one, kind) and not isinstance(one, bool) for one in several
        )
        return several if fits else None

    return _checked(kept, says)


def _host(name: str, given: Any) -> Any:
    if given is not True and given is not False:
        _bytes(name, given, "")
    return given or None


FSDP2 = "fit, shard='fsdp2'"

_SECONDS = _checked(
    lambda s: (
        float(s) if isinstance(s, Real) and not isinstance(s, bool) and float(s) >= 0 else None
    ),
    "pass seconds, a number of at least 0",
)
_SWITCH = _choice(False, True)
_POSITIONS = _several(int, "pass a tuple of positions among the leaves of the result, such as (0,)")
_PATTERNS = _several(str, "pass a sequence of patterns")
_NEEDS = {"host": "activations that go to the host"}
_OF_THE_WHOLE = {
    FSDP2: (
        "says something of the whole module, and under shard='fsdp2' blocks are planned, each by "
        "itself (rockplan.solve_blocks): leave it out"
    )
}
_BESIDE_BLOCKS = {
    "solve_blocks": (
        "beside whose blocks head and loss run as they are written: leave it out, and compute the "
        "loss on the hidden states with rockplan.token_log_probs, which makes no logits, or plan "
        "the whole module with rockplan.solve"
    )
}
_FOR_ITSELF = (
    "which every process calls for itself; leave it out, or plan together with rockplan.plan or "
    "rockplan.solve"
)

ROWS: Mapping[str, OptionRow] = {
    "on_mismatch": OptionRow(_choice("replan", "original", "error"), decides=False),
    "differentiated": OptionRow(_POSITIONS),
    "time_limit_s": OptionRow(_SECONDS),
    "check": OptionRow(decides=False),
    "cache": OptionRow(decides=False),
    "bound_time_limit_s": OptionRow(_SECONDS),
    "keep": OptionRow(_PATTERNS),
    "recompute": OptionRow(_PATTERNS),
    "released": OptionRow(_POSITIONS),
    "only_loss": OptionRow(_SWITCH, no_effect=_BESIDE_BLOCKS),
    "on_infeasible": OptionRow(_choice("error", "smallest", "original"), decides=False),
    "without": OptionRow(_several(str, "pass a sequence of names of stages")),
    "on_refused": OptionRow(_choice("error", "leave", "blocks"), decides=False),
    "compile": OptionRow(_choice(False, True, "near"), no_effect=_OF_THE_WHOLE),
    "sizes": OptionRow(lambda name, given: tuple(_size_ranges(given)), decides=False),
    "tile": OptionRow(
        _checked(
            lambda n: n if type(n) is bool or (type(n) is int and n >= 2) else None,
            "choose False, True or a number of parts, at least 2",
        ),
        no_effect=_BESIDE_BLOCKS | _OF_THE_WHOLE,
    ),
    "solver": OptionRow(),
    "group": OptionRow(
        decides=False,
        no_effect=dict.fromkeys(("api.plan_each", "pareto", "load", "explain"), _FOR_ITSELF),
    ),
    "in_flight": OptionRow(
        _checked(
            lambda n: n if type(n) is int and n >= 1 else None,
            "pass how many calls are between forward and backward at once, at least 1",
        ),
        no_effect={
            "pareto": (
                "which is of one call; leave it out, or plan for one budget of several calls with "
                "rockplan.plan"
            ),
            "fit": (
                "which is of one call between forward and backward: leave it out, or ask "
                "rockplan.plan(model, sample, budget, options=Options(in_flight=...)) what several "
                "of one batch need"
            ),
        },
    ),
    "host": OptionRow(
        _host,
        not_with={
            "in_flight": (
                "plans of several calls at once (in_flight={0.in_flight}) page nothing to the "
                "host: leave out host, or leave out in_flight and give the budget of one call"
            )
        },
    ),
    "host_path": OptionRow(
        _checked(
            lambda p: os.fspath(p) if isinstance(p, str | os.PathLike) else None, "pass a folder"
        ),
        needs="host",
    ),
    "link": OptionRow(
        lambda name, given: given if _bytes(name, given, "/s") else None, needs="host"
    ),
    "rerun_collectives": OptionRow(
        _SWITCH,
        decides=False,
        no_effect={
            "load": (
                "which cannot tell whether other processes read the same plan; plan anew on all "
                "with rockplan.solve"
            )
        },
        not_with={
            "sizes": (
                "processes whose calls have other sizes run other plans, and with "
                "rerun_collectives=True collectives of one would meet those of another: leave out "
                "sizes, and pad batches to one size, or leave out rerun_collectives"
            )
        },
    ),
    "numerics": OptionRow(
        _choice("eager", "best"),
        decides=False,
        no_effect=dict.fromkeys(
            ("fit", "pareto", "load", "explain", "api.plan_each"),
            "which looks for no options: leave it out, or call rockplan.solve or rockplan.plan",
        ),
    ),
    "graph": OptionRow(
        _SWITCH,
        decides=False,
        no_effect={
            "solve_blocks": (
                "beside whose blocks Python runs at each step: leave it out, or plan the whole "
                "module with rockplan.solve"
            ),
            "pareto": "which runs no plan: leave it out, or give rockplan.plan one budget",
            "fit": (
                "which does not count the memory of graphs: leave it out, and read "
                "rockplan.plan(model, sample, budget, options=Options(graph=True)).pool_bytes"
            ),
        },
        not_with=dict.fromkeys(
            ("in_flight", "host", "released"),
            "graph=True goes without in_flight, host and released: a replay writes over "
            "what other calls keep and what is let go, and pages nothing. "
            "Leave out graph, or these (only_loss=True makes no results that released would name)",
        ),
    ),
}
"""All options, in the order of `Options`."""

_DEFAULTS = {option.name: option.default for option in fields(Options)}
DEFAULT_OPTIONS = Options()


def without_effect(options: Options, function: str) -> dict[str, str]:
    """Return option -> why it has no effect there, and what to do, of those that have not their
    default. function: of `OptionRow.no_effect`."""
    return {
        name: row.no_effect[function]
        for name, row in ROWS.items()
        if function in row.no_effect and getattr(options, name) != _DEFAULTS[name]
    }


def checked(options: object, function: str = "") -> Options:
    """Return `options`. Raises InvalidInput for what are none, and for one that has no effect in a
    function of rockplan."""
    if not isinstance(options, Options):
        raise InvalidInput(
            f"options is a {type(options).__name__}; pass rockplan.Options(...), whose arguments "
            "are the options"
        )
    for name, why in without_effect(options, function).items():
        raise InvalidInput(f"Options({name}=...) has no effect in rockplan.{function}, {why}")
    return options
