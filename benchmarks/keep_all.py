"""Where nothing is recomputed, is a planned module as fast as eager?

One thread, user CPU time, both in one run, interleaved; median of the ratios of each round.
Command: python -m benchmarks.keep_all [--tiny]
--tiny: steps of 1 to 10 ms, in which Python decides.
"""

from __future__ import annotations

import argparse
import copy
import functools

import torch

import rockplan
from benchmarks.timing import interleaved_seconds, machine, mebibytes, median_ratio
from testing.models import Case, bert, encoder, gpt2, llama, mlp, resnet

REPEATS, REPEATS_IF_TINY = 15, 61


def cases() -> list[Case]:
    """Sizes at which one step takes 0.1 to 1 s on one core."""
    return [
        gpt2(layers=4, width=128, batch=4, length=128),
        llama(layers=4, width=128, batch=4, length=128),
        bert(layers=4, width=128, batch=4, length=128),
        resnet(width=32, batch=8, size=96),
        mlp(depth=8, width=512, batch=512),
        encoder(layers=4, width=128, batch=4, length=128),
    ]


def tiny_cases() -> list[Case]:
    return [
        gpt2(layers=4, width=32, heads=2, vocabulary=64, batch=1, length=16),
        resnet(width=8, batch=2, size=32),
        mlp(depth=8, width=32, batch=8),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="steps of 1 to 10 ms")
    is_tiny = parser.parse_args().tiny
    repeats = REPEATS_IF_TINY if is_tiny else REPEATS
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine()}; {repeats} interleaved rounds, median of time / eager time of the round")
    print(f"{'model':12} {'time / eager':>12} {'peak MiB':>9} {'eager MiB':>9}")
    for case in tiny_cases() if is_tiny else cases():
        eager = copy.deepcopy(case.model)
        planned = rockplan.solve(case.model, case.args, "100%", sample_kwargs=case.kwargs)
        steps = {
            "eager": functools.partial(case.step, eager),
            "planned": functools.partial(case.step, planned),
        }
        times = interleaved_seconds(steps, repeats)
        ratio = median_ratio(times["planned"], times["eager"])
        peaks = {name: rockplan.peak_live_bytes(step).peak_bytes for name, step in steps.items()}
        print(
            f"{case.name:12} {ratio:12.3f} {mebibytes(peaks['planned']):>9} "
            f"{mebibytes(peaks['eager']):>9}"
        )


if __name__ == "__main__":
    main()
