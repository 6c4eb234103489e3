"""Shards: what each of several processes holds of a model that they train together.

takes: a module, its blocks, how many processes share it and how. returns: bytes that a process
keeps, and groups of parameters that are gathered together (`fitting.exchange` says when).
guarantees: figures are of the process that holds most, which is the first one.

`ddp` (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp, by their
defaults): each process holds everything, and a copy of all gradients in buckets
(`initialize_buckets`): in the first step one of everything, which has as many bytes as those that
replace it: one of 1 MiB, others of 25 MiB, each closed by the gradient that fills it.

`fsdp2` (torch/distributed/fsdp/_fully_shard: `fully_shard` of each block, and then of the model):
each process holds a part of each parameter, and as much of its gradient and of the optimizer's
state. Parameters are cut along dimension 0 into equal parts, the last ones padded
(`FSDPParam._init_sharded_param`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rockplan.errors import InvalidInput
from rockplan.fitting.reserved import storage_sizes

DDP, FSDP2 = "ddp", "fsdp2"

_BUCKETS_BYTES = (1 << 20, 25 << 20)
"""Bytes of the first bucket, and of others (`_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True)
class GatheredGroup:
    """Parameters that are gathered together: those of the block at `path`, or, if that is '', those
    of no block. parts: name -> bytes of the part that a process holds, under all names of a
    parameter; names: one name of each; count: of processes; uneven: names of parameters whose last
    part is padded."""

    path: str
    parts: Mapping[str, int]
    names: tuple[str, ...]
    count: int
    uneven: frozenset[str] = frozenset()

    def whole_bytes(self, name: str) -> int:
        """Return the bytes of all parts of a parameter."""
        return self.parts[name] * self.count

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(map(self.whole_bytes, names))


@dataclass(frozen=True, slots=True)
class Shards:
    """How processes share a model. count: of processes, each with a device; how: 'ddp' or 'fsdp2'.
    Raises InvalidInput."""

    count: int = 1
    how: str = FSDP2

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise InvalidInput(f"gpus is {self.count!r}; pass a number of at least 1")
        if self.how not in (DDP, FSDP2):
            raise InvalidInput(f"shard is {self.how!r}; choose {DDP!r} or {FSDP2!r}")

    @property
    def are_parts(self) -> bool:
        """True if a process holds only parts of parameters."""
        return self.count > 1 and self.how == FSDP2

    def __str__(self) -> str:
        """Name the process that figures are of; '' if there is only one."""
        return f" of a rank of {self.count} ({self.how})" if self.count > 1 else ""

    def part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the meta device for the part that the first process holds; the
        parameter itself if it is not divided."""
        if not self.are_parts:
            return parameter
        first = -(-parameter.shape[0] // self.count)
        return torch.empty((first, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")

    def parameter_sizes(self, model: nn.Module) -> tuple[int, ...]:
        """Return the bytes of each storage that a process holds for parameters."""
        return storage_sizes(self.part(p) for p in model.parameters())

    def bucket_sizes(self, model: nn.Module) -> tuple[int, ...]:
        """Return the bytes of each bucket of DistributedDataParallel, which are filled from the
        last parameter on; () under fully_shard or for one process."""
        if self.count == 1 or self.how != DDP:
            return ()
        sizes = [0]
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            if sizes[-1] >= _BUCKETS_BYTES[len(sizes) > 1]:
                sizes.append(0)
            sizes[-1] += parameter.nbytes
        return tuple(sizes)

    def groups(self, model: nn.Module, blocks: Sequence[str]) -> tuple[GatheredGroup, ...]:
        """Return the groups of parameters that fully_shard gathers together: first those of no
        block, if there are any, then those of each block (path of a module); () under
        DistributedDataParallel or for one process."""
        if not self.are_parts:
            return ()
        owned: dict[str, dict[str, nn.Parameter]] = {path: {} for path in ("", *blocks)}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owned[_block_of(name, blocks)][name] = parameter
        return tuple(self._group(path, named) for path, named in owned.items() if named)

    def _group(self, path: str, named: Mapping[str, nn.Parameter]) -> GatheredGroup:
        once = {id(p): name for name, p in reversed([*named.items()])}
        uneven = (name for name, p in named.items() if p.shape[0] % self.count)
        parts = {name: self.part(p).nbytes for name, p in named.items()}
        return GatheredGroup(path, parts, tuple(once.values()), self.count, frozenset(uneven))


ALONE = Shards()
"""One process."""


def unknown_to_fsdp2(model: nn.Module, blocks: Sequence[str]) -> str:
    """Return in words why fully_shard, applied to each of `blocks` (paths) and then to the model,
    refuses it; '' if it does not."""
    owners: dict[int, str] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = _block_of(name, blocks)
        owner, dtype = owners.setdefault(id(parameter), path), parameter.dtype
        other = dtypes.setdefault(path, dtype) if parameter.requires_grad else dtype
        whys = {
            "is a scalar: give it one dimension": not parameter.dim(),
            "is not contiguous, such as of channels_last": not parameter.is_contiguous(),
            f"is shared by {_named(owner)} and {_named(path)}, which are gathered apart": (
                owner != path
            ),
            f"is of {dtype}, others of {_named(path)} of {other}, and all are trained": (
                other != dtype
            ),
        }
        for why in (why for why, is_so in whys.items() if is_so):
            return f"fully_shard does not take this model: its parameter '{name}' {why}"
    return ""


def gathered_bytes(groups: Iterable[GatheredGroup]) -> int:
    """Return the bytes that are gathered at one time, at least: the parameters of no block, and the
    largest block."""
    whole = {group.path: group.bytes_of(group.names) for group in groups}
    return whole.pop("", 0) + max(whole.values(), default=0)


def _block_of(name: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def _named(path: str) -> str:
    return f"block '{path}'" if path else "the rest of the model"
