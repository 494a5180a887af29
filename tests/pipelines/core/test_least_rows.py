"""Which rows of a user are kept: the query against the rule in NumPy."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from pipelines.core.users import draw_priorities, least_rows

KEY = bytes(range(32))


def by_query(users: np.ndarray, priorities: np.ndarray, most: int) -> np.ndarray:
    """Returns the places of the kept rows."""
    places = np.arange(len(users))
    order = np.random.default_rng(0).permutation(len(users))  # it arrives in any order
    rows = pa.table(
        {
            "user_number": users[order].astype("u8"),
            "priority": priorities[order].astype("u8"),
            "place": places[order],
        }
    )
    with duckdb.connect(config={"threads": 2}) as database:
        database.register("rows", rows)
        found = database.execute(least_rows("rows", most)).fetchnumpy()
    return np.sort(np.asarray(found["place"]))


def by_rule(users: np.ndarray, priorities: np.ndarray, most: int) -> np.ndarray:
    """Returns the places of the rows with the ``most`` least priorities of a user."""
    order = np.lexsort((np.arange(len(users)), priorities, users))
    mine = users[order]
    # A row is left out if the user of the row ``most`` places before is the same.
    kept = np.ones(len(users), bool)
    kept[order[most:][mine[most:] == mine[:-most]]] = False
    return np.flatnonzero(kept)


@pytest.mark.parametrize("most", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    ("num_users", "num_priorities"),
    [(40, 2**63), (3000, 2**63), (1, 2**63), (40, 3), (1, 1)],
    ids=["few", "many", "one", "ties", "all tied"],
)
def test_the_query_is_the_rule(num_users: int, num_priorities: int, most: int) -> None:
    """Of random tables, numbers beyond 2**63 and equal priorities included."""
    for seed in range(3):
        rng = np.random.default_rng([seed, most, num_users])
        ids = rng.integers(0, 2**64, num_users, dtype="u8")
        users = ids[rng.zipf(1.3, 2000).astype("u8") % num_users]
        priorities = rng.integers(0, num_priorities, 2000, dtype="u8") << np.uint64(1)
        kept = by_query(users, priorities, most)
        np.testing.assert_array_equal(kept, by_rule(users, priorities, most))


def test_uniform_choice() -> None:
    """Each of the 10 pairs of 5 rows is kept equally often: chi-square, 1e-6."""
    trials = 20_000
    users = np.repeat(np.arange(trials), 5)
    kept = by_query(users, draw_priorities(KEY, 0, len(users)), 2)
    pairs = np.bincount(users[kept], 1 << (kept % 5))
    _, counts = np.unique(pairs, return_counts=True)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-6


def test_a_priority_depends_on_key_and_place_alone() -> None:
    whole = draw_priorities(KEY, 0, 1000)
    for first, last in ((0, 1), (1, 1000), (7, 8), (8, 9), (15, 500), (999, 1000)):
        some = draw_priorities(KEY, first, last - first)
        np.testing.assert_array_equal(some, whole[first:last])
    assert len(set(whole)) == 1000
    assert not np.isin(draw_priorities(bytes(32), 0, 1000), whole).any()
    far = draw_priorities(KEY, 2**40 + 3, 10)
    np.testing.assert_array_equal(draw_priorities(KEY, 2**40, 13)[3:], far)
