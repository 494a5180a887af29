"""Metrics with intervals, from sums with noise."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
from scipy import stats

from accounting.core.pld.dominating_pairs import gaussian_epsilon, gaussian_noise
from pipelines.core.users import Bounded
from trainer.model.metrics import BINARY, CLASSES, binary_metrics, guessing
from trainer.releases import estimates
from trainer.releases.estimates import Count, Estimates
from trainer.releases.evaluate import EvaluationPrice, most_rows
from trainer.releases.held_out_sums import HeldOutRows, RowSum, release

CAP = 4.0
ERROR_RATE = 1e-6


def population(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a quarter are 1, and logits of AUC 0.82."""
    logits = rng.normal(-1.5, 1.5, count)
    labels = rng.random(count) < 1 / (1 + np.exp(-logits))
    return labels.astype(int), logits


def estimated(labels: np.ndarray, logits: np.ndarray, noise: float) -> Estimates:
    rows = HeldOutRows(BINARY, 2, CAP)
    rows.add(labels, 1 / (1 + np.exp(-logits)))
    count = Count(value=len(labels))
    return estimates.of_binary(release(rows.sums(), noise), count, CAP)


@functools.cache
def truth() -> dict[str, float]:
    """Metrics of the population, with losses above the cap counted as it."""
    labels, logits = population(np.random.default_rng(0), 2_000_000)
    losses = np.logaddexp(0, np.where(labels > 0, -logits, logits))
    found = binary_metrics(labels, logits)
    return {**found, "log_loss": float(np.minimum(losses, CAP).mean())}  # type: ignore[dict-item]


@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_an_interval_has_the_true_value_with_a_probability_of_about_95_percent(
    epsilon: float,
) -> None:
    rng, count, hits, by_sampling = np.random.default_rng(1), 300, {}, 0
    noise = gaussian_noise(epsilon, 1e-6)
    for _ in range(count):
        found = estimated(*population(rng, 3_000), noise).metrics
        for name, each in found.items():
            assert each is not None
            low, high = each.interval
            hits[name] = hits.get(name, 0) + (low < truth()[name] < high)
            low, high = dataclasses.replace(each, noise=0.0).interval
            by_sampling += name == "accuracy" and low < truth()[name] < high
    # Hanley and McNeil's error is a little large, so that only too few are refused.
    least = stats.binom.ppf(ERROR_RATE / 3, count, 0.95)
    assert min(hits.values()) >= least
    if epsilon < 1:  # an interval without the noise is seen to be too short
        assert by_sampling < least


def test_an_interval_holds_possible_values_alone() -> None:
    """Seen: an accuracy of 0.98 to 1.02."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 400)
    for logits in (30.0 * (2 * labels - 1), -30.0 * (2 * labels - 1)):
        found = estimated(labels, logits, 0.5).metrics
        for name, each in found.items():
            assert each is not None
            low, high = each.interval
            assert 0 <= low <= each.value <= high <= (CAP if name == "log_loss" else 1)


MOST = 4


def of_users(num_users: int, noise: float, rng: np.random.Generator) -> Estimates:
    """Estimates of users whose rows are all alike, as many as they may have."""
    labels, logits = (x.repeat(MOST) for x in population(rng, num_users))
    rows = HeldOutRows(BINARY, 2, CAP, MOST)
    rows.add(labels, 1 / (1 + np.exp(-logits)))
    (known,) = release({"rows": rows.count()}, noise).values()
    count = Count(value=float(known.values[0]), noise=known.stddev, most=MOST)
    return estimates.of_binary(release(rows.sums(len(labels)), noise), count, CAP)


def test_noise_of_users_is_as_stated() -> None:
    """Of one set of users, released many times: that of the number of rows, too."""
    count, noise = 400, gaussian_noise(1.0, 1e-6)
    draws = [of_users(1_500, noise, np.random.default_rng(9)) for _ in range(count)]
    # A standard deviation has an error of 1 / sqrt(2 n); five of them.
    error = 5 / np.sqrt(2 * count)
    for name in ("auc", "log_loss", "accuracy"):
        known = [each.metrics[name] for each in draws]
        found = [(each.value, each.noise) for each in known if each is not None]
        assert len(found) == count
        values, stated = np.array(found).T
        assert np.std(values) == pytest.approx(stated.mean(), rel=error)


def test_metrics_without_noise_are_the_exact_ones() -> None:
    labels, logits = population(np.random.default_rng(2), 5_000)
    found, exact = estimated(labels, logits, 1e-9), binary_metrics(labels, logits)
    # Pairs of scores in one cell of the grid count half.
    for name, error in (("auc", 1e-5), ("accuracy", 1e-9)):
        value = found.metrics[name]
        assert value is not None
        assert value.value == pytest.approx(exact[name], abs=error)
    wanted = guessing(labels, task=BINARY, loss="binary_crossentropy")
    assert found.guessing == pytest.approx(wanted)
    assert found.capped is not None
    losses = np.logaddexp(0, np.where(labels > 0, -logits, logits))
    assert found.capped.value == pytest.approx((losses > CAP).mean(), abs=1e-12)


def test_no_auc_is_stated_where_noise_hides_the_smaller_class() -> None:
    labels, logits = population(np.random.default_rng(4), 2_000)
    labels[:] = 0
    labels[:3] = 1
    assert estimated(labels, logits, gaussian_noise(1.0, 1e-6)).metrics["auc"] is None


def test_classes_have_accuracy_log_loss_and_their_baseline() -> None:
    rng = np.random.default_rng(6)
    labels = rng.choice(3, 4_000, p=[0.6, 0.3, 0.1])
    chance = rng.dirichlet(np.ones(3), 4_000) + np.eye(3)[labels]
    chance /= chance.sum(1, keepdims=True)
    rows = HeldOutRows(CLASSES, 3, CAP)
    rows.add(labels, chance)
    found = estimates.of_classes(release(rows.sums(), 1e-9), Count(value=4_000), CAP)
    assert found.metrics["accuracy"] is not None
    right = (chance.argmax(1) == labels).mean()
    assert found.metrics["accuracy"].value == pytest.approx(right)
    assert found.metrics["log_loss"] is not None
    loss = np.minimum(-np.log(chance[np.arange(4_000), labels]), CAP).mean()
    assert found.metrics["log_loss"].value == pytest.approx(loss, abs=1e-5)
    wanted = guessing(labels, task=CLASSES, loss="sparse_categorical_crossentropy")
    assert found.guessing == pytest.approx(wanted)


# -- released numbers, and what an evaluation costs ------------------------------------


def _squares(stddev: float, count: int) -> float:
    """Returns the sum of squares of released noise, over its variance."""
    zeros = {"counts": RowSum(values=np.zeros(count, np.int64), bound=900, share=0.36)}
    (found,) = release(zeros, stddev).values()
    assert found.stddev == pytest.approx(stddev * 900 / math.sqrt(0.36))
    return float(np.sum((found.values / found.stddev) ** 2))


def test_noise_has_the_stated_deviation() -> None:
    count = 20_000
    low, high = stats.chi2.ppf([ERROR_RATE / 2, 1 - ERROR_RATE / 2], count)
    found = _squares(2.0, count)
    assert low < found < high
    # Noise that is 4 % too small is seen.
    assert not low < found * 0.96**2 < high


def test_two_releases_have_independent_noise() -> None:
    zeros = {
        name: RowSum(values=np.zeros(5_000, np.int64), bound=10_000, share=0.5)
        for name in ("counts", "loss")
    }
    drawn = [each.values for _ in range(2) for each in release(zeros, 1.0).values()]
    limit = stats.norm.ppf(1 - ERROR_RATE / 12) / math.sqrt(5_000)
    found = np.abs(np.corrcoef(drawn) - np.eye(4))
    assert found.max() < limit
    drawn[1] = drawn[0] + drawn[1]  # a shared part of half the variance is seen
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() > limit


@pytest.mark.parametrize(("share", "noise"), [(0.6, 1.0), (0.5, 0.0), (0.5, math.nan)])
def test_more_than_one_in_shares_or_no_noise_is_refused(
    share: float, noise: float
) -> None:
    one = RowSum(values=np.zeros(1, np.int64), bound=1, share=share)
    with pytest.raises(ValueError, match="Expected shares of at most 1"):
        release({"a": one, "b": one}, noise)


BOUNDED = Bounded(user_column="u", max_examples_per_user=5, num_examples=9_000)


def test_the_noise_of_users_leaves_room_for_the_bound_on_their_rows() -> None:
    found = EvaluationPrice.of_one(1.0, 1e-6, of_run=2.0, bounded=BOUNDED)
    assert found.of_rows == 1e-8
    assert gaussian_epsilon(found.noise_multiplier, found.delta - found.of_rows) <= 1
    # With all of delta for the noise it would be less.
    rows = EvaluationPrice.of_one(1.0, 1e-6, of_run=2.0)
    assert rows.of_rows == 0
    assert rows.noise_multiplier < found.noise_multiplier
    assert "one user, of whom `dpsgd prepare` kept at most 5 rows" in found.claim
    assert "zero-out and the add-or-remove relation" in found.claim
    assert "together are (2.0000, 1e-06)-differentially private for one user" in (
        found.claim
    )


def test_the_bound_is_below_the_rows_with_its_part_of_delta_at_most() -> None:
    of_rows, count, true = 0.02, 20_000, 5_000
    one = RowSum(values=np.full(count, true), bound=5, share=0.2)
    released = release({"rows": one}, 4.0)["rows"]
    counts = (Count(value=n, noise=released.stddev, most=5) for n in released.values)
    bounds = np.array([most_rows(each, BOUNDED, of_rows) for each in counts])
    # The neighbour may have k rows more, which the bound covers, too.
    below = int((bounds < true + 5).sum())
    assert below <= stats.binom.ppf(1 - ERROR_RATE, count, of_rows)
    assert below >= stats.binom.ppf(ERROR_RATE, count, of_rows / 2)  # and is not idle


@pytest.mark.parametrize(("of_rows", "most"), [(0.0, 9_000), (1e-8, 3_266)])
def test_the_public_number_bounds_the_rows_where_no_delta_is_left_for_it(
    of_rows: float, most: int
) -> None:
    rows = Count(value=3_000, noise=46.3, most=5)
    # 3,000 + 5 + 1 + 46.3 times the quantile of normal noise.
    wanted = 3_006 + 46.3 * stats.norm.isf(1e-8) if of_rows else 9_000
    assert most_rows(rows, BOUNDED, of_rows) == np.ceil(wanted)
    assert np.ceil(wanted) == most
    many = Count(value=8_990, noise=46.3, most=5)
    assert most_rows(many, BOUNDED, of_rows) == 9_000
