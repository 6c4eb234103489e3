"""Budgets as users write them -> bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rockplan.errors import InvalidBudget

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MOST_BYTES = 2**63 - 1
"""The largest budget: plan files and the cache hold no larger numbers."""

_MOST_PERCENT = 1e6
_LONGEST = 100
"""Most characters of a budget."""

_EXAMPLES = (
    "write bytes (2_000_000_000), '2GB', '1.5GiB', 'auto', 'auto-4GB', 'min', or '40%' of the "
    "unplanned peak"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one of: size_bytes, share of the unplanned peak (0.4 is 40 %), is_minimum, is_auto.

    least_bytes: a share never means less than this. is_auto: what the device has free, less
    reserve_bytes (`rockplan.solving.free_memory` says how many bytes that are).
    """

    size_bytes: int | None = None
    share: float | None = None
    is_minimum: bool = False
    is_auto: bool = False
    least_bytes: int = 0
    reserve_bytes: int = 0

    def __str__(self) -> str:
        if self.is_auto:
            return f"what the device has free, less {self.reserve_bytes} bytes"
        if self.is_minimum:
            return "min"
        if self.share is not None:
            return f"{self.share!r} of the unplanned peak"
        return f"{self.size_bytes} bytes"

    def within(self, unplanned_peak_bytes: int) -> int | None:
        """Return the budget in bytes, rounded down; None for the minimum. Not for 'auto'."""
        assert not self.is_auto, "in_bytes() comes first"
        if self.share is not None:
            return max(int(self.share * unplanned_peak_bytes), self.least_bytes)
        return self.size_bytes


def parse_budget(budget: object) -> Budget:
    """Convert the argument `budget` of `solve` (bytes, text such as '2GB', '40%', 'min', 'auto', or
    a Budget) to a Budget. Raises InvalidBudget, which says what is accepted."""
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise InvalidBudget(f"budget {budget!r} is a {type(budget).__name__}; {_EXAMPLES}")
    if isinstance(budget, str):
        return _parse_text(budget)
    if budget != budget or budget in (float("inf"), float("-inf")):
        raise InvalidBudget(f"budget {budget!r} is not finite; {_EXAMPLES}")
    return Budget(size_bytes=_size_bytes(budget, budget))


def _parse_text(text: str) -> Budget:
    if len(text) > _LONGEST:
        raise InvalidBudget(f"budget {text[:40]!r}... is too long; {_EXAMPLES}")
    if text.strip().lower() == "min":
        return Budget(is_minimum=True)
    if text.strip().lower() == "auto":
        return Budget(is_auto=True)
    automatic = re.fullmatch(r"\s*auto\s*-(.+)", text, re.IGNORECASE)
    if automatic is not None:
        reserve_bytes = _parse_text(automatic[1]).size_bytes
        if reserve_bytes is None:
            raise InvalidBudget(f"budget {text!r} does not parse; {_EXAMPLES}")
        return Budget(is_auto=True, reserve_bytes=reserve_bytes)
    match = re.fullmatch(r"\s*([+-]?[\d_]*\.?\d+(?:[eE][+-]?\d+)?)\s*(%|[A-Za-z]*)\s*", text)
    if match is None or (match[2] != "%" and match[2].upper() not in _UNITS):
        raise InvalidBudget(f"budget {text!r} does not parse; {_EXAMPLES}")
    digits = match[1].replace("_", "")
    number = float(digits)
    if match[2] == "%":
        if number <= 0:
            raise _not_positive(text)
        if number > _MOST_PERCENT:
            raise InvalidBudget(f"budget {text!r} is too large; with '100%' everything is kept")
        return Budget(share=number / 100)
    if not match[2] and 1 <= number <= 100:
        raise InvalidBudget(
            f"budget {text!r} is {digits} bytes: was a share meant, '{digits}%'? For bytes write "
            f"'{digits}B'"
        )
    unit = _UNITS[match[2].upper()]
    # Only numbers of a usual size are made exact: an exponent of any size could take for ever.
    is_usual = 1 <= number * unit <= 2 * MOST_BYTES
    exact = Fraction(digits) * unit if is_usual else number * unit
    return Budget(size_bytes=_size_bytes(exact, text))


def _size_bytes(number: int | float | Fraction, budget: int | float | str) -> int:
    if number <= 0:
        raise _not_positive(budget)
    if number < 1:
        raise InvalidBudget(
            f"budget {budget!r} is less than one byte; for a share of the unplanned peak write "
            f"'{float(number) * 100:g}%'"
        )
    if number > MOST_BYTES:
        shown = f"of {budget.bit_length()} bits" if isinstance(budget, int) else repr(budget)
        raise InvalidBudget(
            f"budget {shown} is too large: at most {MOST_BYTES} bytes; with '100%' everything is "
            "kept"
        )
    return int(number)


def _not_positive(budget: object) -> InvalidBudget:
    return InvalidBudget(f"budget {budget!r} is not positive; {_EXAMPLES}")
