"""Parameters of classes that override functions, and frozen quantized bases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockplan
from rockplan.fitting.reserved import storage_sizes
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


def test_fit_counts_what_wrappers_hold() -> None:
    weight = Rounded.of(torch.randn(16, 16))
    assert sorted(storage_sizes([weight, weight.scale])) == [16 * 4, 16 * 16]


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


class Rounded(Tensor):
    """A wrapper: numbers of 8 bits and a scale for each row."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        scale = tensor.abs().amax(-1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        inner = [(a.numbers, a.scale) for a in args if isinstance(a, cls)]
        if func in (aten.detach.default, aten.clone.default):
            return cls(*(func(t, **(kwargs or {})) for t in inner[0]))
        if func is aten.copy_.default:
            for to, source in zip(*inner, strict=True):
                to.copy_(source)
            return args[0]
        plain = [a.numbers * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


class RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(Rounded.of(x))
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0] * ctx.saved_tensors[0]


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight: Any = Rounded.of(torch.randn(16, 16))
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return RoundedGradient.apply(self.base(x) + self.adapter(x)).tanh()  # type: ignore[no-untyped-call, no-any-return]


def wrapped() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wrapped() for _ in range(4)))
    return Case("wrapped", model, (torch.randn(32, 16),), {}, lambda r: r.square().mean())


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_frozen_wrappers_are_planned_as_inner_tensors(budget: str) -> None:
    case = wrapped()
    planned: Any = plan(case, budget)
    names = [name for name, _ in planned._rockplan.latest.interface.parameters]
    assert {"0.base.weight.numbers", "0.base.weight.scale"} <= {*names}
    train_side_by_side(case, planned, copy.deepcopy(case.model))


def replaced_inside(weight: Any) -> None:
    weight.scale = weight.scale * 2


@pytest.mark.parametrize(
    "change",
    [
        replaced_inside,
        lambda weight: weight.scale.mul_(2),
        lambda weight: weight.copy_(Rounded.of(torch.randn(16, 16))),
    ],
)
def test_changes_inside_of_wrappers_are_noticed(change: Any) -> None:
    case = wrapped()
    planned, model = plan(case), case.model
    loss = case.loss(planned(*case.args))
    with torch.no_grad():
        change(model[1].base.weight)  # type: ignore[index, union-attr]
    assert torch.equal(case.loss(planned(*case.args)), case.loss(model(*case.args)))
    if change is not replaced_inside:  # of which autograd saved a copy, as of any tensor
        with pytest.raises(rockplan.BackwardError, match="modified in place"):
            loss.backward()


def test_wrappers_of_copies_are_their_own() -> None:
    case = wrapped()
    planned = plan(case)
    other = copy.deepcopy(planned)
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    state["0.base.weight"].scale.mul_(2)
    other.load_state_dict(state)
    before = case.loss(case.model(*case.args))
    assert torch.equal(case.loss(planned(*case.args)), before)
    assert not torch.equal(case.loss(other(*case.args)), before)
    planned.load_state_dict(state, assign=True)
    assert torch.equal(case.loss(other(*case.args)), case.loss(planned(*case.args)))


class PutTogether(Rounded):
    """A wrapper that can be trained."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> PutTogether:
        return PutTogether(inner["numbers"], inner["scale"])


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_gradients_of_trained_wrappers_are_of_the_whole(budget: str) -> None:
    case = wrapped()
    for block in case.model:  # type: ignore[union-attr]
        block.base.weight = nn.Parameter(PutTogether.of(torch.randn(16, 16)))
    eager = copy.deepcopy(case.model)
    planned: Any = plan(case, budget)
    train_side_by_side(case, planned, eager)
    assert len(case.model[0].base.weight.grad) == 16  # type: ignore[index, union-attr, arg-type]
    assert len(storage_sizes([case.model[0].base.weight])) == 2  # type: ignore[index, union-attr]


def test_what_cannot_be_put_together_is_refused() -> None:
    case = wrapped()
    case.model[2].base.weight.requires_grad_(True)  # type: ignore[index, union-attr]
    with pytest.raises(rockplan.UnsupportedModel, match=r"'2.base.weight' is a Rounded.*freeze it"):
        plan(case)
    case.model[2].base.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    train_side_by_side(case, plan(case), copy.deepcopy(case.model))


class Returning(Wrapped):
    def __init__(self, result: Callable[[Any], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        h = self.adapter(x).tanh()
        return h, self.result(Rounded.of(h.detach()))


def test_wrappers_as_results_are_refused_by_place() -> None:
    x = torch.randn(8, 16)
    with pytest.raises(
        rockplan.UnsupportedModel, match="leaf 1 of the .* is a Rounded, .*its parts"
    ):
        rockplan.solve(Returning(lambda made: made), x, "min", options=QUICK)
    for result in (lambda made: (made.numbers, made.scale), lambda made: made * 1):
        case = Case("returning", Returning(result), (x,), {}, lambda r: r[0].square().mean())
        train_side_by_side(case, plan(case), copy.deepcopy(case.model))


LIBRARIES = {"quanto": "optimum.quanto"} | {n: n for n in ("bitsandbytes", "torchao", "hqq")}
ROWS = [
    *(
        ("bitsandbytes/nf4", adapter, "Llama")
        for adapter in adapter_cases.ADAPTERS
        if adapter not in ("LoHa", "LoKr", "none")
    ),
    *(("bitsandbytes/nf4, by layer", "LoRA", model) for model in adapter_cases.MODELS),
    *((scheme, "LoRA", "Llama") for scheme in adapter_cases.FROZEN),
    *(("torchao/int8", adapter, "Llama") for adapter in ("DoRA", "IA3")),
    *(
        (f"torchao/{kind} training", "none", "Llama")
        for kind in ("float8", "int4 in", "int8 and int4 in", "int8 products", "BitNet")
    ),
]


@pytest.mark.parametrize(("scheme", "adapter", "model"), ROWS)
def test_quantized_models_train_as_eager(scheme: str, adapter: str, model: str) -> None:
    for library in (
        LIBRARIES[scheme.partition("/")[0]],
        "peft",
        *(["diffusers"] if model == "UNet" else []),
    ):
        pytest.importorskip(library, reason=f"{library} is in no extra of this package")
    call = adapter_cases.call_of(model)

    def made() -> Any:  # not all classes of tensors can be copied
        torch.manual_seed(0)
        base = adapter_cases.SCHEMES[scheme](model)
        adapted = adapter_cases.ADAPTERS[adapter](base).train()
        adapter_cases.loss_of(adapted(**call))
        return adapted

    case = Case(scheme, made(), (), call, adapter_cases.loss_of)
    train_side_by_side(case, plan(case), made(), steps=2)


@pytest.mark.parametrize("width", [64, 48])
@pytest.mark.parametrize("name", ["EmbeddingNF4", "EmbeddingFP4", "Embedding8bit"])
def test_quantized_embeddings_train_as_eager(name: str, width: int) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="it is in no extra of this package")
    torch.manual_seed(0)
    embedding = getattr(bitsandbytes.nn, name)(100, width)
    embedding.load_state_dict(nn.Embedding(100, width).state_dict())
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(embedding.to("cpu"), *layers)
    eager = nn.Sequential(model[0], *copy.deepcopy(layers))
    ids = torch.randint(0, 100, (4, 16))
    case = Case(name, model, (ids,), {}, lambda r: r.square().mean())
    train_side_by_side(case, plan(case), eager)


def test_trainers_train_quantized_bases_as_eager(
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


class Dequantized(nn.Module):
    """A frozen layer of 8 bits, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
        self.adapter = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(x @ self.numbers.to(x.dtype)).tanh()  # type: ignore[no-any-return]


def test_explain_says_where_dequantized_weights_are_kept() -> None:
    model = nn.Sequential(*(Dequantized() for _ in range(4)))
    sample = torch.randn(32, 64, requires_grad=True)
    found = {}
    for budget in ("100%", "min"):
        explanation = rockplan.explain(rockplan.solve(model, (sample,), budget, options=QUICK))
        found[budget] = [(s.pattern, s.tenants, s.size_bytes) for s in explanation.weights]
        assert all(f"{count} {text}" in str(explanation) for text, count, _ in found[budget])
    assert found["100%"] == [("kept for the backward phase", 4, 4 * 64 * 64 * 4)]
    assert "made in the backward phase" in [text for text, *_ in found["min"]]


@pytest.mark.parametrize("scheme", ["bitsandbytes/nf4, double", "torchao/int8"])
def test_sft_trainers_train_quantized_bases_as_eager(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip(scheme.partition("/")[0], reason="it is in no extra of this package")
    for library in ("peft", "trl"):
        pytest.importorskip(library)
    import peft

    from testing import trainers

    def trained(is_planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        base = adapter_cases.SCHEMES[scheme]("Llama")
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        trainer = trainers.supervised(base, tmp_path, lora)
        decoder = trainer.model.train().get_base_model()
        ids = torch.zeros(2, trainers.LENGTH, dtype=torch.int64)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        if is_planned:
            decoder.model = rockplan.solve(decoder.model, batch, "50%", options=QUICK)
        trainer.train()
        assert not is_planned or decoder.model._rockplan.has_run
        return [p.detach() for p in trainer.model.parameters() if p.requires_grad]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit"])
def test_optimizers_in_8_bits_and_merged_adapters(name: str) -> None:
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
