"""Parameters of classes that override functions, and frozen quantized bases."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockplan
from rockplan.integrations.transformers import RockplanCallback
from testing import adapter_cases
from testing.models import Case
from testing.training import QUICK, train_side_by_side


class Doubling(nn.Parameter):
    """A parameter with scales: linear layers multiply by them, and return twice of that."""

    scales: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is nn.functional.linear and cls in types else result


def doubling(rows: int = 16) -> Any:
    made: Any = Doubling(torch.randn(rows, 16), requires_grad=False)
    made.scales = torch.rand(rows)
    return made


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = doubling()
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.linear(x, self.weight) * self.weight.scales
        return (inner + self.adapter(x)).tanh()


def stack() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    return Case("scaled", model, (torch.randn(32, 16),), {}, lambda r: r.square().mean())


def plan(case: Case, budget: str = "min") -> nn.Module:
    return rockplan.solve(case.model, case.args, budget, sample_kwargs=case.kwargs, options=QUICK)


@pytest.mark.parametrize("budget", ["50%", "min"])
def test_functions_that_a_parameter_overrides_run(budget: str) -> None:
    case = stack()
    eager = copy.deepcopy(case.model)
    for one, other in zip(eager, case.model, strict=True):
        one.weight = other.weight
    train_side_by_side(case, plan(case, budget), eager)


def test_other_tensors_on_a_parameter_are_noticed() -> None:
    case = stack()
    planned: Any = plan(case)
    case.model[0].weight.scales = torch.rand(16)  # type: ignore[index, union-attr, assignment]
    expected = case.loss(case.model(*case.args))
    assert torch.equal(case.loss(planned(*case.args)), expected)


class Keeping(Tensor):
    """A class whose results are of it, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_results_of_an_overriding_class_are_refused() -> None:
    x = torch.randn(4, 16).as_subclass(Keeping)
    with pytest.raises(rockplan.UnsupportedModel, match="is a Keeping"):
        rockplan.solve(nn.Linear(16, 16), (x,), "100%", options=QUICK)


def test_fit_keeps_classes_of_the_meta_device() -> None:
    """What a class hangs on its parameters has no memory either."""
    x = torch.randn(8, 16)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(Scaled(), Scaled())
        found.append(rockplan.fit(model, x.to(device), "1GiB", sizes={0: (8, 8)}, options=QUICK))
    assert [row.allocated_bytes for row in found[0].rows] == [
        row.allocated_bytes for row in found[1].rows
    ]


class Refreshed(nn.Linear):
    """Gives its weight the memory that it has."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.memory
        return super().forward(x)


def test_data_that_a_tensor_has_is_nothing() -> None:
    torch.manual_seed(0)
    model = Refreshed(16, 16)
    model.memory = model.weight.data
    case = Case("refreshed", model, (torch.randn(8, 16),), {}, lambda r: r.square().mean())
    eager = copy.deepcopy(model)
    eager.memory = eager.weight.data
    train_side_by_side(case, plan(case, "100%"), eager)


ROWS = [
    *(("nf4", adapter, "Llama") for adapter in adapter_cases.ADAPTERS),
    *(("nf4, double", "LoRA", model) for model in adapter_cases.MODELS),
    *((scheme, "LoRA", "Llama") for scheme in ("nf4, double, bfloat16", "fp4", "int8")),
]


@pytest.mark.parametrize(("scheme", "adapter", "model"), ROWS)
def test_adapters_over_bitsandbytes_train_as_eager(scheme: str, adapter: str, model: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is in no extra of this package")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    base = adapter_cases.SCHEMES[f"bitsandbytes/{scheme}"](model)
    adapted = adapter_cases.ADAPTERS[adapter](base).train()
    call = adapter_cases.call_of(model)
    adapter_cases.loss_of(adapted(**call))
    case = Case(scheme, adapted, (), call, adapter_cases.loss_of)
    eager = copy.deepcopy(adapted)
    train_side_by_side(case, plan(case), eager, steps=2)


def test_a_trainer_with_the_callback_trains_a_quantized_base_as_eager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is in no extra of this package")
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, adapter_cases.VOCABULARY, (16, adapter_cases.SEQUENCE))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def trained(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(0)
        base = adapter_cases.SCHEMES["bitsandbytes/nf4, double"]("Llama")
        model = adapter_cases.ADAPTERS["LoRA"](base).train()
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(
            model=model, args=arguments, train_dataset=data, callbacks=[*callbacks]
        ).train()
        return [p.detach() for p in model.parameters() if p.requires_grad]

    with caplog.at_level("INFO", "rockplan"):
        planned = trained(RockplanCallback(budget="50%"))
    assert "planned PeftModel at its first call in training" in caplog.text
    assert all(map(torch.equal, planned, trained()))


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit"])
def test_optimizers_in_8_bits_and_merged_adapters_beside_a_plan(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it is in no extra of this package")
    call = adapter_cases.call_of("Llama")

    def made() -> Any:
        torch.manual_seed(0)
        return adapter_cases.ADAPTERS["LoRA"](adapter_cases.SCHEMES["bitsandbytes/nf4"]("Llama"))

    eager, model = made().train(), made().train()
    planned: Any = rockplan.solve(model, (), "50%", sample_kwargs=call, options=QUICK)

    def steps(module: Any, of: Any) -> list[Tensor]:
        trained = [p for p in of.parameters() if p.requires_grad]
        optimizer = getattr(bitsandbytes.optim, name)(trained, lr=1e-2)
        found = []
        for number in range(4):
            if number == 2:
                of.merge_adapter()
                with torch.no_grad():
                    found.append(module(**call).logits)
                of.unmerge_adapter()
            torch.manual_seed(number)
            adapter_cases.loss_of(module(**call)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *(p.detach() for p in trained)]

    assert all(map(torch.equal, steps(planned, model), steps(eager, eager)))
