"""Advice of refusals is followed literally: what it says is planned, and equal to eager."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

import rockplan
from rockplan.python_state import key_value_cache
from testing.blocks import QUICK
from testing.training import assert_same_state
from tests.following import OPTIONS, Net, assert_planned, made_once

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def refusal(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(rockplan.CaptureError) as caught:
        rockplan.solve(model, args, "100%", sample_kwargs=kwargs, options=OPTIONS)
    return str(caught.value)


@dataclass(frozen=True)
class Advice:
    """A refused model with its call; what is said; the advice followed, with calls."""

    refused: Callable[[], tuple[Any, ...]]
    says: str
    followed: Callable[[], tuple[Any, ...]]


def twice(self: Any, x: Tensor, is_twice: Any) -> Tensor:
    return self.b(self.a(x) * 2 if is_twice else self.a(x))


def by_python(self: Any, x: Tensor) -> Tensor:
    return twice(self, x, random.random() < 0.5)


def by_numpy(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x) + torch.as_tensor(numpy.random.rand(8), dtype=torch.float32))


def by_many_draws(self: Any, x: Tensor) -> Tensor:
    for _ in range(12):
        x = twice(self, x, torch.rand([]) < 0.5)
    return x


def by_value(self: Any, x: Tensor, scale: Tensor) -> Tensor:
    return self.b(self.a(x) * float(scale))


def by_number(self: Any, x: Tensor, scale: float) -> Tensor:
    return self.b(self.a(x) * scale)


def kept_buffer(self: Any, x: Tensor) -> Tensor:
    if "bias" not in self._buffers:
        self.register_buffer("bias", (x - x.mean()).detach())
    return self.b(self.a(x)) + self.bias


def zeroed() -> Net:
    """A loss that is the buffer itself where there is none, as of vector quantizers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.zero.requires_grad_()

    net = Net(forward)
    net.register_buffer("zero", torch.tensor(0.0))
    return net


def validated(self: Any, x: Tensor) -> Tensor:
    # torch.compile, once imported, switches the default off.
    return torch.distributions.Normal(self.a(x), self.b(x).exp(), validate_args=True).rsample()


def not_validated(self: Any, x: Tensor) -> Tensor:
    args = (self.a(x), self.b(x).exp())
    return torch.distributions.Normal(*args, validate_args=False).rsample()


def finite(self: Any, x: Tensor) -> Tensor:
    """As DETR clamps what is not finite, after dropout."""
    y = nn.functional.dropout(self.a(x))
    return self.b(y if torch.isfinite(y).all() else y.clamp(-1, 1))


def finite_on_the_tensor(self: Any, x: Tensor) -> Tensor:
    y = nn.functional.dropout(self.a(x))
    return self.b(torch.where(torch.isfinite(y).all(), y, y.clamp(-1, 1)))


class Scripted(nn.Module):
    """As e3nn scripts what it has generated, where its defaults say so."""

    scripts = True

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(8, 8)
        self.generated = torch.jit.script(linear) if self.scripts else linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.generated(x))


def of_e3nn(scripts: bool) -> nn.Module:
    kind = type("Product", (Scripted,), {"__module__": "e3nn.o3", "scripts": scripts})
    return nn.Sequential(kind(), nn.Tanh())


def accumulated() -> nn.Module:
    """As Megatron's linear layers add gradients up in `main_grad`."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            weight.main_grad.add_(gradient.t() @ x)
            return gradient @ weight, None

    net = Net(lambda self, x: self.b(Product.apply(self.a(x), self.a.weight)))
    net.a.weight.main_grad = torch.zeros(8, 8)  # type: ignore[attr-defined]
    return net


def test_kernels_add_up_gradients_once() -> None:
    planned: Any = rockplan.solve(accumulated(), X, "min", options=rockplan.Options(cache=False))
    eager: Any = accumulated()
    eager.load_state_dict(planned.state_dict())
    for step in range(3):
        for net in (eager, planned):
            net(X + step).square().mean().backward()
        assert torch.equal(eager.a.weight.main_grad, planned.a.weight.main_grad)


def kernel(scale: float) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * scale)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.from_numpy(gradient.numpy() * scale)

    return Scaled


DECLARED = rockplan.opaque(kernel(3.0))


B = torch.tensor
ADVICE = {
    "draw of Python that decides": Advice(
        lambda: (Net(by_python), X),
        "draw before the call",
        lambda: (Net(twice), (X, True), (X, False), (X, True)),
    ),
    "passed in as a tensor of bools": Advice(
        lambda: (Net(by_python), X),
        "a tensor of bools or integers",
        lambda: (Net(twice), (X, B(True)), (X, B(False)), (X, B(1))),
    ),
    "draw of numpy that is computed with": Advice(
        lambda: (Net(by_numpy), X),
        "what it computes with as a tensor",
        lambda: (Net(lambda self, x, drawn: self.b(self.a(x) + drawn)), (X, X[0]), (X, X[1])),
    ),
    "value after a draw": Advice(
        lambda: (Net(finite), X),
        "reads a value that depends on leaf 0 of the arguments",
        lambda: (Net(finite_on_the_tensor), (X,), (X + 1,)),
    ),
    "script of e3nn": Advice(
        lambda: (of_e3nn(True), X),
        "e3nn.set_optimization_defaults(jit_script_fx=False)",
        lambda: (of_e3nn(False), (X,), (X + 1,)),
    ),
    "draws that are read": Advice(
        lambda: (Net(by_many_draws), X),
        "draw before the call",
        lambda: (Net(twice), (X, False), (X, True)),
    ),
    "number in a tensor": Advice(
        lambda: (Net(by_value), X, B(2.0)),
        "as a Python bool or number",
        lambda: (Net(by_number), (X, 2.0), (X, 3.0)),
    ),
    "buffer of the first call": Advice(
        lambda: (Net(kept_buffer), X),
        "If only the first call does: run the module once on the sample",
        lambda: (made_once(Net(kept_buffer), X), (X,), (X + 1,)),
    ),
    "buffer that is to have a gradient": Advice(
        lambda: (zeroed(), X),
        "only the first call does: run the module once on the sample",
        lambda: (made_once(zeroed(), X), (X,), (X + 1,)),
    ),
    "distribution": Advice(
        lambda: (Net(validated), X),
        "validate_args=False",
        lambda: (Net(not_validated), (X,), (X + 1,)),
    ),
    "class made in the forward": Advice(
        lambda: (Net(lambda self, x: self.b(kernel(3.0).apply(self.a(x)))), X),
        "put @rockplan.opaque on the class where it is made",
        lambda: (Net(lambda self, x: self.b(DECLARED.apply(self.a(x)))), (X,), (X + 1,)),
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_followed_literally(name: str) -> None:
    advice = ADVICE[name]
    assert advice.says in refusal(*advice.refused())
    model, *calls = advice.followed()
    assert_planned(model, *calls)


# Yes or no of a few numbers, given or drawn


@pytest.mark.parametrize("given", [B(0.2), torch.linspace(0, 1, 5)], ids=["number", "times"])
def test_questions_about_few_numbers_make_kinds_of_call(given: Tensor) -> None:
    def grows(self: Any, x: Tensor, times: Tensor) -> Tensor:
        return twice(self, x, (times < 0.5).any()) * times.sum()

    other = given + 1
    planned = assert_planned(Net(grows), (X, given), (X, other), (X, given * 0.5), (X, other + 1))
    assert len(planned.plans) == 2


def test_a_batch_is_not_asked_before_each_call() -> None:
    said = refusal(Net(lambda self, x: twice(self, x, x.sum() > 0)), X)
    assert "leaf 0 of the arguments" in said and "decide before the call" in said


# Adapters of peft

LLAMA = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TARGETS = ["q_proj", "v_proj"]


def adapted(config: peft.PeftConfig) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False))
    return peft.get_peft_model(model, config).train()  # type: ignore[arg-type]


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=TARGETS, module_dropout=-1.0),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rockplan"):
        assert_planned(adapted(ADAPTERS[name]()), batch(), batch(), batch())


def test_many_adapters_that_drop_layers_by_draws() -> None:
    def model(share: float) -> Any:
        config = peft.LoHaConfig(r=2, target_modules="all-linear", module_dropout=share)
        settings = LLAMA | {"num_hidden_layers": 2}
        torch.manual_seed(0)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, use_cache=False))
        return peft.get_peft_model(llama, config).train()  # type: ignore[arg-type]

    assert "module_dropout=-1.0" in refusal(model(0.0), **batch())
    assert_planned(model(-1.0), batch(), batch())


def test_a_cache_that_is_asked_for_is_refused() -> None:
    said = refusal(adapted(ADAPTERS["prefix"]()), **batch(), use_cache=True)
    assert "use_cache=False" in said


BERT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BART = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
WITH_A_SWITCH: dict[str, Callable[[], nn.Module]] = {
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "body of BERT": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "BERT as a decoder": lambda: transformers.BertLMHeadModel(
        transformers.BertConfig(**BERT, is_decoder=True)
    ),
    "RoBERTa": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BERT)),
    "Llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)),
    "BART": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "Mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=2)
    ),
}


@pytest.mark.parametrize("name", WITH_A_SWITCH)
def test_a_cache_that_only_eager_has_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = WITH_A_SWITCH[name]().train()
    ids = batch()["input_ids"]
    labels = {"labels": ids} if name in ("BERT", "RoBERTa", "BART", "Mamba") else {}
    with torch.no_grad():
        result = model(input_ids=ids, **labels)
    has_one = any("Cache" in type(part).__name__ for part in result.values())
    with caplog.at_level(logging.WARNING, "rockplan"):
        key_value_cache.say(model, {"input_ids": ids, **labels})
    said = [record for record in caplog.records if record.name == "rockplan"]
    assert bool(said) == has_one == (name in ("BERT as a decoder", "Llama"))


# Parts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Chosen(nn.Module):
    """What none can plan: the rows that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x[self.score(x)[:, 0] > 0].sum() + x.sum()


class Detector(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, Chosen()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Dropping(nn.Module):
    """LayerDrop in the loop over the layers, as of wav2vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(x)
            if torch.rand([]) > 0.01:
                x = layer(x)
        return x.sum()


class Recurrent(nn.Module):
    """A block that cannot be planned among blocks that can."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(), Layer(), Halting(), Halting()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Halting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return super().forward(x)


REFUSED_IN_PART = {
    "layers beside the head": (
        lambda: Detector(nn.Sequential(*(Layer() for _ in range(2)))),
        "blocks='backbone.*'",
    ),
    "one body beside the head": (lambda: Detector(Layer()), "blocks=['backbone', 'head.first']"),
    "layers that are dropped": (Dropping, "blocks='layers.*'"),
    "blocks of another class": (Recurrent, "blocks=['blocks.0', 'blocks.1']"),
}


@pytest.mark.parametrize("name", REFUSED_IN_PART)
def test_a_refusal_names_parts_that_can_be_planned(name: str) -> None:
    make, blocks = REFUSED_IN_PART[name]
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    said = refusal(model, X)
    call = f"rockplan.solve_blocks(model, sample, budget, {blocks}, options="
    assert call in said
    # The layers are not to be left out while this plans.
    torch.manual_seed(0)
    named = {"model": model, "sample": X, "budget": "100%", "rockplan": rockplan}
    assert eval(f"rockplan.{said.split('rockplan.')[-2]}rockplan.{_end(said)}", named) is model
    assert rockplan.blocks_of(model).blocks
    for module in (model, eager):
        torch.manual_seed(1)
        module(X).backward()
    assert_same_state(model, eager, "one step")


def _end(said: str) -> str:
    return said.split("rockplan.")[-1].split(", which leaves")[0]


class KeepsOne(nn.Module):
    """As routers keep a loss of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.gate(x)
        return x + torch.as_tensor(self.down(self.kept))


def test_nothing_is_named_where_nothing_is_planned() -> None:
    assert "solve_blocks" not in refusal(nn.Sequential(*(KeepsOne() for _ in range(3))), X)
    assert "solve_blocks" not in refusal(Net(lambda self, x: self.a(x)[self.b(x) > 0]), X)


@functools.cache
def scale(flags: tuple[int, ...]) -> float:
    return 0.5


class Flagged(nn.Module):
    """As layers that call einops: the first call alone changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.flag = nn.ModuleList(Layer() for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.flag = max(self.flag, 1)
        for layer in self.layers:
            x = layer(x) * scale((1, 2))
        return x.sum()


def test_one_call_settles_flags_of_the_first() -> None:
    assert "run the module once on the sample, then plan it" in refusal(Flagged(), X).lower()
    assert_planned(made_once(Flagged(), X), (X,), (X * 2,))


# Models of libraries


class Boxes(nn.Module):
    """As YOLO: which of the predictions count is decided by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 5, 1)
        self.stages = nn.ModuleList(Stage() for _ in range(3))

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        h = self.stem(images)
        for stage in self.stages:
            h = h + stage(h)
        boxes, scores = self.head(h).permute(0, 2, 3, 1).flatten(1, 2).split([4, 1], -1)
        near = (boxes.detach()[:, :, None] - targets[:, None]).abs().sum(-1).argmin(1)
        is_matched = torch.zeros(boxes.shape[:2], dtype=torch.bool).scatter_(1, near, True)
        chosen = is_matched & (scores[..., 0].detach() > -10)
        of_all = functional.binary_cross_entropy_with_logits(scores[..., 0], is_matched.float())
        return of_all + boxes[chosen].square().mean()


class Stage(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.SiLU())


def wav2vec2() -> tuple[nn.Module, Any]:
    """With layers that are left out at random."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=[8, 8],
        conv_stride=[4, 4],
        conv_kernel=[8, 8],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        vocab_size=12,
    )
    sample = {"input_values": torch.randn(2, 640), "labels": torch.randint(1, 12, (2, 5))}
    return transformers.Wav2Vec2ForCTC(config), sample


class Body(nn.Module):
    out_channels = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stages = nn.Conv2d(3, 8, 3, 4, 1), nn.Sequential(Stage(), Stage())

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.stem(images))


def retinanet() -> tuple[nn.Module, Any]:
    anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((1.0,),))
    sizes = {"min_size": 32, "max_size": 32}
    model = RetinaNet(Body(), 3, anchor_generator=anchors, **sizes)
    given = [{"boxes": torch.tensor([[4.0, 4, 20, 20]]), "labels": torch.tensor([1])}] * 2
    return model, ([torch.rand(3, 32, 32) for _ in given], given)


OF_LIBRARIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "wav2vec2": wav2vec2,
    "RetinaNet of torchvision": retinanet,
    "boxes that are matched": lambda: (Boxes(), (torch.rand(2, 3, 16, 16), torch.rand(2, 2, 4))),
}


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_advice_for_a_whole_model_plans_its_parts(name: str) -> None:
    """By the call as it is written; two steps are eager's."""
    torch.manual_seed(0)
    model, sample = OF_LIBRARIES[name]()
    model.train()
    eager = copy.deepcopy(model)
    with pytest.raises(rockplan.CaptureError) as refused:
        rockplan.solve(model, sample, "100%", options=OPTIONS)
    (call,) = re.findall(r"rockplan\.solve_blocks\(.*\)(?=, which leaves)", str(refused.value))
    quick = functools.partial(rockplan.Options, **QUICK)
    names = SimpleNamespace(solve_blocks=rockplan.solve_blocks, Options=quick)
    eval(call, {"model": model, "sample": sample, "budget": "100%", "rockplan": names})
    assert rockplan.blocks_of(model).blocks
    for step in range(2):
        for module in (model, eager):
            torch.manual_seed(step)
            numpy.random.seed(step)  # masks of wav2vec2
            result = module(**sample) if isinstance(sample, dict) else module(*sample)
            losses = result if isinstance(result, dict) else {"loss": result}
            losses = {"loss": losses["loss"]} if "loss" in losses else losses
            sum(losses.values(), torch.zeros(())).backward()
        assert_same_state(model, eager, f"step {step}")
