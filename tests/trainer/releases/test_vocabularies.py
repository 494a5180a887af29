"""Vocabularies by thresholds: delta by brute force, and exact counts."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from trainer.releases.table_counts import count_texts, merged, threshold

EPSILON = 1.0


def partitions(rows: int) -> set[tuple[int, ...]]:
    """Counts of the values that one unit of up to so many rows alone may have."""
    return {
        tuple(sorted(each[:size]))
        for size in range(rows + 1)
        for each in itertools.product(range(1, rows + 1), repeat=size)
        if sum(each[:size]) <= rows
    }


def excess(limit: int, counts: tuple[int, ...], others: float, stddev: float) -> float:
    """Returns the larger delta of both directions, exactly.

    Args:
      limit: The threshold.
      counts: Rows of the values that the unit alone has.
      others: L2 distance of all other counts, which are released.
      stddev: Of the noise.
    """
    p = -math.expm1(
        sum(stats.norm.logcdf((limit + 0.5 - each) / stddev) for each in counts)
    )
    width = others / stddev

    def hockey_stick(ratio: float) -> float:
        if not width:
            return max(0.0, 1 - ratio)
        place = math.log(ratio) / width
        phi = stats.norm.cdf
        return phi(width / 2 - place) - ratio * phi(-width / 2 - place)

    ratio = math.exp(EPSILON)
    more = p + (1 - p) * hockey_stick(ratio / (1 - p)) if p < 1 else 1.0
    return max(more, hockey_stick(ratio * (1 - p)) if p < 1 else 1.0)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("stddev", [0.7, 3.0, 40.0])
def test_delta_is_that_of_counts_and_thresholds(
    most: int, columns: int, stddev: float
) -> None:
    delta = 1e-3
    limit = threshold(stddev, columns, delta, most=most)
    reach = most * math.sqrt(columns)
    of_counts = excess(limit, (), reach, stddev)

    def worst(limit: int) -> float:
        per_column = partitions(most)
        units = itertools.product(per_column, repeat=columns)
        return max(
            excess(limit, sum(unit, ()), others, stddev)
            - excess(limit, (), others, stddev)
            for unit in units
            for others in (0.0, reach)
        )

    assert worst(limit) <= delta
    assert of_counts <= 1
    # A threshold that is lower by a deviation, and one that sees single rows, fail.
    assert worst(limit - max(1, math.ceil(stddev))) > delta
    assert worst(1) > delta


def test_a_threshold_is_a_quantile_above_one_row() -> None:
    # One part in a million of a normal law is beyond 4.7534243 deviations.
    assert statistics.NormalDist().cdf(-4.7534243) == pytest.approx(1e-6, rel=1e-6)
    assert threshold(20.0, 1, 1e-6) == math.ceil(0.5 + 20 * 4.7534243)
    assert threshold(20.0, 26, 1e-6) > threshold(20.0, 8, 1e-6)


@pytest.mark.parametrize("parts", [1, 3])
def test_counts_are_exact_and_each_value_is_in_one_part(parts: int) -> None:
    rng = np.random.default_rng(0)
    words = [*map(str, range(50)), "", "über", "\x7f", "a" * 100]
    blocks = [[words[i] for i in rng.integers(0, len(words), 500)] for _ in range(4)]
    exact = {w: sum(b.count(w) for b in blocks) for w in words if w}
    found: dict[str, int] = {}
    for part in range(parts):
        texts, counts = merged(
            count_texts(pa.chunked_array([pa.array(b, pa.large_string())]), part, parts)
            for b in blocks
        )
        one = dict(zip(texts.to_pylist(), counts.tolist(), strict=True))
        assert not found.keys() & one.keys()
        found |= one
    assert found == exact
