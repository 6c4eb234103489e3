"""BoundProgram: a program on the tensors of one module, and the guards that say whether it may run.

takes: a program, a module, leaves of the arguments of a call. returns: whether the program is for
this call; if not, why; if so, the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rockplan.codegen.unmade import stand_in
from rockplan.python_state.contents import described, is_same
from rockplan.python_state.given import returned
from rockplan.python_state.hooks import has_hooks
from rockplan.python_state.memory import answer_of, parts_of
from rockplan.runtime import autograd
from rockplan.runtime.backward_pass import Replan
from rockplan.runtime.captured import GraphPool
from rockplan.runtime.differences import (
    DescribedCall,
    Difference,
    call_differences,
    module_differences,
)
from rockplan.runtime.guards import (
    ModuleSignature,
    Sharing,
    holds_for_others,
    module_signature,
)
from rockplan.runtime.program import PlannedProgram
from rockplan.runtime.switches import without_default_device
from rockplan.values.interface import ABSENT, Guard, Question, Unmade
from rockplan.values.sizes import Size


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BoundProgram:
    """A program bound to the tensors of one module tree in one state.

    wrappers: position of a tensor -> the frozen wrapper that it is inside of; sharing: which
    tensors shared memory when the program was captured; unhooked: parameters without hooks, whose
    gradients it hands over while it still reads the parameters.
    """

    program: PlannedProgram
    signature: ModuleSignature
    tensors: tuple[torch.Tensor, ...]
    wrappers: Mapping[int, torch.Tensor]
    sharing: Sharing
    unhooked: tuple[torch.Tensor, ...]

    def residents(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors that are passed to the generated code."""
        inputs = (leaves[i] for i, _ in self.program.interface.inputs)
        return (*self.tensors, *inputs, *self.program.constants)

    def holds(self, leaves: Sequence[Any]) -> bool:
        """True if the program is for the module as it is now and a call with these `leaves`."""
        return self.holds_but_for_reads(leaves) and all(
            is_same(value, guard.expected) for guard, value in self.read(leaves)
        )

    def holds_but_for_reads(self, leaves: Sequence[Any]) -> bool:
        """Return `holds` without a look at what Python reads from values."""
        return (
            self.signature.holds()
            and self.sharing.holds(self.residents(leaves))
            and not any(map(has_hooks, self.unhooked))
            and all(self._is_answered(q, leaves) for q in self.program.interface.questions)
        )

    def sizes_of(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the sizes of a call, which of a program for many sizes give the values of its
        symbols; None if it is not for these, or for other values that Python reads."""
        opened, symbols = self.program.open, self.program.interface.sizes
        assert opened is not None
        given = opened.given(leaves)
        if given is None:
            return None
        sizes = [*given, *(0 for _ in symbols.counts)]
        for guard, value in self.read(leaves, sizes):
            if isinstance(guard.expected, Size):
                sizes[symbols.names.index(guard.expected.text)] = value
            elif not is_same(value, guard.expected):
                return None
        return tuple(sizes) if opened.agree(sizes) else None

    def read(
        self, leaves: Sequence[Any], sizes: Sequence[int] | None = None
    ) -> Iterator[tuple[Guard, Any]]:
        """Yield (guard, value now) for each value that the forward's Python code reads from
        tensors, such as `x.max().item()`. sizes: of the call, None for those of the program, by
        which it is known what they alone decide."""
        program, interface = self.program, self.program.interface
        own, buffers = program.executable.sizes, self.tensors[len(interface.parameters) :]
        checks = program.executable.functions.guards
        for check, guard in zip(checks, interface.guards, strict=True):
            if sizes is not None or not guard.is_of_sizes:
                yield guard, check(leaves, program.constants, buffers, sizes or own)

    def _is_answered(self, question: Question, leaves: Sequence[Any]) -> bool:
        """ABSENT, for an attribute that the tensor does not have, is an answer."""
        if question.role == "input":
            tensor = leaves[int(question.key)]
        else:
            interface = self.program.interface
            named = (*interface.parameters, *interface.buffers)
            tensor = self.tensors[[name for name, _ in named].index(str(question.key))]
        answer = answer_of(tensor, question.attribute)
        if answer is ABSENT or question.answer is ABSENT:
            return answer is question.answer
        return bool(described(answer) == question.answer)

    def differences(self, now: DescribedCall, leaves: Sequence[Any]) -> tuple[Difference, ...]:
        """List the reasons why the program is not for the call `now`, whose arguments have
        `leaves`; reasons in values are looked for only if the arguments are alike."""
        unread = self.program.interface.unread
        of_call = call_differences(_without(now, unread), _without(self.program.call, unread))
        of_module = module_differences(self.signature)
        if of_call:  # the other comparisons suppose that arguments are alike
            return (*of_call, *of_module)
        reasons = [*of_module]
        if not self.sharing.holds(self.residents(leaves)):
            reasons.append(Difference(_SHARED))
        interface = self.program.interface
        names = dict(zip(map(id, self.tensors), (n for n, _ in interface.parameters), strict=False))
        hooked = [names[id(t)] for t in self.unhooked if has_hooks(t)]
        if hooked:
            reasons.append(Difference(f"hooks on parameters ({', '.join(map(repr, hooked[:3]))})"))
        for asked in interface.questions:
            if not self._is_answered(asked, leaves):
                reasons.append(Difference(f"`{asked.attribute}` of the {asked.role} {asked.key!r}"))
        return (*reasons, *_read_differences(self, leaves))


def _without(call: DescribedCall, unread: frozenset[int]) -> DescribedCall:
    kept = (leaf for i, leaf in enumerate(call.leaves) if i not in unread)
    return replace(call, leaves=tuple(kept)) if unread else call


_SHARED = (
    "which arguments are one tensor or a tensor of the module, or share memory with what the "
    "forward changes"
)


def _read_differences(bound: BoundProgram, leaves: Sequence[Any]) -> Iterator[Difference]:
    names = dict(enumerate(name for name, _ in bound.program.call.leaves))
    buffers = [f"the buffer '{name}'" for name, _ in bound.program.interface.buffers]
    for guard, value in bound.read(leaves):
        if not is_same(value, guard.expected):
            read = [*(names[i] for _, i in guard.inputs if i in names)]
            of = ", ".join([*read, *(buffers[i] for _, i in guard.buffers)])
            where = f"in module '{guard.module or '(root)'}' at {guard.source or 'an unknown line'}"
            texts = f": {_short(value)}, planned {_short(guard.expected)}"
            yield Difference(
                f"values {f'of {of} ' if of else ''}that the forward reads {where}"
                # The result of a comparison would tell the user nothing.
                f"{'' if isinstance(guard.expected, bool) else texts}",
                is_value=True,
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def bind(
    module: nn.Module,
    forward: Callable[..., Any],
    program: PlannedProgram,
    signature: ModuleSignature | None = None,
) -> BoundProgram:
    """Return `program` bound to the tensors that `module` has now. forward: the module's unplanned
    one; signature: of the module now, with the constants of `program`; None: it is computed."""
    interface, values = program.interface, program.plan.graph.values
    parameters = dict(parts_of(module.named_parameters(remove_duplicate=False)))
    buffers = dict(parts_of(module.named_buffers(remove_duplicate=False)))
    tensors = (
        *(parameters[name] for name, _ in interface.parameters),
        *(buffers[name] for name, _ in interface.buffers),
    )
    named = {i: name for i, (name, _) in enumerate(interface.parameters)}
    early = (i for i in program.executable.early if i in named)
    unhooked = tuple(tensors[i] for i in early if named[i] not in program.hooked)
    signature = signature or module_signature(module, forward, program.constants, interface.reads)
    inner = ((wrapper, parts) for entry in signature.entries for wrapper, parts in entry.inner)
    of = {id(part): wrapper for wrapper, parts in inner for part in parts}
    wrappers = {i: of[id(tensor)] for i, tensor in enumerate(tensors) if id(tensor) in of}
    residents = interface.residents
    sharing = Sharing.of(
        residents,
        [values[v].data for v in residents],
        range(len(tensors), len(tensors) + len(interface.inputs)),
        tuple(residents.index(v) for v in interface.mutated),
    )
    return BoundProgram(program, signature, tensors, wrappers, sharing, unhooked)


def known_signature(
    bounds: Iterable[BoundProgram], program: PlannedProgram
) -> ModuleSignature | None:
    """Return the latest signature of `bounds` that holds for the module as it is now, from a
    program with the same constants as `program`, which reads the same; None if there is none."""
    constants, reads = [*map(id, program.constants)], program.interface.reads
    same = (
        b.signature
        for b in bounds
        if [*map(id, b.program.constants)] == constants and b.signature.reads == reads
    )
    latest = {id(signature): signature for signature in same}
    return next((one for one in reversed(latest.values()) if one.holds()), None)


def matching(candidates: Sequence[BoundProgram], leaves: Sequence[Any]) -> BoundProgram | None:
    """Return the latest of the programs that is for a call with these leaves, None if none is."""
    for bound in reversed(candidates):
        if bound.holds(leaves):
            return bound
    return None


def rebind(
    module: nn.Module, forward: Callable[..., Any], programs: dict[Any, list[BoundProgram]]
) -> None:
    """Replace programs in `programs` (kind of call -> programs) whose module has other tensors of
    the same description now (functional_call, load_state_dict(assign=True)) by ones bound to these,
    so that the former tensors can be freed."""
    held = {id(b.signature): b.signature for bounds in programs.values() for b in bounds}
    others = {
        number: signature
        for number, signature in held.items()
        if not signature.holds() and holds_for_others(signature)
    }
    new_signatures: dict[int, ModuleSignature] = {}
    for bounds in programs.values():
        for position, bound in enumerate(bounds):
            number = id(bound.signature)
            if number in others:
                bounds[position] = bind(module, forward, bound.program, new_signatures.get(number))
                new_signatures[number] = bounds[position].signature


def run(
    bound: BoundProgram,
    call: Any,
    leaves: Sequence[Any],
    replan: Replan,
    pool: GraphPool | None = None,
) -> Any:
    """Run a call by its plan; return what the forward would return, and fill containers of the
    caller's as it would. call: (args, kwargs); leaves: theirs, flattened; replan: returns the
    Executable for incoming gradients in other strides than planned, when backward meets them; pool:
    where it is replayed as CUDA graphs, if it is."""
    program = bound.program
    executable = program.executable
    if pool is not None:
        executable = pool.executable(bound, program)
    with without_default_device():
        tensors = autograd.call(executable, bound.residents(leaves), bound.wrappers, replan)
    tensor_at = dict(zip(program.interface.results, tensors, strict=True))
    outputs = program.interface.outputs
    result_leaves = [
        tensor_at[o.first]
        if o.value is not None
        else (stand_in(o.literal) if isinstance(o.literal, Unmade) else o.literal)
        for o in outputs
    ]
    return returned(result_leaves, program.output_spec, call, leaves)
