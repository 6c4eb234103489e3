"""Execution: an operator with arguments like those of the model, ready to be run.

takes: a CDGraph, real tensors for some of its values. returns: Inputs, which make the
arguments of each call. guarantees: inputs are made up from specs, so memory for one operator is
enough whatever the model needs; generators, thread counts and global flags stay as they were.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.costs.call_key import copies_storages, device_of
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.evaluate import flat_results, substitute
from rockplan.graph_builder.recorded.specs import dtype_of, is_floating, tensor_of
from rockplan.python_state.autocast import OFF, under_autocast
from rockplan.values.graph import Call, CDGraph, ComputeNode, is_kernel, refs

# Random elements of a made-up tensor, which repeats them: drawing takes longer than operators.
_DRAWN = 1 << 16

# Words of CPU kernels for a bad index.
_OUT_OF_RANGE = re.compile("out of (bounds|range)", re.IGNORECASE)


@contextlib.contextmanager
def as_executed(graph: CDGraph) -> Iterator[None]:
    """Inside the `with` block, run operators as generated code does: below autograd, without
    autocast or modes, on the graph's device. Random generators are put back at the end."""
    devices = sorted({v.spec.device for v in graph.values} - {"cpu"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(under_autocast(OFF))
        if devices:
            stack.enter_context(torch.cuda.device(devices[0]))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


FUNCTIONS: dict[str, Callable[[list[Any]], object]] = {}
"""Operator of a compiled kernel -> the function that generated code calls in its place: dispatch to
an operator that is written in Python takes 8 us."""


@dataclass(frozen=True, slots=True)
class Execution:
    """An operator with real arguments, ready to be called repeatedly. function: what is called in
    its place, given a list of the arguments."""

    operator: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    function: Callable[[list[Any]], object] | None = None

    def run(self) -> object:
        if self.function is not None:
            return self.function([*self.args])
        return self.operator(*self.args, **self.kwargs)

    def refuse_bad_indices(self) -> None:
        """Execute the call on copies of its arguments on the CPU; raise IndexError if the kernel
        there says that an index is out of range. Other errors are ignored."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.cpu, (self.args, self.kwargs)
        )
        try:
            self.operator(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if _OUT_OF_RANGE.search(str(error)):
                raise IndexError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Inputs:
    """Makes arguments of calls.

    Arguments are real tensors of `given` (value -> tensor), or made up; a value that is neither
    given nor of floating dtype (mask, index, opaque workspace) is computed by the node that makes
    it (`made_by`), run on made-up inputs: a kernel may read beyond a workspace with any other
    content.
    is_on_cuda: an index out of range is a device-side assertion there, after which the process
    cannot use the device, or a write beyond a tensor; so calls with computed indices run on the CPU
    first. out_of_range: values that were; no call gets them.
    """

    graph: CDGraph
    given: Mapping[int, torch.Tensor]
    made_by: Mapping[int, ComputeNode]
    is_on_cuda: bool
    out_of_range: set[int] = field(default_factory=set)

    def execution(self, call: Call) -> Execution:
        return self._execution(call, {})

    def _execution(self, call: Call, environment: dict[int, torch.Tensor]) -> Execution:
        """Return `call` with made-up or real tensors as arguments. environment: value -> tensor,
        for values made so far on the way to them; what is made here is added. An argument that the
        call changes in place is a clone if it is one of the user's tensors."""
        operator = facts.resolve(call.op)
        assert not facts.facts_of(operator).effect, f"{operator} acts outside of the step"
        copies = copies_storages(self.graph, call)

        def tensor(index: int) -> torch.Tensor:
            if index not in environment:
                self._supply(index, environment, copies)
            operand = environment[index]
            mutates_given = operator._schema.is_mutable and operand is self.given.get(index)
            return operand.clone() if mutates_given else operand

        execution = Execution(
            operator,
            [substitute(a, tensor) for a in call.args],
            {name: substitute(a, tensor) for name, a in call.kwargs},
            FUNCTIONS.get(call.op),
        )
        if self.is_on_cuda:
            self._look_at_indices(execution, {ref.index for ref in refs(call)})
        return execution

    def _look_at_indices(self, execution: Execution, read_values: set[int]) -> None:
        """Raise IndexError if an index computed from made-up values is out of range, in this call
        or in an earlier one, which CUDA kernels do not say. read_values: values that the call
        reads."""
        by_kernel = is_kernel(facts.operator_name(execution.operator))
        computed: set[int] = set()
        for i, value in ((i, self.graph.values[i]) for i in read_values - self.given.keys()):
            is_index = not is_floating(value.spec) and dtype_of(value.spec) != torch.bool
            if is_index and (by_kernel or value.view is not None or i in self.made_by):
                computed.add(i)
        if computed & self.out_of_range:
            raise IndexError("an index was out of range before")
        if computed:
            try:
                execution.refuse_bad_indices()
            except IndexError:
                self.out_of_range.update(computed)
                raise

    def _supply(self, index: int, environment: dict[int, torch.Tensor], with_storage: bool) -> None:
        """with_storage: a made-up tensor gets a storage as large as in the model."""
        value = self.graph.values[index]
        if index in self.given:
            environment[index] = self.given[index]
        elif is_floating(value.spec) or not (value.view or index in self.made_by):
            size_bytes = self.graph.data[value.data].size_bytes if with_storage else 0
            spec = replace(value.spec, offset=0)
            environment[index] = tensor_of(spec, _made_up, size_bytes)
        elif value.view is not None:
            self.run(value.view, environment)
        else:
            inner: dict[int, torch.Tensor] = {}
            for call in self.made_by[index].calls:
                self.run(call, inner)
            environment |= inner

    def run(self, call: Call, environment: dict[int, torch.Tensor]) -> None:
        results = flat_results(self._execution(call, environment).run())
        for index, leaf in zip(call.results, results, strict=True):
            if index is not None and isinstance(leaf, torch.Tensor):
                environment[index] = leaf


def inputs_of(graph: CDGraph, given: Mapping[int, torch.Tensor]) -> Inputs:
    """Return what supplies the calls of `graph` with arguments. given: value -> real tensor, for
    values that must not be made up."""
    made_by = {
        v: node
        for node in graph.nodes
        if not any(facts.facts_of(call.op).effect for call in node.calls)
        for call in node.calls
        for v in call.results
        if v is not None and graph.values[v].data in node.writes
    }
    return Inputs(graph, given, made_by, torch.device(device_of(graph)).type == "cuda")


def _made_up(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uniform values in [0, 1), _DRAWN elements repeated; zeros if not of floating dtype."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(elements, dtype=dtype, device=device)
    drawn = _drawn(dtype, device)
    return drawn[:elements].clone() if elements <= _DRAWN else drawn.repeat(-(-elements // _DRAWN))


@functools.cache
def _drawn(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(_DRAWN, generator=generator, device=device).to(dtype)
