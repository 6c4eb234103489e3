"""A worker of `benchmarks.gpu`: plans that are replayed as CUDA graphs, beside their code.

Bits first: five steps of AdamW with dropout, of two backward passes each, of two copies of a model,
one by the code of its plan and one by graphs of it, have the same losses, gradients and generator.
Then both in turns: time of the device and of the host. On CPU, where there are no graphs, both run
the code.
"""

from __future__ import annotations

import copy
import statistics
from functools import partial

import torch
from torch import nn

import rockplan
from benchmarks.gpu_compiled import step_seconds
from benchmarks.gpu_worker import Row, Worker, worker
from testing.gpu_cases import LossCase, case_of

STEPS, PASSES, ROUNDS = 5, 2, 7
BUDGETS = {"all kept": "100%", "smallest": "min"}
DROPOUT = 0.1


def planned(case: LossCase, budget: str, is_graph: bool) -> nn.Module:
    """A copy of the model, which shares nothing."""
    options = rockplan.Options(compile=True, only_loss=True, graph=is_graph)
    model = copy.deepcopy(case.model)
    return rockplan.solve(model, case.args, budget, sample_kwargs=case.kwargs, options=options)


class Pair:
    """A plan by its code, and as graphs."""

    def __init__(self, case: LossCase, budget: str, device: torch.device) -> None:
        self.case, self.device = case, device
        on_cuda = device.type == "cuda"
        self.modules = [planned(case, budget, is_graph) for is_graph in (False, on_cuda)]

    def trained(self) -> Row:
        """How many of five steps have other bits, and what a step of each takes after them."""
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in self.modules]
        differ = 0
        for step in range(STEPS):
            found = []
            for module, optimizer in zip(self.modules, optimizers, strict=True):
                optimizer.zero_grad()
                torch.manual_seed(step)
                for _ in range(PASSES):
                    loss = self.case.loss(module(*self.case.args, **self.case.kwargs))
                    loss.backward()
                gradients = [p.grad for p in module.parameters() if p.grad is not None]
                found.append([loss.detach(), torch.rand(4, device=self.device), *gradients])
                optimizer.step()
            differ += not all(map(torch.equal, *found))
            del found, gradients, loss
        return {"steps": STEPS, "differ": differ, **self.timed()}

    def timed(self) -> Row:
        """Medians of steps in turns, without an optimizer."""
        seconds: list[list[tuple[float, float]]] = [[], []]
        for _ in range(ROUNDS):
            for module, own in zip(self.modules, seconds, strict=True):
                module.zero_grad()
                own.append(step_seconds(partial(self.case.step, module), self.device))
        (code_s, code_host_s), (graph_s, graph_host_s) = (
            map(statistics.median, zip(*own, strict=True)) for own in seconds
        )
        plan = rockplan.plan_of(self.modules[1])
        return {
            "ms": 1e3 * graph_s,
            "host_ms": 1e3 * graph_host_s,
            "code_ms": 1e3 * code_s,
            "code_host_ms": 1e3 * code_host_s,
            "peak_bytes": plan.peak_bytes,
            "pool_bytes": plan.pool_bytes,
        }


def with_dropout(case: LossCase) -> LossCase:
    """Of a model that has any, also where its settings of measurement switch it off."""
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = DROPOUT
    return case


def measure(own: Worker, name: str, device: torch.device) -> None:
    for way, budget in BUDGETS.items():

        def pair(budget: str = budget) -> Row:
            return Pair(with_dropout(case_of(name, own.on_cpu, device)), budget, device).trained()

        own.tries(f"graph, {way}", pair)


def main() -> None:
    own, given = worker(__doc__, "name")
    measure(own, given.name, torch.device("cpu" if own.on_cpu else "cuda"))
    own.leave()


if __name__ == "__main__":
    main()
