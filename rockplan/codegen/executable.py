"""Executable: a plan as loaded functions, and the frame that they run in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from rockplan.codegen import rng_replay
from rockplan.codegen.emit import Code, emit
from rockplan.codegen.load import Functions, load
from rockplan.codegen.result_aliasing import Relations, relations
from rockplan.paging.arenas import pool_of
from rockplan.paging.pages import Layout, Pages
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.interface import Interface, OutputLeaf, PlacedStrides, Strides
from rockplan.values.schedule import Schedule
from rockplan.values.sizes import resized

Made = TypeVar("Made")

Pattern = tuple[Strides | None, ...]
"""For each output tensor the strides of its incoming gradient, None if it gets none."""


@dataclass(frozen=True, slots=True)
class Executable:
    """A plan ready to run.

    targets: for each backward slice, positions among the residents of the tensors whose gradients
    it returns; specs: of those gradients that are DTensors, () if none is; distributed: positions
    of residents that are DTensors; outputs: leaves of the result that are tensors, one for each
    tensor object; relations: how these are related; pattern: strides of the incoming gradients that
    the plan was made for; devices, device_types: where the graph computes; random: it draws random
    numbers; early: positions of targets that are read after their complete gradient was handed
    over; again: builds the plan for a forward phase that runs once more, and so changes no buffers
    (raises BackwardError if that is impossible). layout: of the storages that it pages to the host,
    if any. sizes: of the calls that it runs, as in `Interface.sizes`.
    """

    code: Code
    functions: Functions
    targets: tuple[tuple[int, ...], ...]
    specs: tuple[tuple[Any, ...], ...]
    distributed: tuple[int, ...]
    outputs: tuple[OutputLeaf, ...]
    relations: Relations
    pattern: Pattern
    devices: tuple[str, ...]
    device_types: tuple[str, ...]
    random: bool
    early: tuple[int, ...]
    backward_ignores_autocast: bool
    again: Callable[[], Executable]
    layout: Layout | None
    sizes: tuple[int, ...] = ()

    def at(self, sizes: tuple[int, ...], numbers: Mapping[str, int | float]) -> Executable:
        """Return the same code for calls of other sizes. numbers: expression -> its value. Raises
        HostMemoryError as `build`."""
        return replace(
            self,
            relations=resized(self.relations, numbers),
            pattern=resized(self.pattern, numbers),
            again=lambda: self.again().at(sizes, numbers),
            layout=self.layout and self.layout.at(numbers),
            sizes=sizes,
        )


@paused_collection()
def build(
    graph: CDGraph,
    interface: Interface,
    schedule: Schedule,
    name: str,
    again: bool = False,
    host_path: str | None = None,
) -> Executable:
    """Generate and load the code of a plan. name: shown in tracebacks; again: for a forward phase
    that runs once more; host_path: a folder for what it pages to the host, None for memory.

    Raises HostMemoryError if host memory is too small, InvalidInput as `arenas.pool_of`.
    """
    code = emit(graph, interface, schedule, again)
    position = {v: i for i, v in enumerate(interface.residents)}
    outputs = tuple(interface.outputs[i] for i in interface.results)
    targets = tuple(tuple(position[t] for t in slice_) for slice_ in code.handed)
    on_device = (v for v in graph.values if graph.data[v.data].kind is not DataKind.HOST)
    devices = {v.spec.device for v in on_device}
    storages = [graph.values[v].data for v in interface.residents]
    last_read = {storages[r]: number for number, reads in enumerate(code.read) for r in reads}
    last_handed = {t: number for number, slice_ in enumerate(targets) for t in slice_}
    early = [t for t, n in last_handed.items() if n < last_read.get(storages[t], -1)]
    layout, specs = None, dict(interface.distributed)
    if code.pages:
        (device,) = {device for _, _, device in code.pages}  # several were refused before
        pages = ((name, size_bytes) for name, size_bytes, _ in code.pages)
        layout = Layout.of(pages, pool_of(device, host_path))
        if not again:
            layout.reserve()
    return Executable(
        code=code,
        functions=load(code, interface, f"{name} again" if again else name, graph.kernels),
        targets=targets,
        specs=tuple(tuple(map(specs.get, slice_)) for slice_ in code.handed) if specs else (),
        distributed=tuple(position[value] for value, _ in interface.distributed),
        outputs=outputs,
        relations=relations(graph, interface),
        pattern=tuple(_strides(graph, output) for output in outputs),
        devices=tuple(sorted(devices)),
        device_types=tuple(sorted({d.split(":")[0] for d in devices})),
        random=any(n.random for n in graph.nodes),
        early=tuple(sorted(early)),
        backward_ignores_autocast=interface.backward_ignores_autocast,
        again=functools.cache(
            functools.partial(build, graph, interface, schedule, name, True, host_path)
        ),
        layout=layout,
        sizes=interface.sizes_in(graph),
    )


def _strides(graph: CDGraph, output: OutputLeaf) -> Strides | None:
    if output.tangent is None:
        return None
    strides, spec = graph.values[output.tangent].spec.stride, output.tangent_spec
    return strides if spec is None else PlacedStrides(strides, spec)


class Frame(Pages):
    """State that the generated functions share during one run of them."""

    __slots__ = ("_replay", "_tangents", "copies", "first", "residents", "saved", "sizes")

    def __init__(self, residents: tuple[torch.Tensor, ...], sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.residents = residents
        self.sizes = sizes
        self.saved: dict[str, torch.Tensor] = {}
        self.copies: tuple[torch.Tensor, ...] = ()
        self.first: tuple[torch.Tensor | None, ...] = ()
        self._tangents: tuple[torch.Tensor, ...] = ()
        self._replay: tuple[torch.Generator, torch.Tensor] | None = None

    def __del__(self) -> None:
        self.let_go_of_pages(self.saved)

    def save_generator_state(self, name: str, device: str) -> None:
        self.saved[name] = rng_replay.save(device)

    def begin_replay(self, name: str, device: str) -> None:
        generator = rng_replay.generator_of(device)
        self._replay = generator, generator.get_state()
        generator.set_state(self.saved[name])

    def end_replay(self) -> None:
        """Put the generator back; also called when a replayed operation fails."""
        if self._replay is not None:
            generator, state = self._replay
            generator.set_state(state)
            self._replay = None

    def put_tangents(self, tangents: tuple[torch.Tensor, ...]) -> None:
        self._tangents = tangents

    def take_tangents(self) -> tuple[torch.Tensor, ...]:
        tangents, self._tangents = self._tangents, ()
        return tangents


def run_forward(executable: Executable, frame: Frame) -> tuple[torch.Tensor, ...]:
    """Run the forward phase; return the results. Version counters count, as in eager."""
    frame.layout = executable.layout
    return _run(
        executable, frame, executable.functions.forward, torch._C._AutoDispatchBelowAutograd
    )


def run_slices(executable: Executable, frame: Frame, run: range) -> list[torch.Tensor]:
    """Run a run of backward slices; return their gradients. They run without version counters and
    views: autograd could not add in place to a gradient that counts as a view."""
    functions = executable.functions.backward

    def slices(frame: Frame) -> list[torch.Tensor]:
        return [gradient for number in run for gradient in functions[number](frame)]

    gradients = _run(executable, frame, slices, torch._C._AutoDispatchBelowADInplaceOrView)
    if run.stop == len(functions):
        frame.let_go_of_pages()
    return gradients


def _run(
    executable: Executable, frame: Frame, function: Callable[[Any], Made], guard: Callable[[], Any]
) -> Made:
    """guard: skips autograd's dispatch keys. Gradient mode is on (some kernels look at it), and
    autocast off, since its casts are in the graph. If the function raises, copies to the host are
    ended first."""
    for device_type in executable.device_types:
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return _run(executable, frame, function, guard)
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        # Functions that classes of parameters override ran while the forward was recorded.
        with guard(), torch._C.DisableTorchFunctionSubclass():
            return function(frame)
    except BaseException:
        frame.end_copies()
        raise
    finally:
        torch._C._set_grad_enabled(before)
        frame.end_replay()
