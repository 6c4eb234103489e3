"""Memory of a process that trains with others, beside what is said of it. Exits with an error where
they differ: on two processes of gloo, and on the first one as if it were one of eight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rockplan
from rockplan.fitting.shards import DDP, FSDP2
from rockplan.search import paging
from rockplan.values.copies import Host, HostLink
from testing import models
from testing.ranks import Rank, fake_group
from testing.sharding import gloo

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)

SCALARS_BYTES = 256
"""Of the loss, of which parameters were used (DistributedDataParallel), of dtypes: a few each."""


class Stack(nn.Module):
    """Of widths that no number of processes divides. table: of rows, embeddings that are the head,
    in no block; without one the first block has no gradients to hand on."""

    def __init__(self, table: int) -> None:
        super().__init__()
        self.table = nn.Embedding(table, 51) if table else None
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(51, 51), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(51, table or 3, bias=False)
        if self.table is not None:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.table is None else self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).sum()


def summed() -> models.Case:
    return models.Case("summed", Stack(0), (torch.randn(5, 51),), {}, lambda loss: loss)


def tied() -> models.Case:
    ids = torch.randint(0, 2000, (5,))
    return models.Case("tied", Stack(2000), (ids,), {}, lambda loss: loss)


class Partly(nn.Module):
    """Blocks of which some are frozen. adapted: with trained parameters of low rank beside."""

    def __init__(self, frozen: Sequence[int], *, adapted: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(300, 64), nn.Linear(64, 300)
        both = [(nn.Linear(64, 200), nn.Linear(200, 64)) for _ in range(4)]
        self.layers = nn.ModuleList(nn.Sequential(a, nn.Tanh(), b) for a, b in both)
        blocks = (self.layers[n] for n in frozen)
        for module in (self.table, *blocks, *((self.head,) if adapted else ())):
            module.requires_grad_(requires_grad=False)
        for layer in self.layers if adapted else ():
            layer.append(nn.Sequential(nn.Linear(64, 3, False), nn.Linear(3, 64, False)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).sum()


def partly(frozen: Sequence[int], *, adapted: bool = False) -> models.Case:
    ids = torch.randint(0, 300, (3,))
    return models.Case("partly", Partly(frozen, adapted=adapted), (ids,), {}, lambda loss: loss)


FROZEN: tuple[Callable[[], models.Case], ...] = (
    functools.partial(partly, range(4), adapted=True),
    functools.partial(partly, range(2)),
    functools.partial(partly, (1, 3)),
)
"""A frozen base with adapters; a frozen prefix; blocks that are frozen in the middle."""


READ_BYTES = 5 * 51 * 4
"""What the backward of an embedding reads is gone when its gradient is added to the head's."""


def check(rank: Rank, processes: str, *, is_upper: bool = True) -> None:
    """is_upper: nothing but what is said is measured; threads of gloo give copies back late."""
    torch.manual_seed(0)
    said, real = rank.said_bytes(), rank.measured_bytes(2)
    what = f"{processes} processes, {rank}: {said} said, {real} measured"
    assert not is_upper or real <= said + SCALARS_BYTES, what
    if not dist.get_rank():  # others have fewer rows
        assert said <= real + SCALARS_BYTES + READ_BYTES, what


def check_paging() -> None:
    """In the bytes that are said of blocks that page and run nothing again there is a plan of real
    ones that takes no longer, and they need no more than it promises."""
    torch.manual_seed(0)
    paging.LEAST_BYTES = 1 << 12
    case = models.llama(layers=3, width=128, heads=4, vocabulary=64, batch=1, length=256)
    kept = Rank(lambda: case, FSDP2, torch.optim.AdamW)
    said = replace(kept, host=Host(1 << 30, HostLink(10**13, 10**13))).said_alive_bytes()
    options = rockplan.Options(host="1GiB", link="10000GB/s", cache=False, time_limit_s=2)
    assert said < 0.7 * kept.said_alive_bytes()
    model = kept.wrapped(case.model)
    rockplan.solve_blocks(model, (), said, sample_kwargs=case.kwargs, options=options)
    plan = rockplan.blocks_of(model)

    def step() -> None:
        model(**case.kwargs).loss.backward()  # the logits are let go, as in what is promised

    step()
    real = min(rockplan.peak_live_bytes(step, 1).peak_bytes for _ in range(3))
    what = f"{said} said, {plan.peak_bytes} promised, {real} measured"
    assert real <= plan.peak_bytes <= said, what
    assert plan.paged_bytes and plan.overhead < 0.01, what


def main() -> None:
    dist.init_process_group("gloo")
    check(Rank(summed, DDP, MOMENTUM), "two")
    check(Rank(tied, FSDP2, torch.optim.AdamW), "two", is_upper=False)
    first = not dist.get_rank()
    dist.destroy_process_group()
    if not first:
        return
    with fake_group(8):
        check_one(FROZEN[0], MOMENTUM)
        check_one(tied, torch.optim.AdamW)


def check_one(make: Callable[[], models.Case], optimizer: Any) -> None:
    rank = Rank(make, FSDP2, optimizer)
    check(rank, "eight")
    check(replace(rank, checkpointed=True), "eight")


def rest() -> None:
    with gloo():
        check_paging()
        is_first = not dist.get_rank()
    if is_first:
        with fake_group(8):
            for make in (summed, *FROZEN[1:]):
                check_one(make, MOMENTUM)
