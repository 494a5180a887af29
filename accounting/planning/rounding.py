"""How numbers are printed in tables and plots.

Formal guarantees:
  - What is proven is rounded up, and lower bounds are rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from accounting.core.intervals import EXACT, delta_text
from accounting.planning.comparison import DELTA, Answer


def proven_text(answer: Answer) -> str:
    """Returns the proven value, rounded up; "unknown" if there is none."""
    return _text(answer.proven, answer.asked, math.ceil)


def least_text(answer: Answer) -> str:
    """Returns the lower bound, rounded down; "unknown" if there is none."""
    return _text(answer.least, answer.asked, math.floor)


def swept_text(value: float) -> str:
    """Returns a value of a sweep, unrounded: what is proven there holds there."""
    return f"{int(value):,}" if float(value).is_integer() else repr(float(value))


def is_exact(answer: Answer) -> bool:
    """Whether the bounds are equal up to rounding."""
    return answer.bounds.kind == EXACT


def _text(value: float | None, asked: str, side: Callable[[float], int]) -> str:
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "infinite"
    if asked != DELTA:
        return f"{side(value * 1e4) / 1e4:.4f}"
    return delta_text(value, side)
