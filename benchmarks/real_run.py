"""One real run: a byte-level language model of 10 million parameters on the sources of Python's
standard library, eager and planned, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.real_run [--steps 1000]

Each step is taken by every way in turn, from the same bytes and the same seed: AdamW, clipping,
gradients of two batches accumulated, dropout. Every hundred steps all are evaluated; in the middle
models and optimizers are saved, made anew and loaded. Writes benchmarks/results/real_run.{md,svg}.
"""

from __future__ import annotations

import argparse
import io
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional

import rockplan
from benchmarks.timing import where

RESULTS = Path(__file__).parent / "results"
BATCH, LENGTH, ACCUMULATED = 4, 64, 2
WIDTH, LAYERS, HEADS = 512, 3, 8
WAYS = ("eager", "30%", "min")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))))


class Bytes(nn.Module):
    """Predicts the next byte; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def sources() -> torch.Tensor:
    """The bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: torch.Tensor, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=made)
    return torch.stack([text[s : s + LENGTH + 1] for s in starts])


@dataclass(slots=True)
class Run:
    """One way of training. losses, evaluated: of each step and each evaluation; times_ns: CPU time
    of each step."""

    way: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    planning_s: float = 0.0

    @classmethod
    def begin(cls, way: str, sample: torch.Tensor) -> Run:
        torch.manual_seed(0)
        model: nn.Module = Bytes()
        begun = time.process_time()
        if way != "eager":
            options = rockplan.Options(cache=False)
            model = rockplan.solve(model, sample, budget=way, options=options)
        spent_s = time.process_time() - begun
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
        return cls(way, model, optimizer, planning_s=spent_s)

    def step(self, text: torch.Tensor, number: int) -> None:
        torch.manual_seed(number)
        begun = time.process_time_ns()
        total = 0.0
        for part in range(ACCUMULATED):
            loss = self.model(batch(text, ACCUMULATED * number + part)) / ACCUMULATED
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times_ns.append(time.process_time_ns() - begun)
        self.losses.append(total)

    def evaluate(self, text: torch.Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            losses = [self.model(batch(text, -1 - n)) for n in range(8)]
        self.evaluated.append(torch.stack(losses).mean().item())
        self.model.train()

    def saved_and_loaded(self, sample: torch.Tensor) -> Run:
        """The run in a model, a plan and an optimizer that are made anew, from a checkpoint."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        model, optimizer = torch.load(file)
        again = Run.begin(self.way, sample)
        again.model.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        spent_s = self.planning_s + again.planning_s
        own = (self.losses, self.evaluated, self.times_ns, spent_s)
        return Run(self.way, again.model, again.optimizer, *own)

    def peak_bytes(self, text: torch.Tensor) -> int:
        """The measured peak of one forward and backward beyond gradients that are there."""

        def a_step() -> None:
            self.model(batch(text, 0)).backward()

        a_step()
        peak_bytes = rockplan.peak_live_bytes(a_step).peak_bytes
        self.optimizer.zero_grad()
        return peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    text = sources()
    kept, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    sample = batch(kept, 0)
    runs = [Run.begin(way, sample) for way in WAYS]
    peaks = [run.peak_bytes(kept) for run in runs]
    for number in range(steps):
        for run in runs:
            run.step(kept, number)
        if (number + 1) % 100 == 0:
            for run in runs:
                run.evaluate(held_out)
            print(number + 1, [(r.losses[-1], r.evaluated[-1]) for r in runs], flush=True)
        if number + 1 == steps // 2:
            runs = [run.saved_and_loaded(sample) for run in runs]
    eager = runs[0]
    for run in runs:
        same = zip(run.model.parameters(), eager.model.parameters(), strict=True)
        assert run.losses == eager.losses and run.evaluated == eager.evaluated, run.way
        assert all(torch.equal(one, other) for one, other in same), run.way
    write(runs, peaks)


def write(runs: list[Run], peaks: list[int]) -> None:
    eager = runs[0]
    count = sum(p.numel() for p in eager.model.parameters())
    tokens = BATCH * LENGTH * ACCUMULATED
    rows = []
    for run, peak_bytes in zip(runs, peaks, strict=True):
        pairs = zip(run.times_ns, eager.times_ns, strict=True)
        ratio = median(own / of_eager for own, of_eager in pairs)
        plan = None if run.way == "eager" else rockplan.plan_of(run.model)
        rows.append(
            f"| {run.way} | {peak_bytes / 2**20:.2f} | "
            f"{'' if plan is None else f'{plan.peak_bytes / 2**20:.2f}'} | {ratio:.3f} | "
            f"{'' if plan is None else f'{1 + plan.overhead:.3f}'} | {run.planning_s:.1f} | "
            f"{run.losses[-1]:.9f} | {run.evaluated[-1]:.9f} |"
        )
    head = f"""# One real run

`OMP_NUM_THREADS=1 python -m benchmarks.real_run --steps {len(eager.losses)}`, {where()}.
{count:,} parameters, {tokens} bytes a step in {ACCUMULATED} batches, AdamW, clipping, dropout, a
checkpoint loaded after half of the steps into models, plans and optimizers that are made anew.
All losses, evaluations and parameters are eager's, bit for bit. Times: CPU time of a step over
eager's of the same step, the median; planning: two plans, CPU seconds. The
measured peak has the batch in it, 4 x 65 numbers, which the step makes.

![losses](real_run.svg)

| way | peak MiB | predicted | time over eager | predicted | planning s | last loss | evaluated |
|---|---|---|---|---|---|---|---|
"""
    (RESULTS / "real_run.md").write_text(head + "\n".join(rows) + "\n")
    draw(runs, peaks)


def draw(runs: list[Run], peaks: list[int]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "rockplan"
    from matplotlib import pyplot

    figure, (losses, bars) = pyplot.subplots(1, 2, figsize=(9, 3), width_ratios=(3, 1))
    widths = (4.0, 2.0, 0.7)
    for run, width in zip(runs, widths, strict=True):
        losses.plot(run.losses[::5], linewidth=width, label=run.way, alpha=0.8)
    losses.set_xlabel("every fifth step")
    losses.set_ylabel("loss, nats a byte")
    losses.legend()
    bars.bar([run.way for run in runs], [peak / 2**20 for peak in peaks])
    bars.set_ylabel("peak of activations, MiB")
    figure.tight_layout()
    figure.savefig(RESULTS / "real_run.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
