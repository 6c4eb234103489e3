"""Kernels of this process: their operators, and the functions that run them.

takes: Kernels. returns: functions of a list of tensors that return a sequence of tensors.
guarantees: a kernel is compiled once in a process; its operator exists from then on, so that code
which finds operators by name works with it.

The operator is for measuring calls and for reading schemas. On another device than the kernel's
(the CPU, to check indices) it computes by the operators that were fused. Generated code calls the
function directly (`codegen.load`), in a third of the time.
An in-place variant is tried beside the plain kernel: it must compute the same bits, and need no
more memory, or slightly more. If the check fails the in-place variant is dropped; the plain kernel
stays.
On CPU the function checks indices first, and raises IndexError as eager does: if several threads
run the kernel, Inductor's own check ends the process.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rockplan.errors import CaptureError, MissingLibrary
from rockplan.graph_builder.costs.execution import FUNCTIONS
from rockplan.graph_builder.costs.ruler import rise_of
from rockplan.graph_builder.fusion import inductor
from rockplan.graph_builder.fusion.groups import MOST_READ
from rockplan.graph_builder.fusion.indices import (
    at_sizes,
    computed,
    is_within,
    look_at_indices,
    trial_inputs,
)
from rockplan.graph_builder.fusion.kinds import static_kernel
from rockplan.graph_builder.operators.symbols import function_of
from rockplan.graph_builder.recorded.specs import allocated_bytes
from rockplan.graph_builder.tracing.free_sizes import StaticSizes
from rockplan.values.graph import NAMESPACE, Call, Kernel, TensorSpec, ValueRef
from rockplan.values.sizes import LEAST, MOST

Function = Callable[[list[Any]], Sequence[torch.Tensor]]

_LOGGER = logging.getLogger("rockplan")

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_known: dict[str, Kernel] = {}
_functions: dict[str, Function] = {}


_refused: dict[str, str] = {}
"""In-place variants that were dropped -> the reason."""

_more_bytes: dict[str, int] = {}
"""In-place variants -> bytes that they need beyond the plain kernel less what they save."""

SLIGHT = 64
"""These bytes are at least so many times smaller than what is written over (sums of rows, say)."""


def made(kernels: Iterable[Kernel]) -> Mapping[str, str]:
    """Compile the kernels that this process has not compiled yet, and define their operators.
    Return operator -> reason for those that failed. An in-place variant must come after its plain
    kernel, unless that was compiled by an earlier call."""
    by_operator = {k.op: k for k in kernels}
    failed = {op: _refused[op] for op in by_operator if op in _refused}
    failed |= _made(
        {op: k for op, k in by_operator.items() if op not in _functions | failed.keys()}
    )
    return failed


def opened(kernels: Iterable[Kernel]) -> Mapping[str, str]:
    """Make kernels for all sizes. Each has to compute what the one for the sizes that it is
    compiled for alone does, as near as compiled kernels have to be to eager's. Return operator ->
    reason for those of which that one cannot be made. Raises StaticSizes for others that fail."""
    listed = tuple(kernels)
    static = {k.op: static_kernel(k) for k in listed}
    failed = made({k.op: k for k in static.values()}.values())
    reasons = {op: failed[k.op] for op, k in static.items() if k.op in failed}
    of_sizes = [k for k in listed if k.op not in reasons and k.sizes]
    for op, reason in made(k for k in listed if k.op not in reasons).items():
        raise StaticSizes(f"the kernel {op} cannot be compiled for all sizes ({reason})")
    count = 0
    for kernel in of_sizes:
        with inductor.below_autograd():
            inputs = _made_up(kernel) or trial_inputs(kernel)
            expected = _functions[static[kernel.op].op]([*inputs])
            found = _functions[kernel.op]([*kernel.sizes, *inputs])
        count += all(map(_same_bits, found, expected))
        if not all(map(_is_near, found, expected)):
            raise StaticSizes(f"the kernel {kernel.name} computes something else for all sizes")
    _LOGGER.info(
        "%d kernels are compiled for all sizes; %d of them have other bits than those for one size",
        len(of_sizes),
        len(of_sizes) - count,
    )
    return reasons


def guards_of(op: str) -> tuple[str, ...]:
    """Return expressions that are true of the sizes that a kernel is for."""
    return inductor.GUARDS.get(op, ())


def _made(missing: Mapping[str, Kernel]) -> Mapping[str, str]:
    """Return operator -> reason for those that failed."""
    looks = {op: look_at_indices(kernel) for op, kernel in missing.items()}
    for op, given in ((op, len(kernel.inputs)) for op, kernel in missing.items()):
        if given > MOST_READ:
            looks[op] = f"it reads {given} tensors, of {MOST_READ} at most"
    failed = {op: look for op, look in looks.items() if isinstance(look, str)}
    to_compile = tuple(kernel for op, kernel in missing.items() if op not in failed)
    for op, function in inductor.compiled(to_compile).items():
        look, kernel = looks[op], missing[op]
        if isinstance(function, str) or isinstance(look, str):
            failed[op] = str(function)
            continue
        runs = function if look is None else functools.partial(_looked_at, look, function)
        more_bytes = _tried_in_place(kernel, runs) if kernel.over else 0
        if kernel.over and not {*guards_of(op)} <= {*guards_of(kernel.plain)}:
            more_bytes = "it is for fewer sizes"
        if isinstance(more_bytes, str):
            failed[op] = _refused[op] = more_bytes
            continue
        _more_bytes[op] = more_bytes
        _functions[op] = runs
        _define(kernel)
    return failed


def _looked_at(
    look: Callable[[Sequence[Any]], None], function: Function, arguments: list[Any]
) -> Sequence[torch.Tensor]:
    look(arguments)
    return function(arguments)


def functions_of(kernels: Iterable[Kernel]) -> dict[str, Function]:
    """Return operator of each kernel -> its function of a list of tensors, compiled here if need
    be: plans may come from another process. Raises CaptureError if one does not compile."""
    listed = tuple(kernels)
    failed = made(listed)
    for kernel in listed:
        if kernel.op in failed:
            raise CaptureError(
                f"the kernel {kernel.name} of this plan cannot be compiled here "
                f"({failed[kernel.op]}); plan the model again with rockplan.solve"
            )
    return {kernel.op: _functions[kernel.op] for kernel in listed}


def check_compiler(device: str, reason: str) -> None:
    """Raise MissingLibrary if not even a kernel of one operator can be compiled on `device`.
    reason: why a kernel of the model failed, for the message."""
    row = TensorSpec((8,), (1,), 0, "torch.float32", device)
    square = Call("aten.mul.Tensor", (ValueRef(0), ValueRef(0)), (), (1,))
    device_type = torch.device(device).type
    name = f"{NAMESPACE}.square_{device_type}.default"
    if made([Kernel(name, (row,), (square,), (1,), (row,), device)]):
        raise MissingLibrary(
            f"Options(compile=True) compiles nothing here: {reason.rstrip('.')}. On {device_type} "
            f"it needs {inductor.NEEDS[device_type]}; or leave compile=True out"
        )


def _define(kernel: Kernel) -> None:
    if kernel.op in _known or kernel.over:
        return  # in-place variants occur in no graph that is captured or measured
    kinds = ["SymInt"] * len(kernel.sizes) + ["Tensor"] * len(kernel.inputs)
    arguments = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds))
    results = ", ".join(["Tensor"] * len(kernel.results))
    returns = results if len(kernel.results) == 1 else f"({results})"
    _LIBRARY.define(f"{kernel.name}({arguments}) -> {returns}")
    _LIBRARY.impl(kernel.name, _implementation(kernel), "CompositeExplicitAutograd")
    _known[kernel.op] = kernel
    FUNCTIONS[kernel.op] = lambda arguments: _functions[kernel.op](arguments)


def _implementation(kernel: Kernel) -> Callable[..., Any]:
    count = len(kernel.sizes)

    def run(*arguments: Any) -> Any:
        tensors = arguments[count:]
        is_on_device = all(str(a.device) == kernel.device for a in tensors)
        if is_on_device:
            results = _functions[kernel.op](list(arguments))
        else:
            results = computed(at_sizes(kernel, arguments[:count]), tensors)
        return results[0] if len(kernel.results) == 1 else tuple(results)

    return run


# -- in place ----------------------------------------------------------------------------------


def more_bytes_of(kernel: Kernel) -> int:
    """Return bytes that an in-place variant needs beyond the plain kernel less its saving."""
    return _more_bytes[kernel.op]


def _tried_in_place(kernel: Kernel, function: Function) -> int | str:
    """Run an in-place variant and its plain kernel on the same made-up inputs. Return the bytes by
    which the variant's saving falls short of the bytes that it writes over, at least 0, and 0 at
    all sizes that are tried; or the reason to drop it: it computes other bits, needs much more
    memory, or cannot be tried."""
    plain = _functions.get(kernel.plain)
    if plain is None:
        return "what it stands for cannot be compiled"
    names = [size.text for size in kernel.sizes]
    is_for = function_of(names, guards_of(kernel.op))
    device_type = torch.device(kernel.device).type
    for share in (1, 2, 3) if kernel.sizes else (1,):
        sizes = tuple(max(LEAST, int(size) // share) for size in kernel.sizes)
        with inductor.below_autograd():
            given = _made_up(at_sizes(kernel, sizes))
            if given is None or not all(is_for(sizes)):
                return "it reads where numbers say"
            expected, plain_bytes = measured(kernel, plain, [*sizes, *given])
            results, own_bytes = measured(kernel, function, [*sizes, *given])
        if not all(map(_same_bits, results, expected)):
            return "it computes other bits"
        written_bytes = sum(
            allocated_bytes(expected[place].untyped_storage().nbytes(), device_type)
            for place, _ in kernel.over
        )
        more_bytes = max(0, own_bytes + written_bytes - plain_bytes)
        if more_bytes * SLIGHT * (MOST if kernel.sizes else 1) > written_bytes:
            return f"it needs {more_bytes} bytes more, to write {written_bytes}"
    return more_bytes


def measured(
    kernel: Kernel, function: Function, inputs: Sequence[Any]
) -> tuple[list[torch.Tensor], int]:
    """Return (results of the function on `inputs`, the bytes allocated at most at once while it
    runs, beyond those allocated before)."""
    results: list[torch.Tensor] = []
    peak_bytes = rise_of(
        lambda: results.extend(function(list(inputs))), torch.device(kernel.device)
    )
    return results, peak_bytes


def _made_up(kernel: Kernel) -> list[torch.Tensor] | None:
    """Random floating-point numbers and bools (seed 0), integers with which the kernel reads within
    its tensors. None if its indices depend on the random numbers."""
    generator = torch.Generator(kernel.device).manual_seed(0)
    made = trial_inputs(kernel)
    for tensor in made:
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        if tensor.dtype.is_floating_point:
            flat.normal_(generator=generator)
        elif tensor.dtype is torch.bool:
            flat.bernoulli_(0.5, generator=generator)
    return made if is_within(kernel, made) else None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.itemsize)
    return (
        torch.equal(a, b) if integers is None else torch.equal(a.view(integers), b.view(integers))
    )


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return _same_bits(a, b)
    error, norm = squares(a, b)
    return math.sqrt(error) <= bound_of([a.dtype]) * math.sqrt(norm)


def bound_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return how far kernels that compute in these dtypes may be from eager, as a share of the
    norm."""
    return 0.1 if any(t.is_floating_point and t.itemsize <= 2 for t in dtypes) else 1e-3


def squares(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the squares of the norms of the difference, and of `other`. Equal infinities and NaNs
    are no difference, and have no norm."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    is_same = (a == b) | ((a != a) & (b != b))
    error = (a - b).masked_fill(is_same, 0).abs().square().sum()
    return float(error), float(b.masked_fill(~b.isfinite(), 0).abs().square().sum())
