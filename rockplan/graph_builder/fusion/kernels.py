"""Kernels of this process: the operators by which they are called, and the functions that run.

takes: Kernels. returns: functions of a list of tensors that return a sequence of them. guarantees:
a kernel is compiled once in a process; its operator exists as soon as it is known, so that
whatever handles operators by name handles it.

The operator serves those that measure calls or look at schemas. On another device than the kernel's
(indices are looked at on the CPU) it computes by the operators that were fused. Generated code
calls the function itself (`codegen.load`), in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rockplan.errors import CaptureError
from rockplan.graph_builder.fusion import inductor
from rockplan.graph_builder.fusion.parts import refs
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.tracing.evaluate import substitute
from rockplan.values.graph import NAMESPACE, Kernel

Function = Callable[[list[Any]], Sequence[torch.Tensor]]

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_known: dict[str, Kernel] = {}
_functions: dict[str, Function] = {}


def made(kernels: Iterable[Kernel]) -> Mapping[str, str]:
    """Compile what is not compiled yet, and make operators of all that could be: name of the
    operator -> why it could not."""
    missing = {k.op: k for k in kernels if k.op not in _functions}
    failed: dict[str, str] = {}
    for op, found in inductor.compiled(tuple(missing.values())).items():
        if isinstance(found, str):
            failed[op] = found
            continue
        _functions[op] = found
        _define(missing[op])
    return failed


def function_of(kernel: Kernel) -> Function:
    """What runs a kernel, compiled here and now if it is not yet: that of a plan which was made in
    another process. Raises CaptureError."""
    failed = made([kernel])
    if failed:
        raise CaptureError(
            f"the kernel {kernel.name} of this plan cannot be compiled here ({failed[kernel.op]}); "
            "plan the model again with rockplan.solve"
        )
    return _functions[kernel.op]


def _define(kernel: Kernel) -> None:
    if kernel.op in _known:
        return
    arguments = ", ".join(f"Tensor a{i}" for i in range(len(kernel.inputs)))
    results = ", ".join(["Tensor"] * len(kernel.results))
    returns = results if len(kernel.results) == 1 else f"({results})"
    _LIBRARY.define(f"{kernel.name}({arguments}) -> {returns}")
    _LIBRARY.impl(kernel.name, _implementation(kernel), "CompositeExplicitAutograd")
    _known[kernel.op] = kernel


def _implementation(kernel: Kernel) -> Callable[..., Any]:
    def run(*arguments: torch.Tensor) -> Any:
        is_here = all(str(a.device) == kernel.device for a in arguments)
        results = _functions[kernel.op](list(arguments)) if is_here else computed(kernel, arguments)
        return results[0] if len(kernel.results) == 1 else tuple(results)

    return run


def computed(kernel: Kernel, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the kernel computes, by the operators that it fuses, on the device of `arguments`."""
    device = arguments[0].device if arguments else torch.device(kernel.device)
    values: dict[int, Any] = dict(enumerate(arguments))

    def here(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    last = {v: i for i, c in enumerate(kernel.calls) for v in (r.index for r in refs(c))}
    last |= dict.fromkeys(kernel.results, len(kernel.calls))
    for position, call in enumerate(kernel.calls):
        args = pytree.tree_map(here, [substitute(a, values.__getitem__) for a in call.args])
        kwargs = {k: here(substitute(a, values.__getitem__)) for k, a in call.kwargs}
        result = facts.resolve(call.op)(*args, **kwargs)
        found = result if isinstance(result, list | tuple) else [result]
        values |= {r: t for r, t in zip(call.results, found, strict=True) if r is not None}
        values = {v: t for v, t in values.items() if last.get(v, -1) > position}
        del args, kwargs, result, found
    return [values[r] for r in kernel.results]
