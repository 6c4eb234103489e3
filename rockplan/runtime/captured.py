"""Captured: plans as CUDA graphs, one of the forward and one of the backward phase.

takes: a program bound to the tensors of a module. returns: its Executable, with functions that
replay the generated code where that is right, and run it where it is not. guarantees: no replay
writes over memory that somebody can still read. Results, gradients, and what a call keeps for its
backward pass lie in one pool for each planned module; as long as one of them is alive, in whatever
variable, calls run by the code, on memory of their own. To autograd and to all checks of a call a
replayed one is like any other, and a second backward pass runs the code.

The first call of a kind runs by the code, and so warms up; the next is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rockplan.codegen import rng_replay
from rockplan.codegen.executable import Executable, Frame, run_forward, run_slices
from rockplan.graph_builder.operators.facts import facts_of, resolve
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.graph_builder.recorded.specs import spanned
from rockplan.python_state.hooks import has_hooks
from rockplan.runtime import carving
from rockplan.runtime.program import PlannedProgram
from rockplan.values.graph import is_kernel, refs
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan

Tensors = Sequence[torch.Tensor]
LOG = logging.getLogger("rockplan")

COPIED_BYTES = 65536
"""Results up to this size are copied out of the pool, and may live as long as they like."""

MOST_KINDS = 8
"""Kinds of call of a module that are recorded: each keeps arguments, results and gradients."""

ALIGNED_BYTES = 256
"""Kernels may be chosen by how far an address is aligned; recorded arguments are to this."""

_IN_FLIGHT = "in flight"
"""Name in `Frame.saved` of what tells that a replayed forward waits for its backward."""

_INDEXED = ("aten.index.", "aten.index_put", "aten._index_put_impl_")
_MASKS = ("torch.bool", "torch.uint8")
"""Indices of these dtypes are counted before kernels are launched."""


def why_not(plan: Plan, interface: Interface) -> str:
    """Return why no call of a plan can be replayed as CUDA graphs; '' if nothing is known that
    speaks against it."""
    values, residents = plan.graph.values, interface.residents
    numbers = {v for v in interface.constants if not values[v].spec.shape}
    devices = sorted({v.spec.device for v in values if v.index not in numbers})
    if plan.trips:
        return "it pages activations to the host, which Python does at each step"
    if len(devices) != 1 or not devices[0].startswith("cuda"):
        return f"it computes on {' and '.join(devices)}, and a graph runs on one CUDA device"
    if plan.graph.groups or interface.distributed:
        return "it exchanges data between processes"
    for call in (call for node in plan.graph.nodes for call in (*node.calls, *node.recalls)):
        takes_mask = any(values[ref.index].spec.dtype in _MASKS for ref in refs(call)[1:])
        if not is_kernel(call.op) and (reason := _why_not(call.op, takes_mask)):
            return f"{call.op} {reason}"
    changed = {values[v].data for v in interface.mutated}
    if any(values[v].data in changed for _, v in interface.inputs):
        return "it changes an argument in place, and a graph reads copies of arguments"
    leaves = (interface.outputs[i].value for i in interface.results)
    results = [values[v].data for v in leaves if v is not None]
    if len({*results}.difference(values[v].data for v in residents)) < len(results):
        return "results share memory with one another, with arguments or with parameters"
    return ""


@functools.cache
def _why_not(op: str, takes_mask: bool) -> str:
    facts, tags = facts_of(op), resolve(op).tags
    if op.startswith(f"{OPAQUE}."):
        return "is Python, which has to run at each step"
    if facts.effect:
        return f"may act outside of the step: {facts.effect}"
    by_values = takes_mask if op.startswith(_INDEXED) else facts.shape_by_values
    if by_values or torch.Tag.data_dependent_output in tags:
        return "has a result for which the host waits"
    if torch.Tag.cudagraph_unsafe in tags:
        return "is marked as cudagraph_unsafe"
    return "draws from a state of cuDNN" if op.startswith("aten._cudnn_rnn.") else ""


class GraphPool:
    """The graphs of one planned module, and the memory that they share. lock: held while a replay
    begins; last_stream: of the last replay, for which the next one waits; copies_gradients: some
    were alive when the next forward began, so that later ones are copied out."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last_stream: Any = None
        self.copies_gradients = False
        self._memory: Any = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._kinds = weakref.WeakKeyDictionary[Any, Executable]()
        self._calls: list[tuple[weakref.ref[_KindOfCall], _CallGraphs]] = []
        self._said: set[str] = set()

    def __deepcopy__(self, memo: object) -> GraphPool:
        return GraphPool()

    def executable(self, bound: Any, program: PlannedProgram) -> Executable:
        """Return what a call of `bound`, `program` on the tensors of a module, is to run."""
        with self.lock:
            if bound not in self._kinds:
                self._kinds[bound] = _KindOfCall(self, program).replaying()
            return self._kinds[bound]

    @property
    def recorded(self) -> list[_CallGraphs]:
        """Of kinds that can be called, or of which somebody holds memory."""
        self._calls = [(of, call) for of, call in self._calls if of() is not None or call.held()]
        return [call for _, call in self._calls]

    def record(self, kind: _KindOfCall, *given: Any) -> _CallGraphs:
        """Record a call of a kind, in the memory that all of them share. given: of _CallGraphs.
        Raises RuntimeError where that is impossible."""
        device = torch.device("cuda", torch.cuda.current_device())
        # One for all kinds: PyTorch gives memory again only to the stream that let go of it.
        stream = self._streams.setdefault(device.index, torch.cuda.Stream())

        def make(memory: Any, before: carving.Before = lambda: None) -> _CallGraphs:
            self._memory = memory
            return _CallGraphs(memory, stream, before, *given)

        try:
            # PyTorch's pool is gone with the last of its graphs.
            call = make(self._memory) if self.recorded else carving.least(make, device)
        except Exception:  # of whatever runs here for the first time
            with contextlib.suppress(RuntimeError):  # open where a capture became invalid
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
            raise
        self._calls.append((weakref.ref(kind), call))
        return call

    def say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            LOG.warning("a call runs the code of its plan, not as a CUDA graph: %s", why)


class _KindOfCall:
    """Calls of one program. recorded: its graphs, None as long as there are none."""

    def __init__(self, pool: GraphPool, program: PlannedProgram) -> None:
        self.recorded: _CallGraphs | None = None
        # Not strongly: memory of the device is not to wait for the collector of cycles.
        self._pool, self._program = weakref.ref(pool), program
        self._code = program.executable
        name = self._code.devices[-1]  # after that of numbers on the host
        self._device, self._generator = torch.device(name), rng_replay.generator_of(name)
        self._never = why_not(program.plan, program.interface)
        self._is_warm = False
        self._offsets: dict[str, int] = {}

    def replaying(self) -> Executable:
        """Return the program's Executable with the functions of this class."""
        of: Any = self._code.functions
        backward = (functools.partial(self._backward, n) for n, _ in enumerate(of.backward))
        functions = replace(of, forward=self._forward, backward=tuple(backward))
        return replace(self._code, functions=functions)

    def _forward(self, frame: Frame) -> tuple[torch.Tensor, ...]:
        pool = self._pool()
        assert pool is not None
        if not self._is_warm and not self._never:
            return self._first(frame)
        with pool.lock:
            why = self._never or self._not_now(pool, frame)
            if not why and self.recorded is None:
                why = self._never = self._record(pool, frame)
            if self.recorded is not None and not why:
                stream = torch.cuda.current_stream(self._device)
                if pool.last_stream not in (None, stream):
                    stream.wait_stream(pool.last_stream)
                pool.last_stream = stream
                return self.recorded.forward(frame)
        pool.say(why)
        pool.copies_gradients |= why == _GRADIENTS
        return self._code.functions.forward(frame)

    def _backward(self, number: int, frame: Frame) -> tuple[torch.Tensor | None, ...]:
        if _IN_FLIGHT in frame.saved:
            assert self.recorded is not None
            gradients, pool = self.recorded.backward(number, frame), self._pool()
            if pool is None or not pool.copies_gradients:
                return gradients
            return tuple(g if g is None else g.clone() for g in gradients)
        made = self._code.functions.backward[number](frame)
        self._is_warm |= number + 1 == len(self._code.targets)
        return made

    def _first(self, frame: Frame) -> tuple[torch.Tensor, ...]:
        """Run the code, whose kernels are loaded and tuned then, and note how far from the
        beginning draws are that run again in the backward phase."""
        if not self._code.random or torch.cuda.is_current_stream_capturing():
            return self._code.functions.forward(frame)
        start, scratch = self._generator.get_offset(), self._generator.clone_state()
        outputs = self._code.functions.forward(frame)
        for name, saved in frame.saved.items():
            if saved.dtype is torch.uint8 and not saved.is_cuda:  # a state of the generator
                scratch.set_state(saved)
                self._offsets[name] = scratch.get_offset() - start
        return outputs

    def _not_now(self, pool: GraphPool, frame: Frame) -> str:
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is captured around it"
        if torch._C._len_torch_dispatch_stack():
            return "a TorchDispatchMode is active, which sees operators"
        if torch._C._autograd._profiler_enabled():
            return "a profiler is on, which sees operators"
        if torch.is_anomaly_enabled():
            return "torch.autograd.detect_anomaly is on"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "hooks on saved tensors are active, such as those of a checkpoint"
        residents = frame.residents
        if any(has_hooks(residents[t]) for targets in self._code.targets for t in targets):
            return "there are hooks on parameters, which run when a gradient is ready"
        for given in (residents[i] for i in _inputs(self._program.interface)):
            is_computed = given.is_floating_point() or given.is_complex()
            if is_computed and given.data_ptr() % ALIGNED_BYTES:
                return f"an argument's address is no multiple of {ALIGNED_BYTES}"
        if self.recorded is None and len(pool.recorded) == MOST_KINDS:
            return f"there are graphs of {MOST_KINDS} kinds of call already"
        if self.recorded is not None and (why := self.recorded.changed(residents)):
            return why
        return next(filter(None, (one.held() for one in pool.recorded)), "")

    def _record(self, pool: GraphPool, frame: Frame) -> str:
        """Return why that is not possible, '' if it is done."""
        own = self._generator.graphsafe_get_state()
        # The workspaces of cuBLAS come to lie in the pool, where nobody but these graphs uses them:
        # PyTorch keeps one for each stream, which others may have.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.device(self._device):
                self.recorded = pool.record(self, self._program, frame, self._offsets)
        except Exception as error:
            return f"it cannot be recorded: {str(error).partition(chr(10))[0]}"
        finally:
            self._generator.graphsafe_set_state(own)
            torch._C._cuda_clearCublasWorkspaces()
        return ""


class _PhaseGraph:
    """A graph with its generators: one with which it draws for the first time, and one for each
    draw that it makes again, which begins where the first one did. The user's own is never
    registered, so that no capture can leave it in a state in which it does not draw."""

    def __init__(self, own: torch.Generator, redraws: int) -> None:
        self.graph, self.own, self.first = torch.cuda.CUDAGraph(), own, own.clone_state()
        self.unused = [own.clone_state() for _ in range(redraws)]
        self.again: list[tuple[torch.Generator, str]] = []
        for clone in self.unused:
            self.graph.register_generator_state(clone)

    def recording(self, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.graph:
        """Return a context that records what is launched. Other threads may ask for memory then."""
        mode = "thread_local"
        self.own.graphsafe_set_state(self.first)
        return torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode=mode)

    def replay(self, begin: tuple[int, int], offsets: dict[str, int]) -> None:
        """begin: seed and offset of the user's generator when the forward began; offsets: of first
        draws from there, by the name of their state."""
        puts = [(self.first, self.own.initial_seed(), self.own.get_offset())]
        puts += [(clone, begin[0], begin[1] + offsets[name]) for clone, name in self.again]
        for generator, seed, offset in puts:
            generator.manual_seed(seed)
            generator.set_offset(offset)
        self.graph.replay()
        self.own.set_offset(self.first.get_offset())


class _RecordedFrame(Frame):
    """The frame of the code while it is recorded. graph: that records it now."""

    __slots__ = ("graph",)
    graph: _PhaseGraph

    def save_generator_state(self, name: str, device: str) -> None:
        self.saved[name] = torch.empty(0)

    def begin_replay(self, name: str, device: str) -> None:
        clone = self.graph.unused.pop()
        self.graph.again.append((clone, name))
        self.graph.own.graphsafe_set_state(clone)

    def end_replay(self) -> None:
        self.graph.own.graphsafe_set_state(self.graph.first)


class _CallGraphs:
    """The two graphs of one kind of call, with what they read and make."""

    def __init__(
        self,
        memory: Any,
        stream: torch.cuda.Stream,
        before: carving.Before,
        program: PlannedProgram,
        frame: Frame,
        offsets: dict[str, int],
    ) -> None:
        """Record them; nothing is computed. memory: handle of a pool of PyTorch's; before: called
        before each operator; frame: of a call. Raises RuntimeError, as PyTorch does, where that is
        impossible."""
        code, interface = carving.watched(program.executable, before), program.interface
        residents = [*frame.residents]
        self._inputs = _inputs(interface)
        self._addresses, self._flags = self._addresses_of(residents), _flags()
        self._changed = [residents[interface.residents.index(v)] for v in interface.mutated]
        self._arguments = [_static(residents[i], residents[i].stride()) for i in self._inputs]
        residents[self._inputs.start : self._inputs.stop] = self._arguments
        self._offsets = offsets
        self._generator = rng_replay.generator_of(code.devices[-1])
        self._forward, self._backward = (_PhaseGraph(self._generator, n) for n in code.code.redraws)

        run = _RecordedFrame(tuple(residents), code.sizes)
        run.graph = self._forward
        with self._forward.recording(memory, stream):
            self._results = run_forward(code, run)
        self._copies = run.copies
        kept = {t.untyped_storage()._cdata for t in run.saved.values()}
        storages = [t.untyped_storage()._cdata for t in self._results]
        self._read_later = [number for number, one in enumerate(storages) if one in kept]
        starts = zip(self._results, code.pattern, strict=True)
        self._tangents = [_static(t, [*s]) for t, s in starts if s is not None]  # type: ignore[misc]

        run.graph = self._backward
        run.put_tangents(tuple(self._tangents))
        with self._backward.recording(memory, stream):
            self._gradients = _gradients(code, run)
        again = {name for of in (self._forward, self._backward) for _, name in of.again}
        if not again <= offsets.keys():
            raise RuntimeError("draws run again that the forward has made and let go of")
        self._lend([*residents, *self._tangents])
        self._watch()

    def _lend(self, others: Tensors) -> None:
        """Let go of the memory of what is handed out, for other kinds of call to take as well. It
        stays as long as these graphs, or who has some of it. others: all that the graphs read."""
        graphs = self._forward.graph, self._backward.graph
        seen = {t.untyped_storage()._cdata for t in others}

        def lent(tensor: torch.Tensor) -> torch.Tensor:
            own, device = _plain(tensor).untyped_storage(), tensor.device
            if own._cdata in seen:
                raise RuntimeError("gradients or results share memory")
            seen.add(own._cdata)
            place: dict[str, Any] = {"data": (own.data_ptr(), False), "shape": (own.nbytes(),)}
            place |= {"typestr": "|u1", "version": 3}
            memory = types.SimpleNamespace(__cuda_array_interface__=place, graphs=graphs)
            made = torch.as_tensor(memory, device=device).view(tensor.dtype)
            return _alias(made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))

        self._results, self._copies = (
            tuple(map(lent, self._results)),
            tuple(map(lent, self._copies)),
        )
        self._gradients = [[g if g is None else lent(g) for g in of] for of in self._gradients]

    def _watch(self) -> None:
        """Remember how often the memory that is handed out is referred to while nobody has it."""
        self._token = torch.empty(1, device=self._results[0].device)
        gradients = [g for given in self._gradients for g in given if g is not None]
        results = [t for t in self._results if t.nbytes > COPIED_BYTES]
        groups = (
            *((_WAITING, [self._token]), (_GRADIENTS, gradients)),
            *((_RESULTS, results), (_BUFFERS, self._copies)),
        )
        handed = ((why, [t.untyped_storage() for t in given]) for why, given in groups)
        self._handed = [(why, own, _uses(own)) for why, own in handed]
        held = _alias(self._token)
        is_seen = self.held() == _WAITING
        del held
        if not is_seen or self.held():
            raise RuntimeError("this PyTorch does not tell who holds memory")

    def held(self) -> str:
        """Return what of the pool is in somebody's hands; '' if nothing is."""
        return next((why for why, own, uses in self._handed if _uses(own) != uses), "")

    def _addresses_of(self, residents: Tensors) -> list[Any]:
        """Of those that are read where they lie: arguments are copied. Of a number on the host,
        which becomes part of a graph, itself."""
        read = [t for i, t in enumerate(residents) if i not in self._inputs]
        return [t.data_ptr() if t.is_cuda else t.item() for t in read]

    def changed(self, residents: Tensors) -> str:
        """Return what else is not as it was recorded. residents: of a call."""
        if self._addresses_of(residents) != self._addresses:
            return "what it reads lies elsewhere than recorded, or is another number on the host"
        return "" if _flags() == self._flags else "PyTorch's precision or determinism is another"

    def forward(self, frame: Frame) -> tuple[torch.Tensor, ...]:
        """Replay the forward phase on the arguments of a call; return its results."""
        for static, i in zip(self._arguments, self._inputs, strict=True):
            _memory(static).copy_(_memory(frame.residents[i]))
        self._begin = self._generator.initial_seed(), self._generator.get_offset()
        self._forward.replay(self._begin, self._offsets)
        torch.autograd.graph.increment_version(self._changed)
        frame.saved[_IN_FLIGHT] = _alias(self._token)
        frame.copies = tuple(map(_alias, self._copies))
        given = [
            _alias(t)
            if t.nbytes > COPIED_BYTES
            else _memory(t).clone().as_strided(t.shape, t.stride())
            for t in self._results
        ]
        # So that a change of one is noticed before backward begins.
        frame.saved |= {f"result {number}": given[number] for number in self._read_later}
        return tuple(given)

    def backward(self, number: int, frame: Frame) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a slice; before the first one the backward phase is replayed."""
        if number == 0:
            for static, tangent in zip(self._tangents, frame.take_tangents(), strict=True):
                _memory(static).copy_(_memory(tangent))
            self._backward.replay(self._begin, self._offsets)
        # Slices run without views: these are none, either, and autograd takes them as they are.
        gradients = tuple(g if g is None else g.detach() for g in self._gradients[number])
        if number + 1 == len(self._gradients):
            frame.saved.clear()
        return gradients


_WAITING = "one before it has not had its backward pass, and it would write over what that one kept"

_GRADIENTS = (
    "gradients of one before it are alive, where it would write. Later ones are copied out, which "
    "zero_grad before the forward, as it is by default, makes unnecessary"
)
_RESULTS = (
    f"a result of one before it, of more than {COPIED_BYTES >> 10} KiB, is alive, where it would "
    "write: let go of it first (del), or plan with Options(only_loss=True)"
)
_BUFFERS = "copies of buffers that one before it read are alive: let go of its results (del)"


def _gradients(code: Executable, frame: Frame) -> list[list[torch.Tensor | None]]:
    """Those of each slice. Several of one tensor are added up before anybody gets it, as autograd
    would: in the place of the first, where nobody else reads that."""
    of: dict[int, torch.Tensor] = {}
    slices: list[list[int | None]] = []
    for number, targets in enumerate(code.targets):
        slices.append([])
        made = run_slices(code, frame, range(number, number + 1))[::-1]
        for target in targets:
            slices[-1].append(None if target in of else target)
            of[-1] = torch.empty(0)  # which nobody else has
            if target not in of:
                of[target] = made.pop()
            elif _holders(of, target) == _holders(of, -1):
                of[target].add_(made.pop())
            else:
                of[target] = of[target] + made.pop()
    return [[None if t is None else of[t] for t in targets] for targets in slices]


def _holders(of: dict[int, torch.Tensor], target: int) -> tuple[int, int, bool]:
    """How many have a tensor and its memory; whether it is all of that."""
    held, memory = of[target], of[target].untyped_storage()
    uses = torch._C._storage_Use_Count(memory._cdata)
    return sys.getrefcount(held), uses, held.nbytes == memory.nbytes()


def _static(like: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Memory for a tensor that a graph reads."""
    size, of = spanned(like.shape, strides), _plain(like)
    return torch.empty(size, dtype=of.dtype, device=of.device).as_strided(like.shape, strides)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return it, if its memory has its elements as they are; otherwise raise RuntimeError."""
    is_resolved = not tensor.is_conj() and not tensor.is_neg()
    if is_resolved and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    raise RuntimeError("arguments, results or gradients are no plain tensors")


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All from its first element to its last."""
    return tensor.as_strided((spanned(tensor.shape, tensor.stride()),), (1,))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which it keeps, in a tensor that is no view to autograd."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return tensor.detach()


def _uses(storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, int]]:
    """A storage in Python is one object, whoever has it."""
    return [(torch._C._storage_Use_Count(one._cdata), sys.getrefcount(one)) for one in storages]


def _inputs(interface: Interface) -> range:
    """Where they are among the residents."""
    first = len(interface.parameters) + len(interface.buffers)
    return range(first, first + len(interface.inputs))


def _flags() -> tuple[object, ...]:
    """What decides which kernel an operator launches, where the same operators are planned."""
    read: Any = torch._C
    return (
        read._get_fp32_precision_getter("cuda", "matmul").replace("none", "ieee"),  # the default
        *(read._get_fp32_precision_getter("cuda", op) for op in ("conv", "rnn")),
        *(read._get_deterministic_algorithms(), read._get_cudnn_deterministic()),
        *(read._get_cudnn_benchmark(), read._get_cublas_allow_fp16_reduced_precision_reduction()),
        read._get_cublas_allow_bf16_reduced_precision_reduction(),
        *(read._get_cublas_allow_fp16_accumulation(), read._get_blas_preferred_backend()),
    )
