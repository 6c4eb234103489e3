"""Small models with prices that anyone can repeat: what the planners are compared on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rockplan.codegen import rng_replay
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.pipeline import lower
from rockplan.options import Options
from rockplan.search.problem import Problem, problem_of
from testing import models
from testing.models import Case

BYTES_PER_S, FLOPS_PER_S = 100e9, 2e12
RATES = Rates(BYTES_PER_S, FLOPS_PER_S)

CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: models.gpt2(
        width=256, heads=8, vocabulary=1024, batch=4, length=256, attention="eager"
    ),
    "gpt2-sdpa": lambda: models.gpt2(
        width=256, heads=8, vocabulary=1024, batch=4, length=256, attention_dropout=0.0
    ),
    "llama": lambda: models.llama(
        width=256, heads=8, key_value_heads=4, vocabulary=1024, batch=4, length=256
    ),
    "bert": lambda: models.bert(width=256, heads=8, vocabulary=1024, batch=4, length=256),
    "resnet18": lambda: models.resnet18(64, 8, 64),
    "unet": lambda: models.unet(4, 32, 4, 64),
    "t5": lambda: models.t5(2, width=256, heads=8, vocabulary=1024, batch=4, length=256),
    "densenet": lambda: models.densenet(4, 3, 12, 8, 32),
}


def prepared(name: str, options: Options) -> Problem:
    """As `rockplan.plan` prepares it, with roofline prices."""
    torch.manual_seed(0)
    return prepared_case(CASES[name](), options)


def prepared_case(case: Case, options: Options) -> Problem:
    """The same for any case."""
    captured = capture(case.model, case.args, case.kwargs)
    lowered = lower(captured, rng_replay.state_bytes(torch.device("cpu")))
    profile = roofline(lowered.graph, RATES)
    return problem_of(lowered.graph, profile, options)
