"""StandIns: fake tensors for tensors of the caller; Arguments: a call with them in its structure.

takes: positional and keyword arguments. returns: the same with other tensors. guarantees: anything
without tensors is the caller's own object; one object at two places stays one object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rockplan.graph_builder.operators.symbols import known_number
from rockplan.graph_builder.tracing.free_sizes import FreeSizes
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.python_state import trees
from rockplan.python_state.autocast import leaf_like
from rockplan.python_state.distributed import distributed, is_distributed, local_of, spec_of
from rockplan.python_state.memory import inner_tensors
from rockplan.values.sizes import is_number


class Arguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def with_stand_ins(
    args: tuple[Any, ...], kwargs: dict[str, Any], of: Callable[[torch.Tensor], torch.Tensor]
) -> Arguments:
    """Return the arguments of a call, each tensor `t` replaced by `of(t)`."""
    known: dict[int, Any] = {}

    def exchanged(value: Any) -> Any:
        if id(value) not in known:
            is_tensor = isinstance(value, torch.Tensor)
            known[id(value)] = of(value) if is_tensor else trees.mapped(value, exchanged)
        return known[id(value)]

    own = tuple(map(exchanged, args))
    return Arguments(own, {name: exchanged(value) for name, value in kwargs.items()})


def with_numbers(
    arguments: Arguments, free: FreeSizes | None
) -> tuple[Arguments, tuple[tuple[int, int | float], ...]]:
    """Return (the arguments with symbols for numbers that differ from an earlier call; position
    and number of each leaf that is one)."""
    leaves, spec = trees.tree_flatten((arguments.args, arguments.kwargs))
    numbers = {i: leaf for i, leaf in enumerate(leaves) if is_number(leaf)}
    own = {i: n if free is None else free.number(i, n) for i, n in numbers.items()}
    if any(own[i] is not n for i, n in numbers.items()):
        exchanged = [own.get(i, leaf) for i, leaf in enumerate(leaves)]
        arguments = Arguments(*trees.tree_unflatten(exchanged, spec))
    return arguments, tuple((i, known_number(n)) for i, n in own.items())


class StandIns:
    """Fake tensors for real ones, one for each object, sharing storages as the real ones do; for a
    DTensor or another wrapper one of what is inside of it.

    real: id of a fake tensor -> the real tensor; free: makes those that have symbols as sizes.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, recorder: Recorder, free: FreeSizes | None = None
    ) -> None:
        self._fake_mode = fake_mode
        self._free = free
        self._recorder = recorder
        self._of: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        self.real: dict[int, torch.Tensor] = {}
        self.fakes: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for each call; a tensor computed by autograd gets one that is a leaf."""
        fake = self._of.get(id(tensor))
        if fake is None:
            source = tensor if tensor.is_leaf else tensor.detach()
            sized = None if self._free is None else self._free.fake(tensor, self._fake_mode)
            fake = self._fake(source) if sized is None else sized
            if source is not tensor:
                fake = leaf_like(fake, tensor)
            self._of[id(tensor)] = fake
            self._of[id(fake)] = fake
            self._alive += [tensor, source]
            self.real[id(fake)] = tensor
            self.fakes.append(fake)
            self._recorder.value(fake)
        return fake

    def _fake(self, source: torch.Tensor) -> torch.Tensor:
        made: Any
        if inner := inner_tensors(source):
            whole: Any = source
            parts = {name: self.of(tensor) for name, tensor in inner.items()}
            rest = whole.__tensor_flatten__()[1], source.shape, source.stride()
            made = whole.__tensor_unflatten__(parts, *rest)
        elif is_distributed(source):
            local = local_of(source).detach()
            self._alive.append(local)
            fake_local = self._fake_mode.from_tensor(local, static_shapes=True)
            made = distributed(fake_local, spec_of(source))
        else:
            return self._fake_mode.from_tensor(source, static_shapes=True)
        made.requires_grad_(source.requires_grad)._is_param = isinstance(source, nn.Parameter)
        fake: torch.Tensor = made
        return fake

    @contextlib.contextmanager
    def without_history(self) -> Iterator[None]:
        """While active, the run may write what has a gradient into stand-ins; afterwards they are
        detached: the autograd graph may refer to them, in a cycle that Python does not see."""
        try:
            yield
        finally:
            for fake in self.fakes:
                if fake.grad_fn is not None:
                    # Views cannot be detached.
                    with torch.no_grad(), contextlib.suppress(RuntimeError):
                        fake.detach_()
