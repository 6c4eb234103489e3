"""Frozen quantized bases with adapters: steps of plans beside eager's, and what they need.

    make adapters

in an environment of its own, which has the libraries. A row is library and scheme x adapter x
model: three steps of AdamW, eager and planned at 50 % and "min", compared bit for bit (losses,
gradients), measured peaks beside predicted ones, and that of gradient checkpointing. Writes
benchmarks/results/adapters.md.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rockplan
import testing  # noqa: F401 (lets transformers be imported beside a CPU build of torch)
from benchmarks.timing import where
from rockplan.errors import RockplanError
from rockplan.options import Options
from testing.adapter_cases import ADAPTERS, FROZEN, SCHEMES, call_of, loss_of

RESULTS = Path(__file__).parent / "results" / "adapters.md"
OPTIONS = Options(cache=False, time_limit_s=2)
NF4, BF16 = "bitsandbytes/nf4, double", "bitsandbytes/nf4, double, bfloat16"
BITS, BY_LAYER = ("bitsandbytes/nf4", "bitsandbytes/int8"), "bitsandbytes/nf4, by layer"
ROWS = (
    *((NF4, adapter, "Llama") for adapter in ADAPTERS if adapter != "none"),
    *((BF16, adapter, "Llama") for adapter in ("prepared", "DoRA", "modules_to_save")),
    *((scheme, "LoRA", "Llama") for scheme in FROZEN if scheme not in (NF4, BF16, BY_LAYER)),
    *((scheme, "none", "Llama") for scheme in SCHEMES if scheme not in FROZEN),
    *((scheme, "LoRA", "Qwen3") for scheme in FROZEN[:6] if scheme != BY_LAYER),
    *((scheme, "DoRA", "Qwen3") for scheme in BITS),
    *(("torchao/int8", adapter, "Llama") for adapter in ("DoRA", "IA3", "LoHa", "LoKr")),
    *((scheme, "LoRA", "ViT") for scheme in (*BITS, "torchao/int8")),
    *((scheme, "LoRA", "UNet") for scheme in (BY_LAYER, "torchao/nf4", "quanto/int8")),
)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def three_steps(module: nn.Module, model: nn.Module, call: dict[str, Any]) -> list[torch.Tensor]:
    """Losses and gradients of three steps of `module`, which trains the parameters of `model`;
    they begin and end as they were."""
    before = [p.detach().clone() for p in trained(model)]
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    found: list[torch.Tensor] = []
    for number in range(3):
        torch.manual_seed(number)
        loss = loss_of(module(**call))
        loss.backward()
        gradients = [p.grad.clone() for p in trained(model) if p.grad is not None]
        found += [loss.detach().clone(), *gradients]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(trained(model), before, strict=True):
            parameter.copy_(value)
    return found


def peak_mib(module: nn.Module, call: dict[str, Any]) -> float:
    def step() -> None:
        loss_of(module(**call)).backward()

    step()  # gradients are no part of a peak: they are there, and added to
    peak_bytes = rockplan.peak_live_bytes(step).peak_bytes
    module.zero_grad()
    return peak_bytes / 2**20


def checkpointed_mib(model: Any, call: dict[str, Any]) -> float | None:
    """The peak with gradient checkpointing of the library; None if it has none."""
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except (AttributeError, ValueError, TypeError):
        return None
    try:
        return peak_mib(model, call)
    finally:
        model.gradient_checkpointing_disable()


def cells(scheme: str, adapter: str, kind: str) -> Iterator[str]:
    torch.manual_seed(0)
    model = ADAPTERS[adapter](SCHEMES[scheme](kind)).train()
    call = call_of(kind)
    expected = three_steps(model, model, call)
    yield f"{peak_mib(model, call):.2f}"
    for budget in ("50%", "min"):
        options = replace(OPTIONS, released=() if kind == "UNet" else (1,))
        planned = rockplan.solve(model, (), budget, sample_kwargs=call, options=options)
        found = three_steps(planned, model, call)
        is_equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
        plan_mib = rockplan.plan_of(planned).peak_bytes / 2**20
        measured_mib = peak_mib(planned, call)
        over = " **over**" if measured_mib > plan_mib else ""
        yield f"{'equal' if is_equal else '**differs**'}, {plan_mib:.2f}, {measured_mib:.2f}{over}"
    least_mib = checkpointed_mib(model, call)
    yield "" if least_mib is None else f"{least_mib:.2f}"


def row(scheme: str, adapter: str, kind: str) -> str:
    found: list[str] = []
    try:
        found.extend(cells(scheme, adapter, kind))
    except RockplanError as error:
        text = re.sub(r"/\S*site-packages/", "", str(error).splitlines()[0])
        found.append(f"refused: {text[:160]}")
    except Exception as error:  # of the library, before anything is planned
        found.append(f"{type(error).__name__} of eager: {str(error).splitlines()[0][:120]}")
    found += [""] * (4 - len(found))
    return f"| {scheme} | {adapter} | {kind} | {' | '.join(found)} |"


def _versions() -> str:
    found = []
    names = (
        "bitsandbytes",
        "torchao",
        "optimum-quanto",
        "hqq",
        "peft",
        "transformers",
        "diffusers",
    )
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    warnings.simplefilter("ignore")
    names = sys.argv[1:]
    lines = []
    for one in ROWS:
        if names and not all(n in one for n in names):
            continue
        lines.append(row(*one))
        print(lines[-1], flush=True)
    if names:
        return
    head = f"""# Frozen quantized bases with adapters

`python -m benchmarks.adapters` (`make adapters` makes an environment for it), {where()},
{_versions()}.
Four layers of width 64, three steps of AdamW; where "training" is in the name, all weights are
trained. MiB beyond parameters, buffers, inputs and gradients: of eager (in "prepared", with
gradient checkpointing; "under autocast" is so, too); at 50 % and "min": bits of losses and
gradients beside eager's, predicted, measured; of gradient checkpointing.

| base | adapter | model | eager | 50 %: bits, predicted, measured | "min" | checkpointing |
|---|---|---|---|---|---|---|
"""
    RESULTS.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
