"""Sums over held-out rows: exact, and moved by their bounds at most."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from accounting.core.pld.dominating_pairs import gaussian_noise
from tests.trainer.releases.conftest import farthest
from trainer.model.metrics import ABSOLUTE_ERROR, BINARY, CLASSES, SQUARED_ERROR
from trainer.releases import estimates, held_out_sums
from trainer.releases.estimates import Count, Estimates
from trainer.releases.held_out_sums import (
    HeldOutNumbers,
    HeldOutRows,
    RowSum,
    mean,
    moved_pairs,
    release,
)

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


def wild_rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which a third have wild numbers as labels or predictions."""
    labels, found = rng.uniform(-1, 1, count), rng.uniform(-1, 1, count)
    for values in (labels, found):
        wild = rng.random(count) < 0.2
        values[wild] = rng.choice(np.r_[WILD, -1.0], wild.sum())
    return labels, found


def sums_of(
    task: str,
    labels: np.ndarray,
    found: np.ndarray,
    most: int | None = None,
    cap: float = CAP,
) -> dict[str, RowSum]:
    """The sums over rows, of users with so many, and of numbers if of no task."""
    rows: Any = HeldOutNumbers(cap, most)
    if task in (BINARY, CLASSES):
        rows = HeldOutRows(task, 2 if task == BINARY else 3, cap, most)
    rows.add(labels, found)
    number = {} if most is None else {"rows": rows.count()}
    return {**number, **rows.sums(*() if most is None else (11,))}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("most", [None, 1, 3])
def test_no_row_or_user_moves_the_sums_beyond_their_bounds(
    seed: int, most: int | None
) -> None:
    rng = np.random.default_rng(seed)
    for task, make, cap in (
        (BINARY, binary_rows, CAP), (CLASSES, class_rows, CAP),
        ("numbers", wild_rows, CAP), ("numbers", wild_rows, 0.3),
    ):  # fmt: skip
        sums = functools.partial(sums_of, task, most=most, cap=cap)
        each, together = farthest(sums, *make(rng, 11 if most else 40), most=most or 1)
        assert max(each.values()) <= 1
        assert together <= 1 + 1e-9


def test_the_bounds_are_reached() -> None:
    # One positive above all others, and so wrong that its loss is capped.
    labels, scores = np.r_[1.0, np.zeros(9)], np.r_[0.9, np.zeros(9)]
    most, _ = farthest(functools.partial(sums_of, BINARY), labels, scores)
    assert most["counts"] == most["pairs"] == most["loss"] == 1
    # Half of a bound would be passed: the test above sees a smaller one.
    assert min(most.values()) > 0.9


@pytest.mark.parametrize("num_rows", [2, 5, 6])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_user_is_in_so_many_pairs_and_no_more(num_rows: int, most: int) -> None:
    @functools.cache  # the labels of others are often the same
    def pairs(*labels: float) -> dict[str, RowSum]:
        found = np.array(labels)  # scores are the labels: all pairs are ordered rightly
        rows = HeldOutRows(BINARY, 2, CAP, most)
        rows.add(found, found)
        return {"pairs": rows.sums(num_rows)["pairs"]}

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


ERROR_RATE = 1e-6


def test_the_bounds_of_numbers_are_reached() -> None:
    # Two rows of one user, wrong by the whole range, with the largest label.
    rows = np.r_[1.0, 1.0, 0.0]
    sums = functools.partial(sums_of, "numbers", most=2)
    each, together = farthest(sums, rows, -rows, most=2)
    assert set(each.values()) == {1.0}
    assert together > 0.99


def estimated(
    labels: np.ndarray, found: np.ndarray, noise: float, most: int | None = None
) -> Estimates:
    rows = HeldOutNumbers(4.0, most)
    rows.add(labels, found)
    count = Count(value=len(labels))
    if most is not None:
        (known,) = release({"rows": rows.count()}, noise).values()
        count = Count(value=float(known.values[0]), noise=known.stddev, most=most)
    return estimates.of_numbers(release(rows.sums(), noise), count, rows.cap)


def population(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels in [-1, 1], and predictions with a squared error of about 0.09."""
    labels = np.clip(rng.normal(0.2, 0.4, count), -1, 1)
    return labels, labels + rng.normal(0, 0.3, count)


def test_metrics_without_noise_are_the_exact_ones() -> None:
    labels, found = population(np.random.default_rng(2), 3_000)
    got = estimated(labels, found, 1e-9)
    for name, exact in (
        (SQUARED_ERROR, np.square(labels - found).mean()),
        (ABSOLUTE_ERROR, np.abs(labels - found).mean()),
    ):
        value = got.metrics[name]
        assert value is not None
        assert value.value == pytest.approx(exact, abs=1e-5)
    assert got.guessing == {SQUARED_ERROR: pytest.approx(labels.var(), abs=1e-5)}
    assert got.num_rows == 3_000


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("epsilon", [0.5, 30.0])
def test_an_interval_has_the_true_value_with_a_probability_of_about_95_percent(
    most: int | None, epsilon: float
) -> None:
    rng, count, hits = np.random.default_rng(1), 300, dict[str, int]()
    noise, short = gaussian_noise(epsilon, 1e-6), 0
    # Of an error that is normal with deviation 0.3.
    truth = {SQUARED_ERROR: 0.09, ABSOLUTE_ERROR: 0.3 * math.sqrt(2 / math.pi)}
    for _ in range(count):
        rows = (x.repeat(most or 1) for x in population(rng, 1_000))
        for name, each in estimated(*rows, noise, most).metrics.items():
            assert each is not None
            low, high = each.interval
            hits[name] = hits.get(name, 0) + (low < truth[name] < high)
            part = (
                each.noise if epsilon < 1 else each.sampling * (1 - (most or 1) ** -0.5)
            )
            short += name == SQUARED_ERROR and abs(each.value - truth[name]) < 1.96 * (
                math.hypot(each.noise, each.sampling) - part
            )
    least = stats.binom.ppf(ERROR_RATE / 8, count, 0.95)
    assert min(hits.values()) >= least
    if epsilon < 1 or most:  # without noise, or as of independent rows, it is too short
        assert short < least
