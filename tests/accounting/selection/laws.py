"""Laws of the number of runs with a given mean."""

from __future__ import annotations

from accounting.claims import selection
from accounting.claims.selection import NumberOfRuns


def law(shape: float, mean: float) -> NumberOfRuns:
    """Returns the negative binomial law of a shape and a mean."""
    return selection._smallest(shape, lambda found: mean - found.mean)
