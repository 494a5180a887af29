"""What tests of releases look at: the sums that leave, their bounds and their noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainer.releases.held_out_sums import RowSum


def farthest(
    sums_of: Callable[..., dict[str, RowSum]], *rows: np.ndarray, most: int = 1
) -> tuple[dict[str, float], float]:
    """Leaves out each set of rows that may be one user's.

    Args:
      sums_of: Arrays of the rows that are kept -> sums over them.
      rows: Labels and predictions.
      most: Rows of a user at most.

    Returns:
      By how much that moves each sum, over its bound, and all together.
    """
    every = np.arange(len(rows[0]))
    whole, of_all = sums_of(*rows), 0.0
    of_each = dict.fromkeys(whole, 0.0)
    for count in range(1, most + 1):
        for chosen in itertools.combinations(every, count):
            kept = np.setdiff1d(every, chosen)
            others = sums_of(*(values[kept] for values in rows))
            parts = []
            for name, each in whole.items():
                change = (each.values - others[name].values).astype(float)
                moved = float(np.linalg.norm(change)) / each.bound
                of_each[name] = max(of_each[name], moved)
                parts.append(math.sqrt(each.share) * moved)
            of_all = max(of_all, math.hypot(*parts))
    return of_each, of_all


@pytest.fixture
def released_by(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Any], list[tuple[Any, float]]]:
    """``released_by(module)``: sums and noise of each release, as it is made."""

    def watch(module: Any) -> list[tuple[Any, float]]:
        seen: list[tuple[Any, float]] = []
        release = module.release

        def look(sums: Any, noise: float) -> Any:
            seen.append((sums, noise))
            return release(sums, noise)

        monkeypatch.setattr(module, "release", look)
        return seen

    return watch
