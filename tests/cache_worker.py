"""What each of several processes does to one cache at once; imports nothing heavy."""

from __future__ import annotations

import warnings
from pathlib import Path

from rockplan.store.cache import Cache
from rockplan.values.block import BlockOption, OptionFamily
from rockplan.values.profile import OpCost, Profile

KEY = {"what": "shared"}
ROUNDS = 40


def hammer(folder: Path, process: int) -> list[str]:
    """Write and read the same entries over and over; returns what went wrong."""
    cache = Cache(folder)
    family = OptionFamily((BlockOption((0,), (1,), 1, 2, 3, 4, 5),), 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for round_ in range(ROUNDS):
            cost = OpCost(process, round_, 0, (1,), 1)
            cache.put_profile(KEY, Profile("measured", "here", "2", 1, ((f"{process}", cost),)))
            cache.put_family(KEY, family)
            found = cache.family(KEY, lambda option: True)
            if found != family or cache.profile(KEY) is None:
                return ["an entry was lost"]
    return [str(w.message) for w in caught]
