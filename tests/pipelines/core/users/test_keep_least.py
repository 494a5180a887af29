"""Which rows of a user are kept."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pipelines.core.users.keep_least import keep_least


def rows(seed: int, count: int = 500, users: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Users with a heavy tail, and a priority for each row."""
    rng = np.random.default_rng(seed)
    return rng.zipf(1.3, count).astype("u8") % users, rng.integers(
        0, 1 << 63, count, dtype="u8"
    )


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_at_most(most: int) -> None:
    users, priorities = rows(1)
    kept = keep_least(users, priorities, most)
    before = dict(zip(*np.unique(users, return_counts=True), strict=True))
    after = dict(zip(*np.unique(users[kept], return_counts=True), strict=True))
    assert after == {user: min(most, count) for user, count in before.items()}
    for user in before:
        of = priorities[users == user]
        assert set(priorities[kept & (users == user)]) == set(np.sort(of)[:most])


def test_uniform_choice() -> None:
    """Each of the 10 pairs of 5 rows is kept equally often: chi-square, 1e-6."""
    rng = np.random.default_rng(2)
    trials = 20_000
    users = np.repeat(np.arange(trials, dtype="u8"), 5)
    kept = keep_least(users, rng.integers(0, 1 << 63, len(users), dtype="u8"), 2)
    pairs = kept.reshape(trials, 5) @ (1 << np.arange(5))
    _, counts = np.unique(pairs, return_counts=True)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-6


def test_any_order() -> None:
    users, priorities = rows(3)
    order = np.random.default_rng(4).permutation(len(users))
    kept = keep_least(users, priorities, 2)
    assert (keep_least(users[order], priorities[order], 2) == kept[order]).all()


def test_in_two_rounds() -> None:
    users, priorities = rows(5)
    places = np.arange(len(users))
    left = np.concatenate(
        [
            part[keep_least(users[part], priorities[part], 2)]
            for part in np.array_split(places, 7)
        ]
    )
    twice = left[keep_least(users[left], priorities[left], 2)]
    assert set(twice) == set(places[keep_least(users, priorities, 2)])
    assert len(left) > len(twice)  # the first round alone is not enough


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(count: int) -> None:
    users, priorities = rows(6, count)
    assert keep_least(users, priorities, 3).sum() == count
