"""Sums over held-out rows: exact, and moved by one row by their bounds at most."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from tests.trainer.releases.conftest import farthest
from trainer.model.metrics import BINARY, CLASSES, binary_metrics
from trainer.releases import held_out_sums
from trainer.releases.held_out_sums import HeldOutRows, RowSum, mean, moved_pairs

CAP = 4.0
#: Labels and probabilities that no model or table should have.
WILD = np.array([np.nan, np.inf, -np.inf, -3.0, 0.0, 0.5, 1.0, 7.0, 1e308])


def binary_rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which a third have wild labels or scores."""
    labels, scores = rng.integers(0, 2, count).astype(float), rng.random(count)
    for values in (labels, scores):
        wild = rng.random(count) < 0.15
        values[wild] = rng.choice(WILD, wild.sum())
    return labels, scores


def class_rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.integers(0, 3, count).astype(float)
    chance = rng.dirichlet(np.ones(3), count)
    wild = rng.random(count) < 0.15
    labels[wild] = rng.choice(WILD, wild.sum())
    chance[rng.random(chance.shape) < 0.1] = np.nan
    return labels, chance


def sums_of(task: str, labels: np.ndarray, found: np.ndarray) -> dict[str, RowSum]:
    rows = HeldOutRows(task, 2 if task == BINARY else 3, CAP)
    rows.add(labels, found)
    return rows.sums()


@pytest.mark.parametrize("seed", range(8))
def test_one_row_moves_the_values_of_a_sum_by_its_bound_at_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for task, make in ((BINARY, binary_rows), (CLASSES, class_rows)):
        each, _ = farthest(functools.partial(sums_of, task), *make(rng, 40))
        assert max(each.values()) <= 1


def test_the_bounds_are_reached() -> None:
    # One positive above all others, and so wrong that its loss is capped.
    labels, scores = np.r_[1.0, np.zeros(9)], np.r_[0.9, np.zeros(9)]
    most, _ = farthest(functools.partial(sums_of, BINARY), labels, scores)
    assert most["counts"] == most["pairs"] == most["loss"] == 1
    # Half of a bound would be passed: the test above sees a smaller one.
    assert min(most.values()) > 0.9


def sums_of_users(
    task: str, labels: np.ndarray, found: np.ndarray, most: int, at_most: int
) -> dict[str, RowSum]:
    rows = HeldOutRows(task, 2 if task == BINARY else 3, CAP, most)
    rows.add(labels, found)
    return {"rows": rows.count(), **rows.sums(at_most)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [2, 3])
def test_a_user_moves_all_sums_together_by_one_at_most(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    for task, make in ((BINARY, binary_rows), (CLASSES, class_rows)):
        sums = functools.partial(sums_of_users, task, most=most, at_most=11)
        each, together = farthest(sums, *make(rng, 11), most=most)
        assert max(each.values()) <= 1
        assert together <= 1


@pytest.mark.parametrize("num_rows", [2, 3, 5, 6])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_a_user_is_in_so_many_pairs_and_no_more(num_rows: int, most: int) -> None:
    @functools.cache  # the labels of others are often the same
    def pairs(*labels: float) -> dict[str, RowSum]:
        found = np.array(labels)  # scores are the labels: all pairs are ordered rightly
        return {"pairs": sums_of_users(BINARY, found, found, most, num_rows)["pairs"]}

    moved = max(
        farthest(
            lambda found: pairs(*found), np.array(bits), most=min(most, num_rows - 1)
        )[0]["pairs"]
        for bits in itertools.product((0.0, 1.0), repeat=num_rows)
    )
    assert moved == 1
    assert pairs(*[0.0] * num_rows)["pairs"].bound == moved_pairs(num_rows, most)


@pytest.mark.parametrize("task", [BINARY, CLASSES])
def test_every_row_has_a_place_whatever_is_in_it(task: str) -> None:
    rng = np.random.default_rng(5)
    labels, found = (binary_rows if task == BINARY else class_rows)(rng, 500)
    sums = sums_of(task, labels, found)
    assert sums["counts"].values.sum() == 500
    for name in ("loss", "squares"):
        assert 0 <= mean(float(sums[name].values[0]), 500) <= 1


def test_values_are_those_of_the_exact_metrics() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=700).round(1)  # with ties
    labels = (rng.random(700) < 1 / (1 + np.exp(-logits))).astype(int)
    exact = binary_metrics(labels, logits)
    sums = sums_of(BINARY, labels, 1 / (1 + np.exp(-logits)))
    ones = int(labels.sum())
    auc = 0.5 + sums["pairs"].values[0] / (2 * ones * (700 - ones))
    assert auc == pytest.approx(exact["auc"], abs=1e-12)
    loss = CAP * mean(float(sums["loss"].values[0]), 700)
    assert loss == pytest.approx(exact["log_loss"], abs=1e-5)
    counts = sums["counts"].values.reshape(-1, 2)
    middle = int(np.searchsorted(held_out_sums.edges(CAP), 0.5)) + 1
    right = counts[:middle, 0].sum() + counts[middle:, 1].sum()
    assert right / 700 == exact["accuracy"]


def test_scores_are_ordered_by_a_grid_that_no_row_moves() -> None:
    """Also next to 0 and 1, and whatever a model returns."""
    scores = np.sort(
        np.r_[
            2.0 ** -np.arange(1, 25), 1 - 2.0 ** -np.arange(2, 25),
            np.linspace(0.01, 0.99, 5_000), [0.0, 1.0],
        ]
    )  # fmt: skip
    cells = held_out_sums._cells(scores)
    assert (np.diff(cells) > 0).all()
    np.testing.assert_array_equal(
        held_out_sums._cells(np.r_[-3.0, 1e-30, 7.0, 1e308]), cells[[0, 0, -1, -1]]
    )
    order = np.sort(np.random.default_rng(0).random(100_000))
    found = held_out_sums._cells(order)
    assert (np.diff(found) >= 0).all()
    wide = (
        np.diff(order)[np.diff(found) == 0]
        / np.minimum(order, 1 - order)[:-1][np.diff(found) == 0]
    )
    assert wide.max() < 2.0**-12


@pytest.mark.parametrize("task", [BINARY, CLASSES])
def test_shares_add_up_to_one(task: str) -> None:
    assert sum(HeldOutRows(task, 3, CAP).shares.values()) == pytest.approx(1.0)
    for most in (None, 3):
        assert sum(HeldOutRows(task, 3, CAP, most).shares.values()) <= 1
