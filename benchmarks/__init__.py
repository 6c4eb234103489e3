"""Benchmarks: what is measured and swept, and the tables in `results`."""

import testing  # noqa: F401  # lets torchvision be imported beside a CPU build of torch
