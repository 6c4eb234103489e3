"""A worker of `benchmarks.gpu`: what a label that is out of range ends in.

Eager's kernels assert on the device, which takes the process with it: each way has one of its own.
"""

from __future__ import annotations

import torch

import rockplan
from benchmarks.gpu_compiled import synchronize
from benchmarks.gpu_worker import Row, worker
from testing import models


def main() -> None:
    own, given = worker(__doc__, "way")
    device = torch.device("cpu" if own.on_cpu else "cuda")

    def fault() -> Row:
        torch.manual_seed(0)
        case = models.llama().to(device)
        model = case.model
        if given.way == "compiled":
            options = rockplan.Options(compile=True, released=(1,))
            model = rockplan.solve(
                case.model, case.args, "100%", sample_kwargs=case.kwargs, options=options
            )
        labels = case.kwargs["labels"].clone()
        labels[0, 3] = 10**6
        kwargs = {**case.kwargs, "labels": labels}

        def step() -> Row:
            case.loss(model(*case.args, **kwargs)).backward()
            synchronize(device)
            return {"ends": "without an error"}

        try:
            return step()
        except (IndexError, RuntimeError) as error:
            return {"ends": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}

    own.tries(given.way, fault)
    own.leave()


if __name__ == "__main__":
    main()
