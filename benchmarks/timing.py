"""Side-by-side measurements, as `rockplan.compare` makes them."""

from rockplan.timing import interleaved_seconds, machine, mebibytes, median_ratio

__all__ = ["interleaved_seconds", "machine", "mebibytes", "median_ratio"]
