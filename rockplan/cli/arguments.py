"""Arguments that several commands take, and the options made of them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rockplan.cli.factory import Subject
from rockplan.errors import InvalidInput
from rockplan.options import ROWS, Options

Model = Annotated[str, typer.Argument(metavar="MODEL", help="module:factory or file.py:factory")]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        help="Bytes, 2GB, 1.5GiB, 40% of the unplanned peak, min, auto or auto-4GB; "
        "may be repeated.",
    ),
]
Source = Annotated[
    str, typer.Argument(metavar="PLAN|MODEL", help="A file that solve --save wrote, or MODEL.")
]
Budget = Annotated[
    str | None, typer.Option("--budget", "-b", metavar="BUDGET", help="For a MODEL.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Autocast = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Plan under torch.autocast with this dtype, e.g. bfloat16."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Of torch.optim, such as adamw: what auto leaves room for beside."
    ),
]


def _argument(kind: Any, *spelling: str, default: Any = None, **words: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*spelling, **words)], default


def _switch(spelling: str, words: str) -> tuple[Any, Any]:
    return Annotated[bool, typer.Option(spelling, help=words)], False


OF_PLANNING = {
    "time_limit": _argument(
        float | None,
        metavar="SECONDS",
        min=0.0,
        help="For each plan, after the model is captured and measured; the best plan found so far "
        "is used. A curve is made of some 16 plans.",
    ),
    "no_cache": _switch("--no-cache", "Read and keep nothing on disk."),
    "compiled": _switch("--compile", "Plan kernels that PyTorch's compiler fuses from operators."),
    "near": _switch("--near", "With --compile: kernels that round as eager does."),
    "size": _argument(
        list[str] | None,
        "--size",
        metavar="DIMENSION=LEAST:MOST",
        help="The range of a dimension of the sample's tensors, such as 1=64:2048, or of one "
        "tensor, input_ids.1=64:2048: the largest sample is planned. May be repeated.",
    ),
    "tile": _switch(
        "--tile",
        "Plan the head (logits and loss) in parts of its rows as well, and take the better.",
    ),
    "only_loss": _switch(
        "--only-loss",
        "Plan for steps that use the loss of the result alone: logits are not returned.",
    ),
    "best": _switch(
        "--best",
        "Also take compiled kernels, tiles, the loss alone and, on CUDA, the host's memory, each "
        "where a plan gains by it.",
    ),
    "graph": _switch(
        "--graph", "On CUDA: replay calls as CUDA graphs, and say what memory these hold."
    ),
    "solver": _argument(
        str,
        default="HiGHS",
        metavar="NAME",
        help="Of the integer programs of blocks: HiGHS, or what PuLP finds.",
    ),
    "host": _argument(
        str | None,
        metavar="BYTES",
        help="Page activations to the host where that is faster than to make them again: at most "
        "so many bytes (8GiB), or 'all' for what the machine leaves.",
    ),
    "host_path": _argument(
        str | None,
        metavar="FOLDER",
        help="With --host, of a model on the CPU: where the file of that lies.",
    ),
    "link": _argument(
        str | None,
        metavar="RATE",
        help="With --host: bytes a second each way, such as 25GB/s, instead of what is measured.",
    ),
}
"""Argument of a command that `planning_options` reads -> its type and spelling, and its default."""

_AUTOCAST_DTYPES = ("bfloat16", "float16")


def under_autocast(subject: Subject, dtype: str | None) -> AbstractContextManager[object]:
    """Return a context in which torch.autocast with this dtype is on, for the device of the model;
    one that does nothing for None. Raises InvalidInput for unknown names."""
    if dtype is None:
        return nullcontext()
    if dtype not in _AUTOCAST_DTYPES:
        raise InvalidInput(f"--autocast {dtype}: write {' or '.join(_AUTOCAST_DTYPES)}")
    import torch

    kind = next(iter({p.device.type for p in subject.model.parameters()} - {"meta"}), "cpu")
    return torch.autocast(kind, dtype=getattr(torch, dtype))


def planned_with(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command these arguments of `planning_options`, which finds
    them in the command's context."""

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def without_them(**given: Any) -> None:
            command(**{name: value for name, value in given.items() if name not in names})

        own, keyword = inspect.signature(command, eval_str=True), inspect.Parameter.KEYWORD_ONLY
        more = [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, (kind, default) in OF_PLANNING.items()
            if name in names
        ]
        both = [*own.parameters.values(), *more]
        without_them.__dict__["__signature__"] = own.replace(parameters=both)
        without_them.__annotations__ = {p.name: p.annotation for p in both}
        return without_them

    return extended


def planning_options(given: Mapping[str, Any]) -> Options:
    """Return the Options that the arguments of a command stand for. given: arguments by name, as of
    the command's context, some of those above. Raises InvalidInput for near without compiled, and
    for values that Options refuses."""
    compiled = given.get("compiled") or given.get("kernels", False)
    if given.get("near") and not compiled:
        raise InvalidInput("--near says how kernels are compiled; it needs --compile")
    named = {name: given[name] for name in ROWS if name in given}
    spelled = {
        "cache": not given.get("no_cache"),
        "compile": "near" if given.get("near") else compiled,
        "sizes": _size_ranges(given.get("size") or ()),
        "numerics": "best" if given.get("best") else "eager",
        "host": True if given.get("host") == "all" else given.get("host"),
    }
    limit_s = given.get("time_limit")
    return Options(**named | spelled | ({} if limit_s is None else {"time_limit_s": limit_s}))


def _size_ranges(texts: Sequence[str]) -> dict[Any, Any]:
    by_name: dict[Any, Any] = {}
    for text in texts:
        match = re.fullmatch(r"(?:(.+)\.)?(\d+)=(\d+):(\d+)", text)
        if match is None:
            raise InvalidInput(
                f"--size {text}: write 1=64:2048 for dimension 1 of the sample's tensors, or "
                "input_ids.1=64:2048 for one tensor"
            )
        ranges = by_name.setdefault(match[1], {}) if match[1] else by_name
        ranges[int(match[2])] = (int(match[3]), int(match[4]))
    return by_name


def is_plan_file(source: str, for_model: bool) -> bool:
    """True if `source`, which stands for PLAN|MODEL, is a plan file. for_model: there are arguments
    that only a MODEL takes; then a plan file raises InvalidInput."""
    if ":" in source and not Path(source).is_file():
        return False
    if for_model:
        raise InvalidInput(
            "--budget, --code, --compile, --kernels, --passes and --tile are for a MODEL, not for "
            "a plan file"
        )
    return True
