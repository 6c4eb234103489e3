"""PlannedProgram: one plan with the code that runs it, for one kind of call.

takes: a plan, and which of its values are parameters, buffers, inputs and results. returns: a
program that can be bound to the tensors of a module (`bound_program`), copied and pickled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rockplan.codegen.executable import Executable, build
from rockplan.errors import CaptureError
from rockplan.graph_builder.costs.open_workspaces import OpenWorkspaces
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.python_state import trees
from rockplan.runtime.differences import NOTHING_SAID, DescribedCall
from rockplan.runtime.open_program import OpenProgram
from rockplan.values.columns import aligned
from rockplan.values.interface import Incoming, Interface, Precedent, Strides
from rockplan.values.literals import picklable
from rockplan.values.plan import Plan
from rockplan.values.sizes import resized


@dataclass(frozen=True, slots=True, eq=False)
class PlannedProgram:
    """One plan with everything that running it on one kind of call takes.

    hooked: names of parameters that had hooks when it was planned: their gradients wait as far as
    the budget has room; call: the planned call in words; host_path: folder of what it pages to the
    host, on the CPU; is_taken_over: its plan is a known one, as it was or adapted; open: of a
    program for calls of several sizes. Copies share everything but the constants; a pickle holds
    the plan as data, and the code is generated again from it.
    """

    plan: Plan
    interface: Interface
    executable: Executable
    constants: tuple[torch.Tensor, ...]
    output_spec: trees.TreeSpec
    hooked: frozenset[str]
    call: DescribedCall = NOTHING_SAID
    host_path: str | None = None
    is_taken_over: bool = False
    open: OpenProgram | None = None

    def at(self, sizes: tuple[int, ...], limit_bytes: int) -> PlannedProgram:
        """Return the program for calls of these sizes, which shares its code. limit_bytes: their
        budget."""
        assert self.open is not None
        numbers = self.open.few.at(sizes)
        outputs = resized(self.interface.outputs, numbers)
        return replace(
            self,
            plan=replace(self.plan, budget_bytes=limit_bytes),
            interface=replace(self.interface, outputs=outputs),
            executable=self.executable.at(sizes, numbers),
        )

    @property
    def plan_here(self) -> Plan:
        """The plan at the sizes of the call that this program is for."""
        sizes = self.executable.sizes
        if self.open is None or sizes == self.interface.sizes_in(self.plan.graph):
            return self.plan
        return self.open.plan_at(self.plan, sizes)

    @property
    def is_of_this_process(self) -> bool:
        """True if the code exchanges data with process groups, whose names are those of this
        process, or calls functions given to `rockplan.opaque`, which every process registers
        anew."""
        if self.interface.distributed or self.plan.graph.groups:
            return True
        return any(op.startswith(f"{OPAQUE}.") for _, op in self.executable.code.operators)

    @property
    def incoming(self) -> dict[int, Strides]:
        """The outputs that its backward phase starts from, with the strides of their gradients."""
        pairs = zip(self.interface.results, self.executable.pattern, strict=True)
        return {position: strides for position, strides in pairs if strides is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedProgram:
        return replace(self, constants=copy.deepcopy(self.constants, memo))

    def __str__(self) -> str:
        """Return a line for each tensor passed to the code, for each result, and for each backward
        slice; then the code."""
        interface, values = self.interface, self.plan.graph.values
        names = [
            *(f"parameter {name}" for name, _ in interface.parameters),
            *(f"buffer {name}" for name, _ in interface.buffers),
            *(f"input {position}" for position, _ in interface.inputs),
            *(f"constant {position}" for position, _ in enumerate(interface.constants)),
        ]
        residents = zip(names, interface.residents, strict=True)
        results = zip(interface.results, self.executable.pattern, strict=True)
        rows = [
            *(
                (f"residents[{i}]", name, f"{values[v].spec.dtype} {values[v].spec.shape}")
                for i, (name, v) in enumerate(residents)
            ),
            *(
                (f"results[{i}]", f"leaf {leaf}", f"gradient in strides {strides or 'none'}")
                for i, (leaf, strides) in enumerate(results)
            ),
            *(
                (f"backward_{i}", "hands over", ", ".join(names[t] for t in targets) or "nothing")
                for i, targets in enumerate(self.executable.targets)
            ),
        ]
        return "\n".join([*aligned(rows), "", self.executable.code.source])

    def __reduce__(self) -> tuple[Any, ...]:
        spec = picklable(self.output_spec)
        made_of = (self.plan, self.interface, self.constants, spec, self.hooked, self.call)
        return build_program, (*made_of, self.host_path)


def build_program(
    plan: Plan,
    interface: Interface,
    constants: tuple[torch.Tensor, ...],
    output_spec: trees.TreeSpec,
    hooked: frozenset[str] = frozenset(),
    call: DescribedCall = NOTHING_SAID,
    host_path: str | None = None,
    workspaces: OpenWorkspaces | None = None,
) -> PlannedProgram:
    """Generate the code of `plan` and return the program that runs it. interface: which values are
    parameters, inputs and results; workspaces: as for `OpenProgram.of`; the others as in
    `PlannedProgram`.

    Raises HostMemoryError if the host has no room for what the plan pages.
    """
    name = plan.graph_digest[:8]
    executable = build(plan.graph, interface, plan.schedule, name, host_path=host_path)
    made_of = (plan, interface, executable, constants, output_spec, hooked, call)
    opened = None
    if interface.sizes.symbols:
        opened = OpenProgram.of(plan.graph, interface, plan.schedule, plan.in_flight, workspaces)
    return PlannedProgram(*made_of, host_path=host_path, open=opened)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """One call of a module. incoming, unread: what its backward pass starts from, and leaves that
    are believed to be unread, as in `graph_builder.capture`."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    incoming: Incoming | Precedent | None = None
    unread: frozenset[int] = frozenset()


MakeProgram = Callable[[ModuleCall], PlannedProgram]
OnRefused = Callable[[ModuleCall, CaptureError], None]
"""What is done if the first call in training cannot be planned; then the original runs."""
