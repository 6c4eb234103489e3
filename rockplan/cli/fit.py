"""`rockplan fit`: which batches of which lengths train on a device, and what each way costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import rockplan
from rockplan.cli import arguments as shared
from rockplan.cli import display
from rockplan.cli.ending import ending
from rockplan.cli.factory import make_subject
from rockplan.errors import InvalidInput
from rockplan.options import SizeRange
from rockplan.reports.progress_bars import waiting
from rockplan.store.plan_file import write_whole

EXAMPLE = "Example: rockplan fit rockplan.examples:transformer --gpu 700MiB --batch 1:64"

LISTED = "list"
"""Given in place of a device: print the known devices."""


@shared.planned_with("time_limit", "compiled", "near", "tile", "only_loss", "host", "link")
def fit(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="module:factory or file.py:factory")
    ] = "",
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            "--device",
            metavar="NAME|BYTES",
            help="A name, 80GiB, cuda, cpu; several: the first that does; list for the names.",
        ),
    ] = "",
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Of torch.optim, such as adamw; none for none.")
    ] = "adamw",
    batch: Annotated[
        str | None,
        typer.Option(metavar="LEAST:MOST", help="Of dimension 0 of the sample's tensors."),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            metavar="LEAST:MOST", help="Of dimension 1 of the sample's tensors; of some: ids=1:64."
        ),
    ] = None,
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="Forward and backward passes before each step.")
    ] = 1,
    keep_gradients: Annotated[
        bool, typer.Option("--keep-gradients", help="As zero_grad(set_to_none=False) does.")
    ] = False,
    clip_norm: Annotated[
        bool, typer.Option("--clip-norm", help="With clip_grad_norm_ before each step.")
    ] = False,
    grad_scaler: Annotated[
        bool, typer.Option("--grad-scaler", help="With torch.amp.GradScaler.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="With a moving average of parameters.")
    ] = False,
    in_backward: Annotated[
        bool, typer.Option("--in-backward", help="Each parameter steps in backward, by a hook.")
    ] = False,
    gpus: Annotated[
        int, typer.Option(metavar="N", help="Processes that train together, a GPU each.")
    ] = 1,
    shard: Annotated[
        str | None,
        typer.Option(metavar="fsdp2|ddp", help="How they share the model; with --gpus. [fsdp2]"),
    ] = None,
    autocast: shared.Autocast = None,
    remedies: Annotated[
        bool, typer.Option("--remedies", help="Also rows of options with which more fits.")
    ] = False,
    inference: Annotated[
        bool, typer.Option("--inference", help="Also batches of evaluation and generation.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a page with the frontier of the ways."),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """The largest batches of MODEL that fit on a GPU, kept whole, checkpointed and planned."""
    with ending(as_json), waiting():
        if gpu == LISTED or not (gpu or model):
            from rockplan.fitting.gpus import listing

            text = listing()
        else:
            options = shared.planning_options(context.params)
            sizes = (*_ranges("--batch", 0, batch), *_ranges("--length", 1, length))
            step = rockplan.TrainingStep(
                accumulate, not keep_gradients, clip_norm, grad_scaler, average, in_backward
            )
            asked = {
                "optimizer": None if optimizer == "none" else optimizer,
                "sizes": sizes,
                "step": step,
                "options": options,
                "remedies": remedies,
                "inference": inference,
                "gpus": gpus,
                **({"shard": shard} if shard is not None else {}),
            }
            if shard is not None and gpus == 1:
                raise InvalidInput(
                    f"--shard {shard} says how several processes share the model: write --gpus N, "
                    "too, at least 2"
                )
            answer = _answer(model, gpu, autocast, asked)
            if html is not None:
                from rockplan.will_it_fit.page import fit_page

                write_whole(Path(html), fit_page(answer))
            text = answer.to_json() if as_json else str(answer)
    print(text if as_json else display.printable(text))


def _answer(model: str, gpu: str, autocast: str | None, asked: dict[str, Any]) -> rockplan.Fit:
    from rockplan.fitting.gpus import gpu as device_of

    if not gpu:
        raise InvalidInput("say --gpu NAME; --gpu list shows them")
    device = [*map(device_of, gpu.split(","))]
    if not model:
        raise InvalidInput("fit needs a MODEL: write 'module:factory' or 'file.py:factory'")
    subject = make_subject(model)
    with shared.under_autocast(subject, autocast):
        return rockplan.fit(**subject.call, device=device, **asked)


def _ranges(option: str, dimension: int, text: str | None) -> Iterator[SizeRange]:
    if text is None:
        return
    match = re.fullmatch(r"(?:(.+)=)?(\d+)(?::(\d+))?", text)
    least, most = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
    if not match or not 0 < least <= most:
        raise InvalidInput(f"{option} {text}: write LEAST:MOST, such as {option} 1:64, or one size")
    for name in (match[1] or "").split(","):
        yield SizeRange(name, dimension, least, most)
