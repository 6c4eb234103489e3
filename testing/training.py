"""Train an original and its planned twin side by side, and compare every bit."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

import rockplan
from rockplan.python_state.memory import parts_of
from testing.models import Case

QUICK = rockplan.Options(time_limit_s=20, bound_time_limit_s=0, without=("exchange",))
"""Where what is checked does not depend on how good a plan is. What is left of the search takes a
second at most: on a busy machine, too, no time limit decides a plan."""


def solve_case(case: Case, budget: Any, **options: Any) -> nn.Module:
    """Plan the model of `case`."""
    return rockplan.solve(case.model, case.args, budget, sample_kwargs=case.kwargs, **options)


def ensure(is_so: bool) -> None:
    """For what is planned, whose own `assert`, as pytest writes it, could come to all of pytest's
    session: planning looks at what a forward can come to."""
    if not is_so:
        raise AssertionError


def assert_equal_trees(found: Any, expected: Any, what: str) -> None:
    """Same structure, types and bits."""
    assert type(found) is type(expected), what
    found_leaves, found_spec = pytree.tree_flatten(found)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert found_spec == expected_spec, what
    for a, b in zip(found_leaves, expected_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert_same_tensor(a, b, what)
        else:
            assert a == b, what


def assert_same_tensor(a: torch.Tensor | None, b: torch.Tensor | None, what: str) -> None:
    """Both None, or equal bit for bit (NaN equals NaN)."""
    assert (a is None) == (b is None), what
    if a is not None and b is not None:
        assert a.dtype == b.dtype and a.shape == b.shape, what
        assert a.requires_grad == b.requires_grad, what
        assert a.layout == b.layout, what
        a, b = (t.to_dense() if t.layout is not torch.strided else t for t in (a, b))
        for (_, x), (_, y) in zip(parts_of([("", a)]), parts_of([("", b)]), strict=True):
            same = (x == y) | ((x != x) & (y != y))
            assert torch.equal(same, torch.ones_like(same)), (
                f"{what}: differs in {int((~same).sum())} of {x.numel()}"
            )


def train_side_by_side(case: Case, planned: nn.Module, eager: nn.Module, steps: int = 3) -> None:
    """`steps` optimizer steps of both from the same seeds; every result, gradient, parameter,
    buffer and generator state must be the same bit for bit."""
    planned_optimizer = torch.optim.AdamW(planned.parameters(), lr=1e-3)
    eager_optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    for step in range(steps):
        results = []
        states = []
        for module, optimizer in ((eager, eager_optimizer), (planned, planned_optimizer)):
            torch.manual_seed(1000 + step)
            optimizer.zero_grad()
            result = module(*case.args, **case.kwargs)
            case.loss(result).backward()
            states.append(generator_states())
            results.append(result)
        assert_equal_trees(results[1], results[0], f"step {step}: result")
        assert_equal_trees(states[1], states[0], f"step {step}: generator state")
        assert_same_state(planned, eager, f"step {step}")
        eager_optimizer.step()
        planned_optimizer.step()
        assert_same_state(planned, eager, f"after step {step}")


def assert_same_steps(planned: nn.Module, eager: nn.Module, calls: Iterable[Any]) -> None:
    """A step from each of `calls`, which are tuples of arguments or dictionaries of those by name,
    and from a seed each: the same loss, gradients, state and generators bit for bit. Gradients add
    up."""
    for step, call in enumerate(calls):
        ends = []
        for module in (planned, eager):
            torch.manual_seed(step)
            result = module(**call) if isinstance(call, dict) else module(*call)
            loss = getattr(result, "loss", result)
            loss.square().mean().backward()
            ends.append((loss.detach(), generator_states()))
        assert_equal_trees(*ends, f"step {step}")
        assert_same_state(planned, eager, f"step {step}")


def generator_states() -> list[torch.Tensor]:
    """Of the default generators, of CUDA's too where it is in use."""
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *of_devices]


def assert_same_state(planned: nn.Module, eager: nn.Module, when: str) -> None:
    """Parameters, their gradients and buffers."""
    pairs = zip(planned.named_parameters(), eager.named_parameters(), strict=True)
    for (name, a), (other_name, b) in pairs:
        assert name == other_name
        assert_same_tensor(a, b, f"{when}: {name}")
        assert_same_tensor(a.grad, b.grad, f"{when}: gradient of {name}")
    for (name, a), (_, b) in zip(planned.named_buffers(), eager.named_buffers(), strict=True):
        assert_same_tensor(a, b, f"{when}: buffer {name}")


def twin(case: Case) -> nn.Module:
    """A copy of the model of `case`, to be trained eagerly."""
    return copy.deepcopy(case.model)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 48 tokens, also a target; what the model does not take is not passed on."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, 64, (length, 48), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index], "extra": self.ids[index]}


def make_gpt2() -> nn.Module:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=48, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()
