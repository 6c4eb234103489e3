"""Mixtures of experts: what runs again picks the experts that were picked before, ties included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

from testing.models import Case
from testing.training import QUICK, solve_case, train_side_by_side, twin

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": None,
}


def _full_of_ties(kind: type, config: Any) -> Case:
    """Every expert has the same probability for every token, after each step as well."""
    torch.manual_seed(0)
    model = kind(config)
    model.set_experts_implementation("grouped_mm")
    gates = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == config.num_hidden_layers
    for gate in gates:
        torch.nn.init.zeros_(gate).requires_grad_(False)
    ids = torch.randint(0, 64, (2, 32))
    kwargs = {"input_ids": ids, "labels": ids}
    return Case(kind.__name__, model, (), kwargs, lambda result: result.loss)


@pytest.mark.parametrize(
    "kind, config",
    [
        (MixtralForCausalLM, MixtralConfig(num_local_experts=4, **SIZES)),
        (OlmoeForCausalLM, OlmoeConfig(num_experts=4, num_experts_per_tok=2, **SIZES)),
    ],
)
def test_ties_break_alike_when_routers_run_again(kind: type, config: Any) -> None:
    case = _full_of_ties(kind, config)
    planned = solve_case(case, "min", options=QUICK)
    graph, schedule = planned.plan.graph, planned.plan.schedule
    again = [n for n in graph.forward if schedule.computes.count(n.index) > 1]
    chosen = {call.op for node in again for call in node.calls}
    assert any("topk" in op or "sort" in op for op in chosen)
    train_side_by_side(case, planned, twin(case))
