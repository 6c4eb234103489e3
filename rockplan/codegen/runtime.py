"""Runtime: executes the functions of a plan inside autograd.

One `_Seam` for each backward slice, chained by tokens of zero elements, and one `_Outputs` for
the results: the engine runs the slices in order and hands the gradients of each slice on at once.
Activations and inner gradients never travel through autograd: they live in the Frame of the call,
so several calls can be in flight, and dropping the outputs frees everything.
source: DESIGN, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rockplan.codegen import random_state
from rockplan.codegen.emit import Code, emit
from rockplan.codegen.load import Functions, SliceFunction, load
from rockplan.errors import BackwardError
from rockplan.graph import CDGraph
from rockplan.interface import Interface, OutputLeaf
from rockplan.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Executable:
    """A plan ready to run.

    targets: for each backward slice, positions among the residents of the tensors whose
    gradients it returns; outputs: leaves of the result that are tensors; tangent_strides: for
    each of them, the strides that the plan expects of its incoming gradient, None if it is not
    differentiated; devices: device types that the graph computes on.
    """

    code: Code
    functions: Functions
    targets: tuple[tuple[int, ...], ...]
    outputs: tuple[OutputLeaf, ...]
    tangent_strides: tuple[tuple[int, ...] | None, ...]
    devices: tuple[str, ...]
    backward_ignores_autocast: bool


def build(graph: CDGraph, interface: Interface, schedule: Schedule, name: str) -> Executable:
    """Generate and load the code of a plan."""
    code = emit(graph, interface, schedule)
    position = {v: i for i, v in enumerate(interface.residents)}
    outputs = tuple(o for o in interface.outputs if o.value is not None)
    return Executable(
        code=code,
        functions=load(code, interface, name),
        targets=tuple(tuple(position[t] for t in slice_) for slice_ in code.handed),
        outputs=outputs,
        tangent_strides=tuple(
            None if o.tangent is None else graph.values[o.tangent].spec.stride for o in outputs
        ),
        devices=tuple(sorted({v.spec.device.split(":")[0] for v in graph.values})),
        backward_ignores_autocast=interface.backward_ignores_autocast,
    )


class Frame:
    """State of one call: what the generated code keeps between its functions."""

    __slots__ = (
        "__weakref__",
        "_replay",
        "_tangents",
        "_versions",
        "executable",
        "next_slice",
        "residents",
        "saved",
    )

    def __init__(self, executable: Executable, residents: Sequence[torch.Tensor]) -> None:
        self.executable = executable
        self.residents: Sequence[torch.Tensor | None] = residents
        self.next_slice = 0
        self.saved: dict[str, torch.Tensor] = {}
        self._tangents: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._replay: random_state.State | None = None

    def save_generator_state(self, name: str, device: str) -> None:
        self.saved[name] = random_state.save(device)

    def begin_replay(self, name: str, device: str) -> None:
        self._replay = random_state.begin(self.saved[name], device)

    def end_replay(self) -> None:
        """Put the generator back; also called when a replayed operation fails."""
        if self._replay is not None:
            random_state.end(self._replay)
            self._replay = None

    def put_tangents(self, tangents: tuple[torch.Tensor, ...]) -> None:
        self._tangents = tangents

    def take_tangents(self) -> tuple[torch.Tensor, ...]:
        tangents, self._tangents = self._tangents, ()
        return tangents

    def note_versions(self) -> None:
        """Remember the versions of all tensors that the backward phase reads, and let go of
        those that it does not read."""
        checked = frozenset(self.executable.code.checked)
        self.residents = [r if i in checked else None for i, r in enumerate(self.residents)]
        self._versions = self._current_versions()

    def check_versions(self) -> None:
        if self._current_versions() != self._versions:
            raise BackwardError(
                "a parameter, input or output that the backward pass needs was modified in place "
                "after the forward pass (for example by optimizer.step() before backward); "
                "gradients would be wrong. Call backward first, or clone the tensor"
            )

    def _current_versions(self) -> tuple[int, ...]:
        read = [t for t in (*self.residents, *self.saved.values()) if t is not None]
        return tuple(t._version for t in read if not t.is_inference())


def _execute(
    frame: Frame, function: SliceFunction, guard: Callable[[], Any]
) -> tuple[torch.Tensor, ...]:
    """Run generated code with the kernels of eager: below autograd, gradient mode on (some
    kernels look at it), and autocast off, because its casts are operations of the graph.

    guard: the dispatch keys to skip. The forward keeps version counters. The backward does not:
    a gradient must not be known as a view, or autograd could not add to it in place.
    """
    try:
        for device_type in frame.executable.devices:
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    return _execute(frame, function, guard)
        with torch.enable_grad(), guard():
            return function(frame)
    finally:
        frame.end_replay()


class _Seam(torch.autograd.Function):
    """The end of one backward slice, where its gradients are handed to autograd."""

    @staticmethod
    def forward(
        ctx: Any, frame: Frame, number: int, token: torch.Tensor | None, *targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.frame = frame
        ctx.number = number
        ctx.is_first = token is None
        ctx.set_materialize_grads(False)
        device = targets[0].device if token is None else token.device
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor | None) -> tuple[Any, ...]:
        frame: Frame = ctx.frame
        _check_turn(frame, ctx.number)
        frame.next_slice += 1
        gradients = _execute(
            frame,
            frame.executable.functions.backward[ctx.number],
            torch._C._AutoDispatchBelowADInplaceOrView,
        )
        return (None, None, None if ctx.is_first else token, *gradients)


class _Outputs(torch.autograd.Function):
    """The results of the module; its backward only takes the incoming gradients in, so that the
    first slice can free them as soon as it has used them."""

    @staticmethod
    def forward(
        ctx: Any, frame: Frame, tensors: list[torch.Tensor], token: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.frame = frame
        ctx.token_device = token.device
        ctx.set_materialize_grads(False)
        outputs = tuple(t.detach() for t in tensors)
        leaves = frame.executable.outputs
        constant = [t for t, o in zip(outputs, leaves, strict=True) if not o.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        frame: Frame = ctx.frame
        if torch.is_grad_enabled():
            raise BackwardError(
                "a planned module cannot be differentiated twice (create_graph=True); "
                "use the original module for second derivatives"
            )
        _check_turn(frame, 0)
        _check_autocast(frame.executable)
        frame.check_versions()
        frame.put_tangents(_tangents(frame.executable, gradients))
        return None, None, torch.empty(0, device=ctx.token_device)


def _check_turn(frame: Frame, number: int) -> None:
    if frame.next_slice != number:
        raise BackwardError(
            "backward through a planned module a second time: what it saved is freed by the "
            "first backward pass (retain_graph=True is not supported). Run the forward again, "
            "or add the losses before one backward"
        )


def _check_autocast(executable: Executable) -> None:
    under_autocast = any(torch.is_autocast_enabled(d) for d in executable.devices)
    if under_autocast and not executable.backward_ignores_autocast:
        raise BackwardError(
            "backward of this module runs other operations under autocast than without, and was "
            "planned without, as PyTorch recommends: call backward() after the autocast block"
        )


def _tangents(
    executable: Executable, gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, ...]:
    """Incoming gradients of the outputs that the plan differentiates, with the strides that
    its kernels were chosen for (an expanded gradient, as of sum(), is written out)."""
    found: list[torch.Tensor] = []
    for position, (strides, gradient) in enumerate(
        zip(executable.tangent_strides, gradients, strict=True)
    ):
        if (strides is None) != (gradient is None):
            expected = "no gradient" if strides is None else "a gradient"
            raise BackwardError(
                f"output tensor {position} of the module was planned with {expected} in the "
                "backward pass, and got the opposite. Results with scalars (a loss) are "
                "differentiated through those alone, others through every output; for another "
                "choice plan with Options(differentiated=...)"
            )
        if gradient is not None and strides is not None:
            if gradient.stride() != strides:
                gradient = torch.empty_strided(
                    gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
                ).copy_(gradient)
            found.append(gradient)
    return tuple(found)


def call(executable: Executable, residents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the forward phase and hang the backward slices into autograd."""
    frame = Frame(executable, residents)
    outputs = list(
        _execute(frame, executable.functions.forward, torch._C._AutoDispatchBelowAutograd)
    )
    frame.note_versions()
    token: torch.Tensor | None = None
    for number in reversed(range(len(executable.targets))):
        targets = [residents[i] for i in executable.targets[number]]
        token = _Seam.apply(frame, number, token, *targets)
    found = _Outputs.apply(frame, outputs, token)
    return list(found)
