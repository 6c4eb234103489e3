"""Kernels that planning makes, with those that it could not make and why; inputs for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import inductor, kernels
from rockplan.graph_builder.pipeline import lower
from rockplan.options import Options
from rockplan.values.graph import CDGraph, Kernel
from testing.models import Case


@dataclass(slots=True)
class Record:
    """By the names of operators. failed: why there is none; code: what Inductor wrote."""

    asked: dict[str, Kernel] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)

    @property
    def made(self) -> dict[str, Kernel]:
        return {op: kernel for op, kernel in self.asked.items() if op not in self.failed}

    def facts(self) -> dict[str, Any]:
        """How many kernels there are, how many of them write in place, of those that were tried."""
        plain = [op for op, kernel in self.asked.items() if not kernel.over]
        over = [op for op, kernel in self.asked.items() if kernel.over]
        refused = [self.failed[op] for op in over if op in self.failed]
        return {
            "kernels": len(plain),
            "not_compiled": sum(op in self.failed for op in plain),
            "in_place": f"{len(over) - len(refused)} of {len(over)}",
            "refused": _counted(refused),
        }


def _counted(reasons: Sequence[str]) -> str:
    """Each kind of reason once, with how often it was given, and the least and largest number."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(_NUMBER.sub("N", reason), []).append(reason)
    said = []
    for kind, given in kinds.items():
        numbers = sorted(int(n) for reason in given for n in _NUMBER.findall(reason))
        between = f" (N: {numbers[0]} to {numbers[-1]})" if numbers else ""
        said.append(f"{len(given)} x {kind}{between}")
    return "; ".join(said).replace("|", "/")


_NUMBER = re.compile(r"\b\d+\b")


@contextmanager
def recorded(with_code: bool = False) -> Iterator[Record]:
    """Of what is made inside. with_code: one kernel after the other, and nothing comes from the
    cache on disk."""
    record = Record()
    made, compiled = kernels.made, inductor.compiled

    def recording(asked: Iterable[Kernel]) -> Mapping[str, str]:
        wanted = {kernel.op: kernel for kernel in asked}
        failed = made(wanted.values())
        record.asked |= wanted
        record.failed |= failed
        return failed

    def one_by_one(wanted: Sequence[Kernel]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kernel in wanted:
            with _code_to(record.code, kernel.op):
                found |= compiled((kernel,))
        return found

    kernels.made = recording
    if with_code:
        inductor.compiled = one_by_one
    try:
        yield record
    finally:
        kernels.made, inductor.compiled = made, compiled


@contextmanager
def _code_to(code: dict[str, str], op: str) -> Iterator[None]:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(lambda text: code.__setitem__(op, text))
    try:
        with config.patch(fx_graph_cache=False):
            yield
    finally:
        GraphLowering.save_output_code = before


def graph_of(case: Case) -> CDGraph:
    """The graph of a step of compiled kernels, without prices: nothing is timed."""
    found = capture(case.model, case.args, case.kwargs)
    return lower(found, 0, Options(compile=True))


def made_up(kernel: Kernel, seed: int, device: str | None = None) -> list[torch.Tensor]:
    """Arguments: small numbers for what may be indices."""
    device = device or kernel.device
    generator = torch.Generator(device).manual_seed(seed)
    found = []
    for spec in kernel.inputs:
        reach = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
        dtype = getattr(torch, spec.dtype.removeprefix("torch."))
        flat = torch.zeros(spec.offset + reach + 1, dtype=dtype, device=device)
        if dtype.is_floating_point:
            flat.normal_(generator=generator)
        elif dtype is torch.bool:
            flat.bernoulli_(0.5, generator=generator)
        else:
            flat.random_(0, 3, generator=generator)
        found.append(flat.as_strided(spec.shape, spec.stride, spec.offset))
    return found


def twins(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same numbers in storages of their own."""
    return [_twin(tensor) for tensor in tensors]


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    flat = tensor.as_strided((size,), (1,), 0).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def far(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest distance of a result, as a share of its norm; 0 where both are 0."""
    return max((_far(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def _far(found: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = found.double(), expected.double().reshape(found.shape)
    norm = float(b.norm())
    return float((a - b).norm()) / (norm or 1.0)


def same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Also of numbers that are not numbers."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(_bits(a), _bits(b.reshape(a.shape))) for a, b in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
