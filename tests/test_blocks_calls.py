"""How models of libraries hold and call their blocks: in lists of lists, with containers that grow,
beside transforms of torch.func, under two names."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rockplan
from rockplan.blocks.find import named_blocks
from testing.blocks import QUICK, Mixer

OPTIONS = rockplan.Options(**QUICK)
X = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))


def paths_planned(model: nn.Module, **named: Any) -> list[str]:
    """Of its blocks, which train as they did within what is predicted."""
    model.train()
    eager = copy.deepcopy(model)
    rockplan.solve_blocks(model, X, "min", **{"options": OPTIONS, **named})
    plan = rockplan.blocks_of(model)

    def step(one: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        loss = one(X)
        loss.backward()
        return loss.detach()

    assert torch.equal(step(model), step(eager))
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    assert all(len(model.get_submodule(block.path).plans) == 1 for block in plan.blocks)
    assert rockplan.peak_live_bytes(lambda: step(model)).peak_bytes <= plan.peak_bytes
    return [block.path for block in plan.blocks]


# Found by themselves


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(16), nn.Linear(16, 48)
        self.out = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.T).softmax(-1) @ v)


class Namespace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mixer = Attention(), Mixer(16)


class Run(nn.Sequential):
    """A list for the model, which calls what is in it."""


CONTAINERS = {
    "lists of lists": lambda: nn.ModuleList([nn.ModuleList([Attention()]), Mixer(16)]),
    "dictionaries": lambda: nn.ModuleDict({"attention": Attention(), "mixer": Mixer(16)}),
    "namespaces": Namespace,
    "sequentials that are lists": lambda: Run(Attention(), Mixer(16)),
    "without parts": lambda: nn.ModuleList([nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)]),
}


class Nested(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(CONTAINERS[kind]() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for module in layer.values() if isinstance(layer, nn.ModuleDict) else layer.children():
                for inner in module if isinstance(module, nn.ModuleList) else [module]:
                    x = inner(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", CONTAINERS)
def test_blocks_in_containers_are_found(kind: str) -> None:
    """Of what a pattern names, those that have parameters."""
    found = paths_planned(Nested(kind))
    assert len(found) == 4
    if kind == "sequentials that are lists":  # which the pattern means as they are
        return
    named = named_blocks(Nested(kind), "layers.*")
    assert found == [path for path, m in named.items() if any(True for _ in m.parameters())]


class InParts(nn.Module):
    """Calls the parts of its layers and not the layers; of other lists one, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Mixer(16) for _ in range(2))
        self.blocks = nn.ModuleDict({name: Mixer(16) for name in "ab"})
        self.unused = nn.ModuleList(Mixer(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.down(layer.up(x).relu())
        for block in self.blocks.values():
            x = block(x)
        return x.square().mean()


def test_what_the_forward_calls_is_found() -> None:
    layers = [f"layers.{i}.{part}" for i in range(2) for part in ("up", "down")]
    assert paths_planned(InParts()) == [*layers, "blocks.a", "blocks.b"]
    model = InParts()
    with pytest.raises(rockplan.InvalidInput, match="block 'unused.0' and 1 more is not called"):
        rockplan.solve_blocks(model, X, "min", blocks="unused", options=OPTIONS)
    model.blocks["c"] = Mixer(16)  # as LayerDrop leaves one out
    model.blocks.values = lambda: [model.blocks["a"]]  # type: ignore[method-assign]
    with pytest.raises(rockplan.InvalidInput, match="block 'blocks.b' and 1 more is not called"):
        rockplan.solve_blocks(model, X, "min", options=OPTIONS)


class Shared(nn.Module):
    """One of its blocks is called twice; they have other names as well."""

    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.repeats = repeats
        self.layers = nn.ModuleList(Mixer(16) for _ in range(3))
        self.alias, self.last = self.layers, self.layers[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[0], *[self.layers[1]] * self.repeats, self.last):
            x = layer(x)
        return x.square().mean()


def test_found_blocks_called_twice_are_left(caplog: pytest.LogCaptureFixture) -> None:
    model = Shared(repeats=2)
    assert paths_planned(model) == ["layers.0", "layers.2"]
    assert rockplan.blocks_of(model).left == (
        ("layers.1", "it is called several times in one forward"),
    )
    assert "block 'layers.1' is left as it is" in caplog.text
    with pytest.raises(rockplan.InvalidInput, match="'layers.1' is called several times"):
        rockplan.solve_blocks(Shared(2), X, "min", blocks="layers.*", options=OPTIONS)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("alias", ["layers.0", "layers.1", "layers.2"]),
        (["last", "layers.*"], ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_blocks_by_another_name(blocks: Any, expected: list[str]) -> None:
    assert paths_planned(Shared(), blocks=blocks) == expected


class Student(nn.Module):
    """A teacher whose blocks run without gradients, or are detached from the loss."""

    def __init__(self, is_detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_detached = is_detached
        self.layers = nn.ModuleList(Mixer(16) for _ in range(2))
        self.teacher = nn.ModuleList(Mixer(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            x = layer(x)
        with torch.set_grad_enabled(self.is_detached):
            for layer in self.teacher:
                y = layer(y)
        return (x - y.detach()).square().mean()


@pytest.mark.parametrize("is_detached", [True, False])
def test_found_blocks_without_gradient_are_left(is_detached: bool) -> None:
    model = Student(is_detached)
    assert paths_planned(model) == ["layers.0", "layers.1"]
    why = "no gradient reaches it in the measured step"
    assert rockplan.blocks_of(model).left == (("teacher.0", why), ("teacher.1", why))
    blocks = ["layers.*", "teacher.*"]
    with pytest.raises(rockplan.InvalidInput, match="no gradient reaches block 'teacher.0' and 1"):
        rockplan.solve_blocks(Student(is_detached), X, "min", blocks=blocks, options=OPTIONS)


# What they are given, and give back


class Passing(Mixer):
    """Gives back what it is given beside what it makes, as blocks of T5 do with their bias."""

    def forward(self, bias: torch.Tensor, x: torch.Tensor, mask: Any = None) -> Any:
        made = super().forward(x + bias)
        return {"bias": bias, "x": made, "mask": mask} if self.is_dict else (bias, made, mask)


class Biased(nn.Module):
    def __init__(self, is_dict: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Passing(16) for _ in range(2))
        for layer in self.layers:
            layer.is_dict = is_dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias, mask = self.bias(x), x > 0
        for layer in self.layers:
            given = bias
            result = layer(bias, x, mask=mask)
            bias, x, mask = result.values() if isinstance(result, dict) else result
            assert bias is given
        return (x * mask).square().mean() + bias.mean()


@pytest.mark.parametrize("is_dict", [False, True])
def test_blocks_that_give_back_an_argument(is_dict: bool) -> None:
    assert paths_planned(Biased(is_dict)) == ["layers.0", "layers.1"]


class Shifted(Mixer):
    """Notes how it was called, as blocks of Swin do."""

    shift = 3

    def forward(self, x: torch.Tensor, size: int) -> torch.Tensor:
        self.shift = 0 if size <= 8 else 2
        return super().forward(torch.roll(x, self.shift, 0))


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Shifted(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, len(x))
        return x.t()[::2].square().mean()  # a gradient in other strides


def test_blocks_that_note_how_they_were_called() -> None:
    model = Shifting()
    options = rockplan.Options(**QUICK)
    with pytest.raises(rockplan.UnsupportedModel, match=r"self\.shift .* once"):
        rockplan.solve_blocks(model, X, "min", options=options)
    model(X)
    rockplan.solve_blocks(model, X, "min", options=options)
    eager = Shifting()
    for one in (model.train(), eager.train()):
        torch.manual_seed(0)
        one(X).backward()
        assert {layer.shift for layer in one.layers} == {2}
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Join(nn.Module):
    """Joins what it is given, in whatever that is."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(16 * inputs, 32), nn.Linear(32, 16)

    def forward(self, given: Any) -> torch.Tensor:
        held = given if isinstance(given, list) else given["features"]
        return self.out(torch.nn.functional.gelu(self.mix(torch.cat([*held], 1))))


class Mean(nn.Module):
    """Runs on a list of any length."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.mix = Mixer(16)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return self.mix(torch.stack(given).mean(0))


class Dense(nn.Module):
    """Dense connections: each block is given all that came before it, by one container."""

    def __init__(self, kind: type[nn.Module], is_named: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind(n + 1) for n in range(3))
        self.is_named = is_named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        given = {"features": features} if self.is_named else features
        for block in self.blocks:
            features.append(block(given))
        return torch.cat(features, 1).square().mean()


class Shrinking(Dense):
    """What is given is taken out again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for block in self.blocks:
            y = block(features)
            features.append(y)
        features.clear()
        return y.square().mean()


class Stateful(nn.Module):
    """A block that is given an object, whose attribute the model replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mixer(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"x": x}
        for block in self.blocks:
            given["x"] = block(**given)
        return given.pop("x").square().mean()


@pytest.mark.parametrize(
    "model",
    [
        Dense(Join, is_named=True),
        Dense(Mean),
        Shrinking(Mean),
        Stateful(),
    ],
    ids=lambda model: f"{type(model).__name__} {type(model.blocks[0]).__name__}",
)
def test_containers_that_change_after_the_call(model: nn.Module) -> None:
    model = copy.deepcopy(model)
    assert paths_planned(model, blocks="blocks.*") == [
        f"blocks.{i}" for i in range(len(model.blocks))
    ]


class Taking(Mixer):
    def forward(self, box: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(box.pop(0))


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Taking(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            box = [x]
            x = block(box)
            assert not box
        return x.square().mean()


def test_a_block_whose_input_is_in_a_list() -> None:
    try:
        assert len(paths_planned(Boxed(), blocks="blocks.*")) == 2
    except rockplan.CaptureError as error:
        assert "block 'blocks.0'" in str(error) and "the argument 'box'" in str(error)


# torch.func, and gradients inside the forward


def per_sample(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: model.head(row).tanh().sum()))(x)


def jacobian(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: model.head(row).tanh()))(x)


def ensemble(model: Any, x: torch.Tensor) -> torch.Tensor:
    heads = torch.func.stack_module_state([model.head, model.other])[0]
    call = torch.func.functional_call
    return torch.func.vmap(lambda weights: call(model.head, weights, (x,)))(heads)


def own_backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(model.head(y).tanh().sum(), y, create_graph=True)[0]


class Transforming(nn.Module):
    """`transform` runs beside the blocks, or in each of them."""

    def __init__(self, transform: Any, is_inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transform, self.is_inside = transform, is_inside
        self.layers = nn.ModuleList(Within(transform) if is_inside else Mixer(16) for _ in "ab")
        self.head, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + self.transform(self, x).square().mean()


class Within(nn.Module):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform, self.mix, self.head = transform, Mixer(16), nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x)
        return x + self.transform(self, x).reshape(-1, 16).sum(0)


@pytest.mark.parametrize("transform", [per_sample, jacobian, own_backward])
def test_transforms_beside_blocks(transform: Any) -> None:
    assert paths_planned(Transforming(transform)) == ["layers.0", "layers.1"]


def test_transforms_inside_of_blocks() -> None:
    assert paths_planned(Transforming(ensemble, is_inside=True)) == ["layers.0", "layers.1"]


def of_rows(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(model.layers[0], randomness="different")(x)


def through_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(model.layers[0](y).sum(), y, create_graph=True)[0]


@pytest.mark.parametrize("transform", [of_rows, through_blocks])
def test_transforms_of_blocks_are_refused_by_name(transform: Any) -> None:
    with pytest.raises(rockplan.InvalidInput, match="block 'layers.0'.*|.*block 'layers.0'"):
        rockplan.solve_blocks(Transforming(transform), X, "min", options=OPTIONS)


# Optimizers inside of backward


def step_after_accumulation(parameter: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([parameter], 0.1)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


def step_on_gradient(parameter: torch.Tensor) -> None:
    def step(gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parameter.sub_(0.1 * gradient)
        return torch.zeros_like(gradient)

    parameter.register_hook(step)


@pytest.mark.parametrize(
    ("attach", "is_before"),
    [(step_after_accumulation, True), (step_on_gradient, True), (step_on_gradient, False)],
)
def test_optimizers_inside_of_backward(attach: Any, is_before: bool) -> None:
    model = Shared().train()
    eager = copy.deepcopy(model)
    for parameter in [*eager.parameters(), *(model.parameters() if is_before else ())]:
        attach(parameter)
    rockplan.solve_blocks(model, X, "min", options=OPTIONS)
    plan = rockplan.blocks_of(model)
    if not is_before:
        for parameter in model.parameters():
            attach(parameter)
    for step in range(3):
        losses = []
        for one in (model, eager):
            torch.manual_seed(step)
            losses.append(one(X))
            losses[-1].backward()
        assert torch.equal(*losses)
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q), name
    if attach is step_after_accumulation:  # of which all that is made goes into the gradient
        measured = rockplan.peak_live_bytes(lambda: model(X).backward())
        assert measured.peak_bytes <= plan.budget_bytes


# All are left


def hooked(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Mixer):
            module.up.register_forward_hook(lambda module, args, result: None)


def test_a_model_of_which_all_blocks_are_left(caplog: pytest.LogCaptureFixture) -> None:
    model = Shared()
    hooked(model)
    options = rockplan.Options(**QUICK, on_refused="leave")
    with caplog.at_level(logging.WARNING, "rockplan"):
        rockplan.solve_blocks(model, X, "min", options=options)
    said = caplog.records[-1].getMessage()
    for words in ("no block is planned", "'layers.0' and 2 more: ", "needs what it needs without"):
        assert words in said
    with pytest.raises(rockplan.InvalidInput, match="all are left as they are: 'layers.0' and 2"):
        rockplan.blocks_of(model)
    rockplan.restore_blocks(model)
    with pytest.raises(rockplan.InvalidInput, match="call rockplan.solve_blocks first"):
        rockplan.blocks_of(model)


def test_a_model_of_which_no_block_is_trained() -> None:
    model = Shared()
    model.layers.requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(()))
    forward = model.forward
    model.forward = types.MethodType(  # type: ignore[method-assign]
        lambda self, x: self.scale * forward(x), model
    )
    with pytest.raises(rockplan.InvalidInput, match="no block to plan.*nothing in it is trained"):
        rockplan.solve_blocks(model, X, "min", options=OPTIONS)


class Settling(nn.Module):
    """Layers that keep the configuration of their root, which settles it in its first forward, as
    heads of transformers do with `problem_type`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(SettledLayer(config) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        if isinstance(self.config, dict):
            self.config.setdefault("problem", "regression")
        elif problem_in(self.config) is None:
            self.config.problem = "regression"
        return x.square().mean()


def problem_in(config: Any) -> Any:
    return config.get("problem") if isinstance(config, dict) else getattr(config, "problem", None)


class SettledLayer(nn.Module):
    """It reads the configuration, and has a second result, of which backward was thought to start
    as well."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.inner = config, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.inner(x).sin()
        return x + h.cos(), h.exp() if problem_in(self.config) != "none" else h


@pytest.mark.parametrize(
    "config",
    [dict, lambda: transformers.PretrainedConfig(problem=None)],
    ids=["dictionary", "transformers"],
)
def test_a_configuration_that_the_first_step_settles(config: Callable[[], Any]) -> None:
    """The error says what changed and what to do, which works."""
    torch.manual_seed(0)
    model, x = Settling(config()).train(), torch.randn(4, 8)
    options = rockplan.Options(**QUICK)
    with pytest.raises(rockplan.BackwardError, match=r"SettledLayer.*config.*run the model once"):
        rockplan.solve_blocks(model, x, "min", blocks="layers.*", options=options)
    model(x)
    eager = copy.deepcopy(model)
    rockplan.solve_blocks(model, x, "min", blocks="layers.*", options=options)
    for module in (model, eager, model, eager):
        module(x).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad, q.grad)
