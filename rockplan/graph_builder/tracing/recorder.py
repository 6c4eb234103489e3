"""Recorder: every ATen call of a run over fake tensors, forward and backward, as values.

The recorder is the outermost dispatch mode above FakeTensorMode, below autograd and autocast: it
sees exactly the operators that eager PyTorch would execute, casts and saved-tensor detaches
included, and records them unchanged.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from rockplan.errors import CaptureError, UnsupportedModel
from rockplan.graph_builder.operators import casting, facts
from rockplan.graph_builder.operators.layouts import dense_strides, outermost_first
from rockplan.graph_builder.operators.rows import Effect
from rockplan.graph_builder.operators.symbols import hints, is_unknown, known_number
from rockplan.graph_builder.recorded.evaluate import flat_results
from rockplan.graph_builder.recorded.results import Results, fake_device
from rockplan.graph_builder.recorded.run import RecordedCall, RecordedValue, tensor_spec
from rockplan.graph_builder.tracing.addresses import Unwritten
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.source_lines import Where, torch_function, user_source
from rockplan.graph_builder.tracing.unwatched import Unwatched
from rockplan.python_state import distributed
from rockplan.python_state.leftovers import Leftovers
from rockplan.python_state.memory import is_trained_wrapper, is_wrapper_kind
from rockplan.python_state.walk import Walk
from rockplan.values.graph import Call, Phase, ValueRef
from rockplan.values.interface import Guard

# The question that C++ asks of fake tensors most often.
_DEVICE = torch.ops.prim.device.default
# Part of PyTorch's error for an operator of torch.library.custom_op without a fake.
_NO_RULE = "no fake impl registered"
_INDEX = torch.ops.aten.index.Tensor
_SLICE = torch.ops.aten.slice.Tensor
_IS_SET_TO = torch.ops.aten.is_set_to.default
_CTC_LOSS = torch.ops.aten._ctc_loss.Tensor
_RECURRENT = "torch.nn.modules.rnn."


def node_name(node: torch.autograd.graph.Node) -> str:
    """Return autograd's name of `node`. (For a custom function `node.name` may be an attribute that
    the function has set.)"""
    name: str = type(node).name(node)
    return name


DRAWS_PLAINLY = ("cpu",)
"""Types of devices where DTensor leaves the generator to the operator that draws."""

# Classes of tensors whose operators are recorded.
_PLAIN_KINDS = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_OPERATIONS = {
    "__torch_function__": torch._C._disabled_torch_function_impl,
    "__torch_dispatch__": torch._C._disabled_torch_dispatch_impl,
}


def why_not_planned(tensor: torch.Tensor, called: str) -> str | None:
    """The message for a tensor that plans cannot handle (sparse, nested, of a class with its own
    operators, a DTensor in unequal parts); None if it can. called: its name."""
    kind = type(tensor)
    if distributed.is_distributed(tensor):
        why = distributed.why_not_shown(distributed.spec_of(tensor))
        return NAMED["distributed tensor"].text(tensor=called, why=why) if why else None
    if tensor.is_nested:
        return NAMED["nested tensor"].text(tensor=called)
    if tensor.layout is not torch.strided:
        return NAMED["layout"].text(tensor=called, layout=tensor.layout)
    if overrides(kind, "__torch_dispatch__"):
        return NAMED["class of tensors"].text(tensor=called, kind=kind.__qualname__)
    return None


def is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both tensors have the same elements in memory, in the same order."""

    def memory(tensor: torch.Tensor) -> tuple[object, ...]:
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype)
        return (*place, tensor.shape, tensor.stride())

    return a is b or (a.layout is b.layout is torch.strided and memory(a) == memory(b))


@functools.cache
def overrides(kind: type, name: str) -> bool:
    """Return whether a class of tensors overrides operators (`__torch_dispatch__`), or functions of
    PyTorch (`__torch_function__`), whose Python runs while a forward is recorded."""
    own = (vars(k) for k in kind.__mro__ if k not in _PLAIN_KINDS)
    return any(o.get(name, _OPERATIONS[name]) is not _OPERATIONS[name] for o in own)


class Reader(Protocol):
    """Answers what depends on values."""

    def read(self, recorder: Recorder, call: Call, where: Where) -> object:
        """Return the Python value that a call reads from a tensor."""

    def read_all(self, recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real copy of a tensor."""

    def shaped(
        self,
        recorder: Recorder,
        func: OpOverload,
        args: Any,
        kwargs: Any,
        where: Where,
        unsized: Any,
    ) -> Any:
        """Return the fake result of an operator whose result shape depends on values. unsized: the
        result with unknown sizes, None if there is none."""


class Recorder(TorchDispatchMode):
    """Records calls.

    reader: decides what happens if Python reads a tensor's value, or a shape depends on it;
    leftovers: is told every tensor, since nobody may keep one. checkpoints: what the function of
    each checkpoint that eager runs again could reach before its first run. leaf_storages: those of
    parameters, buffers and inputs; given_values: how many values these are.
    """

    # Higher-order operators come here too, and are refused by name.
    supports_higher_order_operators = True

    def __init__(self, fake_mode: FakeTensorMode, reader: Reader, leftovers: Leftovers) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self._leftovers = leftovers
        self.reader = reader
        self.phase = Phase.FORWARD
        self.values: list[RecordedValue] = []
        self.calls: list[RecordedCall] = []
        self.constants: list[tuple[int, torch.Tensor]] = []
        self.guards: list[Guard] = []
        self.checkpoints: list[Walk] = []
        self.module_stack: list[str] = [""]
        self._had_history: dict[int, bool] = {}
        self.leaf_storages: frozenset[int] = frozenset()
        self.given_values = 0
        self.refused: CaptureError | None = None
        self._unwritten = Unwritten()
        self._results = Results(fake_mode)
        self._unwatched = Unwatched(
            lambda tensor: self.values[self.value(tensor)].storage, self._results.of
        )
        self._groups = distributed.MeshGroups()
        # Tensors and storages are known as long as somebody else holds them.
        self._index_of: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._storage_deaths: list[weakref.ref[torch.UntypedStorage]] = []
        self._fakes: list[torch.Tensor] = []
        self._sequence: list[int] = []
        self._sequence_place: list[tuple[str, str]] = []
        self._views: list[tuple[int, int, int]] = []
        self._base_of: dict[int, int] = {}
        # For the backward pass: number of storages before it, storages that its calls have made,
        # storages of the forward pass that a kernel would have overwritten.
        self._forward_storages = 0
        self._made_by_backward: set[int] = set()
        self._overwritten: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled under the recorder, and the guard against it takes as
        long as a call."""
        return False

    def is_active(self) -> bool:
        """Return whether a call of an operator would be recorded now."""
        return _get_current_dispatch_mode() is self

    def read_all(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor for a recorded one, None if nothing would be recorded now."""
        return self.reader.read_all(self, tensor) if self.is_active() else None

    def value(self, tensor: torch.Tensor) -> int:
        """Return the number of the value of `tensor`, of a DTensor that of its local tensor; a
        tensor never seen before gets a new one."""
        index = self._index_of.get(id(tensor))
        if index is None and distributed.is_distributed(tensor):
            self._note_spec(tensor)
            return self.value(tensor._local_tensor)  # type: ignore[attr-defined]
        if index is None:
            index = len(self.values)
            self._know(tensor, index)
            if not is_trained_wrapper(tensor):
                self._refuse_kind(tensor)
            storage = tensor.untyped_storage()
            size_bytes = known_number(storage.nbytes())
            made = RecordedValue(tensor_spec(tensor), self._storage(storage), size_bytes)
            self.values.append(made)
        return index

    def _know(self, tensor: torch.Tensor, index: int) -> None:
        """From now on the tensor is this value."""
        key, known = id(tensor), self._index_of

        def forget(_: object) -> None:
            if known.get(key) == index:
                del known[key]

        known[key] = index
        self._leftovers.made.append(weakref.ref(tensor, forget))

    def _storage(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage. When its last holder lets go (autograd, a variable of
        Python, a kernel in C++: they hold fake tensors as real ones), the last call says so."""
        key, known, calls = storage._cdata, self._storages, self.calls
        if key in known:
            return known[key]
        number = known[key] = len(self._storage_deaths)

        def end(_: object) -> None:
            del known[key]
            if calls:
                calls[-1] = replace(calls[-1], ends=(*calls[-1].ends, number))

        self._storage_deaths.append(weakref.ref(storage, end))
        return number

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._index_of

    def begin_forward(self) -> None:
        """Mark all values so far as the caller's: parameters, buffers and inputs. A fake storage
        grows with each tensor that shares it, so all its values get the final size in bytes."""
        size_bytes: dict[int, int] = {}
        for value in self.values:
            size_bytes[value.storage] = max(
                value.storage_bytes, size_bytes.get(value.storage, value.storage_bytes)
            )
        self.values[:] = [replace(v, storage_bytes=size_bytes[v.storage]) for v in self.values]
        self.leaf_storages = frozenset(v.storage for v in self.values)
        self.given_values = len(self.values)

    def refuse(self, error: CaptureError) -> NoReturn:
        """Raise `error`, and remember it: a model that catches it, and continues in another way
        than in eager execution, is refused all the same."""
        self.refused = self.refused or error
        raise error

    def refuse_here(self, message: str) -> NoReturn:
        """Refuse, with the place of the current call."""
        self.refuse(UnsupportedModel.at(*self.place(), message))

    def refuse_if_refused(self) -> None:
        """Raise the error that the model has caught, if any."""
        if self.refused is not None:
            raise self.refused

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record a call of an operator, and return its result. Operators of wrappers (DTensor) come
        again as those of inner tensors. Raises CaptureError if a plan cannot repeat the call."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # the most frequent call
            return fake_device(args[0])
        if any(map(is_wrapper_kind, types)):
            self._refuse_distributed(func, args, kwargs or {})
            return NotImplemented  # what the class calls with inner tensors comes here next
        try:
            # Saves the Python-level __torch_function__ of fake tensors.
            with torch._C.DisableTorchFunctionSubclass():
                return self._record(func, args, kwargs)
        except CaptureError as error:
            self.refuse(error)

    def _refuse_distributed(self, func: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> None:
        tensors = [t for t in facts.tensors((args, kwargs)) if distributed.is_distributed(t)]
        for tensor in tensors:
            self._note_spec(tensor)
        is_elsewhere = any(t.device.type not in DRAWS_PLAINLY for t in tensors[:1])
        if is_elsewhere and facts.is_random(func, args, kwargs):
            self.refuse(NAMED["draw of a distributed tensor"].at(*self.place(), operator=func))

    def _note_spec(self, tensor: torch.Tensor) -> None:
        self._groups.add(distributed.spec_of(tensor).mesh)
        if why := distributed.why_not_shown(distributed.spec_of(tensor)):
            self.refuse(NAMED["distributed tensor"].at(*self.place(), tensor="what", why=why))

    def _record(self, func: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func.namespace == "prim":
            return func(*args, **kwargs)
        where = self.place()
        self._refuse_unsupported(func, where)
        # Checked first: some fail with fake tensors.
        if kwargs.get("layout") not in (None, torch.strided):
            what = {"tensor": "what the forward makes", "layout": kwargs["layout"]}
            raise NAMED["layout"].at(*where, **what)
        if kwargs.get("generator") is not None:
            raise NAMED["generator"].at(*where, operator=func)
        args, kwargs, tensors = self._known(args, kwargs)
        if func is _IS_SET_TO:
            return is_same_memory(*args)
        if facts.facts_of(func).tells_python:
            self.refuse_unwritten(map(self.value, tensors), f"{func} at {where[1]} reads")
            return self.reader.read(self, self._call(func, args, kwargs), where)
        known = facts.facts_of(func)
        if known.casts_inside:
            # A mode is called without autocast.
            with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
                func = casting.as_called(func, known.casts_inside, not known.effect)
        called = func
        if self.phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()
            name = "" if node is None else node_name(node)
            func, args, kwargs = self._unwatched.call(func, args, kwargs, name)
            tensors = facts.tensors((args, kwargs))
        view = facts.out_of_place_view(func)
        if view is not None:
            return self._change_shape(func, view, args, kwargs, where)
        reads = tuple(self.value(t) for t in tensors)
        if self._overwritten and {self.values[v].storage for v in reads} & self._overwritten:
            raise NAMED["read of what was overwritten"].at(*where, operator=func)
        writes = tuple(self.value(t) for t in facts.written(func, args, kwargs))
        call = self._call(func, args, kwargs)
        try:
            result = self._result(func, args, kwargs)
            shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]
            sizes = (n for tensor in facts.tensors(result) for n in shape(tensor))
            if self.fake_mode.shape_env is not None and any(map(is_unknown, sizes)):
                result = self.reader.shaped(self, func, args, kwargs, where, result)
        except DynamicOutputShapeException:
            result = self.reader.shaped(self, func, args, kwargs, where, None)
        except UnsupportedOperatorException as error:
            raise NAMED["unknown result"].at(*where, operator=func) from error
        except RuntimeError as error:
            if _NO_RULE not in str(error):
                raise
            raise NAMED["no rule"].at(*where, operator=func) from error
        if func is _SLICE and self.phase is Phase.FORWARD and tensors[0].requires_grad:
            # Python's indexing by tuples makes no slice of the whole, whose gradients have other
            # strides: sizes at which it is one have a guard.
            _ = any(made != own for made, own in zip(result.shape, tensors[0].shape, strict=True))
        results = tuple(
            self.value(leaf) if isinstance(leaf, torch.Tensor) else None
            for leaf in flat_results(result)
        )
        if self.phase is Phase.BACKWARD:
            made = {self.values[r].storage for r in results if r is not None}
            self._made_by_backward |= {s for s in made if s >= self._forward_storages}
            self._unwatched.note(called, func, args, result)
        self._follow_writes(func, args, reads, writes, results, where)
        alone = facts.without_argument(func, args, result)
        if alone is not None:
            call, reads = self._call(*alone), ()
        call = replace(call, results=results)
        random = facts.is_random(func, args, kwargs)
        function = _function() if self.phase is Phase.BACKWARD else 0
        made_by = RecordedCall(call, self.phase, reads, writes, random, *where, function)
        self.calls.append(made_by)
        if self.phase is Phase.FORWARD:
            if func is not torch.ops.aten.detach.default:
                self._remember_view(reads, result)
            return result
        return self._in_layout_of_base(result)

    def _follow_writes(
        self,
        func: OpOverload,
        args: facts.Args,
        reads: Sequence[int],
        writes: Sequence[int],
        results: Sequence[int | None],
        where: Where,
    ) -> None:
        """Raise CaptureError for a call that reads uninitialized memory; note which memory it makes
        or writes. reads, writes, results: values."""
        made = {self.values[r].storage for r in results if r is not None}
        of_arguments = {self.values[v].storage for v in reads}
        is_view = bool(made) and not writes and made <= of_arguments
        if self._unwritten and not is_view:
            written = {self.values[v].storage for v in writes}
            content_read = of_arguments - written if facts.reads_content(func) else set()
            if writes and facts.reads_first(func):
                first = facts.tensors(args[:1])
                content_read |= {self.values[self.value(t)].storage for t in first}
            self._unwritten.refuse(sorted(content_read), f"{func} at {where[1]} reads")
            self._unwritten.written(written)
        not_empty = (r for r in results if r is not None and self.values[r].storage_bytes)
        self._unwritten.makes(func, {self.values[r].storage for r in not_empty}, where)

    def refuse_unwritten(self, values: Iterable[int], reader: str) -> None:
        """Raise if one of `values` is uninitialized memory. reader: for the message."""
        if self._unwritten:
            self._unwritten.refuse([self.values[v].storage for v in values], reader)

    def _result(self, func: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> Any:
        """Return the fake result of the call. Raises DynamicOutputShapeException where its shape
        depends on values. For CTC loss that is the length of the longest target, which may be read
        if lengths are integer inputs."""
        if func is _INDEX and any(t.dtype is torch.uint8 for t in facts.tensors(args[1])):
            raise DynamicOutputShapeException(func)  # masks, which the shape rule ignores
        if func is not _CTC_LOSS:
            return self._results.of(func, args, kwargs)
        log_probs, lengths = args[0], args[3]
        longest = self._record(torch.ops.aten.max.default, (lengths,))
        read = torch.ops.aten._local_scalar_dense.default
        states = 2 * self._record(read, (longest,)) + 1
        steps, batch = log_probs.shape[:2]
        return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, states))

    def _remember_view(self, reads: tuple[int, ...], result: Any) -> None:
        """Note a differentiable view in `_views`, as (sequence number of its autograd node, value
        of its base, its value). reads: values that the call reads; if several, it makes no view."""
        if len(reads) != 1 or not isinstance(result, torch.Tensor) or not torch.is_grad_enabled():
            return
        has_node = self._sequence[-1] not in self._sequence[-2:-1]
        base, view = reads[0], self.value(result)
        if has_node and view != base and self.values[view].storage == self.values[base].storage:
            self._views.append((self._sequence[-1], base, view))

    def begin_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Begin the backward pass. outputs: tensors of the result.

        Where a tensor is written to, autograd gives its views new nodes when they are used next.
        For fake tensors it makes the view once more, which is recorded and read by nothing, and the
        gradient of the base is a view of the view's gradient; for real tensors the new node is one
        of `as_strided`, whose gradient has the layout of the base. So such views are found here,
        and `_in_layout_of_base` copies their gradients.
        """
        self.phase = Phase.BACKWARD
        self._forward_storages = len(self._storage_deaths)
        used = {self.value(t) for t in outputs}
        views = {view for _, _, view in self._views}
        for call in reversed(self.calls):
            made = call.call.made
            is_made = not call.writes and len(made) == 1 and made[0] in views
            if not (is_made and made[0] not in used):
                used.update(call.reads)
        self._base_of = {
            number: base for number, base, view in self._views if view not in used and base in used
        }

    def _in_layout_of_base(self, result: Any) -> Any:
        """Return `result` of a call of the backward pass; where eager's would be that of
        `as_strided`, a copy in the layout of the view's base."""
        node = torch._C._current_autograd_node() if self._base_of else None
        base = None if node is None else self._base_of.get(node._sequence_nr())
        if base is None or not isinstance(result, torch.Tensor):
            return result
        spec = self.values[base].spec
        now = tensor_spec(result)
        if now.shape != spec.shape or now.stride == spec.stride:
            return result
        empty, copy = torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default
        kind = {"dtype": result.dtype, "device": result.device}
        shape = torch._C.TensorBase.shape.__get__(result)  # type: ignore[attr-defined]
        strides: Any = dense_strides(shape, outermost_first(spec.stride))  # sizes may be symbols
        strides = strides if hints(strides) == spec.stride else spec.stride
        made = self._record(empty, (tuple(shape), strides), kind)
        return self._record(copy, (made, result))

    def _change_shape(
        self,
        func: OpOverload,
        view: OpOverload,
        args: facts.Args,
        kwargs: facts.Kwargs,
        where: Where,
    ) -> torch.Tensor:
        """Record `view` for `func`, which changes the shape of its argument in place, which gets a
        new value, because calls before saw the old shape. Raises CaptureError for a tensor of the
        caller."""
        changed: torch.Tensor = args[0]
        if self.value(changed) < self.given_values or self.value(changed) in dict(self.constants):
            raise NAMED["shape in place"].at(*where, operator=func)
        call = self._call(view, args, kwargs)
        reads = tuple(self.value(t) for t in facts.tensors((args, kwargs)))
        func(*args, **kwargs)
        del self._index_of[id(changed)]
        call = replace(call, results=(self.value(changed),))
        self.calls.append(RecordedCall(call, self.phase, reads, (), False, *where))
        return changed

    def copy_before_backward_writes(self, written: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give tensors that a kernel writes into in the backward pass copies as their memory, if
        the forward pass made them, or the caller as incoming gradients: plans write into neither.
        written: tensors grouped by storage. A later read of the original is refused."""
        if self.phase is Phase.FORWARD:
            return
        resident = self.leaf_storages | {self.values[v].storage for v, _ in self.constants}
        for tensors in written:
            if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
                continue
            storage = self.values[self.value(tensors[0])].storage
            if storage in self._made_by_backward or storage in resident:
                continue
            with torch.no_grad():
                views = _views_of_copy(tensors)
            for tensor, view in zip(tensors, views, strict=True):
                layout = view.storage_offset(), tuple(view.shape), view.stride()
                with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
                    tensor.set_(view.untyped_storage(), *layout)
                self._know(tensor, self.value(view))
            self._overwritten.add(storage)

    def made(self) -> list[torch.Tensor | None]:
        """Return the tensors met so far, in order; None for one that nobody holds any more."""
        return [made() for made in self._leftovers.made]

    def callers_writes(self) -> list[RecordedCall]:
        """Return the calls so far that have changed a tensor of the caller, in order."""
        callers = self.leaf_storages | {self.values[v].storage for v, _ in self.constants}
        return [c for c in self.calls if any(self.values[v].storage in callers for v in c.writes)]

    def _refuse_unsupported(self, func: Any, where: Where) -> None:
        known = facts.facts_of(func)
        if known.refused_because:
            if torch_function().startswith(_RECURRENT):
                raise NAMED["recurrent layer of cuDNN"].at(*where)
            what = f"{known.called or func} {known.refused_because}; {known.instead}"
            raise UnsupportedModel.at(*where, what)

    def _known(
        self, args: facts.Args, kwargs: facts.Kwargs
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Return (args, kwargs with fake tensors only; these tensors, registered as values)."""
        tensors = facts.tensors((args, kwargs))
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.known_tensor, (args, kwargs))
            tensors = facts.tensors((args, kwargs))
        for tensor in tensors:
            self.value(tensor)
        return args, kwargs, tensors

    def known_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor for `tensor`, itself if it is one. A real tensor that is neither
        parameter nor buffer (a table that a library keeps) becomes a constant."""
        if distributed.is_fake(tensor):
            self.value(tensor)
            return tensor
        for fake, (_, constant) in zip(self._fakes, self.constants, strict=True):
            if constant is tensor:
                return fake
        self._refuse_kind(tensor)
        with torch._C._DisableTorchDispatch():
            plain = tensor.detach()
        fake = self.fake_mode.from_tensor(plain, static_shapes=True)
        self.constants.append((self.value(fake), tensor))
        self._fakes.append(fake)
        self._had_history[id(tensor)] = tensor.requires_grad
        return fake

    def constants_with_history(self) -> list[torch.Tensor]:
        """Return constants into which the run has written something with a gradient."""
        return [t for _, t in self.constants if t.requires_grad != self._had_history[id(t)]]

    @contextlib.contextmanager
    def without_history(self) -> Iterator[None]:
        """While active, the run may write what has a gradient into constants; afterwards these are
        detached. That of a failed run keeps no tensors."""
        try:
            yield
        except BaseException:
            self._fakes.clear()
            raise
        finally:
            with _disable_current_modes(), torch.no_grad():
                for tensor in self.constants_with_history():
                    tensor.detach_()

    def _refuse_kind(self, tensor: torch.Tensor) -> None:
        reason = why_not_planned(tensor, "what the forward computes with")
        if reason is not None:
            raise UnsupportedModel.at(*self.place(), reason)

    def _call(self, func: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> Call:
        named = tuple((name, self._symbolic(argument)) for name, argument in kwargs.items())
        call = Call(facts.operator_name(func), tuple(map(self._symbolic, args)), named, ())
        if facts.facts_of(func).effect is Effect.COMMUNICATES:
            call = replace(call, args=tuple(map(self._groups.named, call.args)))
        return call

    def _symbolic(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return ValueRef(self.value(argument))
        if isinstance(argument, list | tuple):
            return tuple(map(self._symbolic, argument))
        return known_number(argument)

    def place(self) -> Where:
        """Return (path of the running module, the user's source line) of the current call; in the
        backward pass those of the forward call that it belongs to, ('', '') if unknown."""
        if self.phase is Phase.FORWARD:
            place = (self.module_stack[-1], user_source())
            self._sequence.append(torch._C._autograd._get_sequence_nr() - 1)
            self._sequence_place.append(place)
            return place
        node = torch._C._current_autograd_node()
        return ("", "") if node is None else self.place_of(node)

    def place_of(self, node: torch.autograd.graph.Node) -> Where:
        """Return module path and source line of the forward call that made `node`."""
        if not self._sequence:
            return "", ""
        position = bisect.bisect_left(self._sequence, node._sequence_nr())
        return self._sequence_place[min(position, len(self._sequence) - 1)]


def _function() -> int:
    node = torch._C._current_autograd_node()
    if node is None:
        return 0
    number = node._sequence_nr() + 1
    return -number if isinstance(node, torch.autograd.function.BackwardCFunction) else number


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as a flat tensor."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def _views_of_copy(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of one tensor a dense copy, of several on a storage views of a copy of all of it."""
    is_one = len(tensors) == 1
    source = tensors[0] if is_one else whole_storage(tensors[0])
    layout = tuple(source.shape), source.stride()
    copied = torch.empty_strided(*layout, dtype=source.dtype, device=source.device)
    copied.copy_(source)
    if is_one:
        return [copied]
    return [copied.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors]


OUTSIDE = (
    "Call it outside of the planned module (a loss: on what the module returns), or in a way in "
    "which it reads no values"
)
"""Remedy if a function of PyTorch reads values."""
