"""Guarantees of cyclic Poisson batches: the theorem of `cyclic_poisson`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan, together
from accounting.core.samplers import truncated_poisson
from accounting.core.samplers.cyclic_poisson import steps_of_an_example
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan

RELATIONS = ("REPLACE_SPECIAL", "ADD_OR_REMOVE_ONE", "REPLACE_ONE")


def make(n: int, b: int, steps: int, k: int, cap: int | None = None) -> DpSgdPlan:
    name = "cyclic-poisson" if cap is None else "truncated-cyclic-poisson"
    return make_plan(name, n, b, steps, cap=cap, bands=k)


#: (n, b, T, k, noise, delta) -> epsilon of BandMF by jax-privacy 2.0.0 with
#: dp-accounting 0.6.0: DpsgdTrainingAccountant, PLD at 1e-4, cycle_length=k.
BAND_MF = {
    (60_000, 600, 1000, 8, 2.0, 1e-5): 2.052082912101799,
    (540_000, 1024, 527, 16, 0.9, 1e-6): 2.4721723094451624,
    (540_000, 1024, 2637, 8, 1.2, 1e-6): 1.3865678476982388,
    (10_000, 100, 203, 4, 1.5, 1e-6): 1.1516838330891765,
    (278_000, 1024, 272, 2, 0.8, 1e-6): 1.726846226976874,
}


@pytest.mark.parametrize("setting", BAND_MF)
def test_epsilon_is_that_of_jax_privacy_for_band_mf(
    setting: tuple[int, int, int, int, float, float],
) -> None:
    n, b, steps, k, noise, delta = setting
    asked = {"noise_multiplier": noise, "delta": delta}
    plain = accountant.epsilon(make(n, b, steps, k), **asked)
    assert plain.guarantee == pytest.approx(BAND_MF[setting], rel=1e-4)
    # A cap of negligible cost, which jax-privacy accounts for in the same way.
    cap = accountant.smallest_truncated_batch_size(
        num_examples=n, expected_batch_size=b, num_steps=steps, epsilon=3, delta=delta,
        sampler="truncated-cyclic-poisson", bands=k,
    )  # fmt: skip
    capped = accountant.epsilon(make(n, b, steps, k, cap), **asked).guarantee
    assert plain.guarantee <= capped <= plain.guarantee * (1 + 1e-4)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_bounds_are_those_of_the_steps_of_an_example(relation: str) -> None:
    """Of n/k examples, where k divides n, in ceil(T/k) steps."""
    plan = make(10_000, 100, 203, 4)
    alone = make_plan("poisson", 2_500, 100, 51)
    asked = {"neighboring_relation": relation}
    for ask in (
        lambda p: accountant.epsilon(p, noise_multiplier=1.1, delta=1e-6, **asked),
        lambda p: accountant.delta(p, noise_multiplier=1.1, epsilon=2.0, **asked),
        lambda p: accountant.noise_multiplier(p, epsilon=2.0, delta=1e-6, **asked),
    ):
        assert ask(plan).guarantee == ask(alone).guarantee


def test_any_number_of_examples_and_steps_has_its_exact_probability() -> None:
    plan = make(10_007, 100, 203, 4)
    assert plan.sampling_probability == Fraction(400, 10_007)
    assert plan.expected_uses == Fraction(100 * 203, 10_007)
    assert steps_of_an_example(plan).num_steps == plan.num_group_steps == 51
    assert DpSgdPlan.from_json(plan.to_json()) == plan
    old = make_plan("poisson", 10_007, 100, 203)
    assert "bands" not in old.to_json()
    assert old.fingerprint != plan.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bands": None}, "bands=None to be an integer"),
        ({"bands": 1}, "bands=1 >= 2"),
        ({"bands": 101}, "bands=101 <= 100"),
        ({"expected_batch_size": 5_001}, "bands=4 <= 1. Give"),
        ({"sampler": "poisson"}, "bands=4 to be None"),
    ],
)
def test_bands_that_mean_nothing_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(make(10_000, 100, 200, 4), **changes)  # type: ignore[arg-type]


def test_several_runs_begin_a_cycle_each() -> None:
    """Three runs of 10 steps are 3 x 3 steps of an example, not ceil(30 / 4)."""
    plan = together(make(1000, 100, 10, 4), 3)
    assert steps_of_an_example(plan).num_steps == 9
    assert together(plan, 1) == plan


# -- the cap ---------------------------------------------------------------------------


def full_steps(n: int, b: int, k: int, cap: int) -> float:
    """Chance that a step of a row's group has more than ``cap`` rows."""
    rate, found = b * k / n, 0.0
    for others in range(n):  # that are in the group of the row
        in_group = stats.binom.pmf(others, n - 1, 1 / k)
        found += in_group * stats.binom.sf(cap, others + 1, rate)
    return float(found)


@pytest.mark.parametrize("setting", [(12, 2, 3, 3), (30, 5, 4, 8), (8, 4, 2, 4)])
def test_the_cost_of_the_cap_bounds_that_of_the_steps_of_a_group(
    setting: tuple[int, int, int, int],
) -> None:
    n, b, k, cap = setting
    plan = make(n, b, 4 * k, k, cap)
    bound = truncated_poisson.truncation_probability(plan)
    # It takes the row as in the step, whose chance of that is b k / n.
    assert full_steps(n, b, k, cap) <= bound
    assert bound == pytest.approx(stats.binom.sf(cap - 1, n - 1, b / n))
    cost = accountant.truncation_of(plan.sampler).delta(plan, 1.0)
    assert cost == pytest.approx((1 + math.e) * 4 * bound)


# -- noise of bands --------------------------------------------------------------------


def matrix(coefficients: list[float], num_steps: int, border: int) -> np.ndarray:
    """C of the theorem, whose noise begins anew at a border."""
    found = np.zeros((num_steps, num_steps))
    for step, (lag, value) in itertools.product(
        range(num_steps), enumerate(coefficients)
    ):
        row = step + lag
        if row < num_steps and (step < border) == (row < border):
            found[row, step] = value
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("border", [0, 1, 4, 5])
def test_participations_are_in_disjoint_rows_within_the_norm(
    k: int, border: int
) -> None:
    """For every set of steps of one group, and noise drawn anew at a border."""
    num_steps, coefficients = 9, [1.0, 0.75, 0.6, 0.5][:k]
    c, norm = matrix(coefficients, num_steps, border), np.linalg.norm(coefficients)
    random = np.random.default_rng(0)
    for group in range(k):
        own = range(group, num_steps, k)
        assert len(own) <= -(-num_steps // k)
        for took in itertools.product((0, 1), repeat=len(own)):
            gradients = random.normal(size=(num_steps, 2))
            gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
            for step, took_part in zip(own, took, strict=True):
                block = slice(step, step + k)
                change = np.outer(c[:, step], gradients[step]) * took_part
                assert np.linalg.norm(change) <= norm * (1 + 1e-12)
                change[block] = 0
                assert not change.any()


def correlated(
    z: np.ndarray, coefficients: list[float], *, rounded: bool
) -> np.ndarray:
    """W of the theorem, by its recursion."""
    found = np.zeros_like(z)
    for step in range(len(z)):
        lags = range(1, min(step, len(coefficients) - 1) + 1)
        value = z[step] - sum(coefficients[lag] * found[step - lag] for lag in lags)
        found[step] = np.rint(value) if rounded else value
    return found


def test_noise_solves_the_triangular_system_and_rounding_is_post_processing() -> None:
    coefficients, random = [1.0, 0.75, 0.59375, 0.45], np.random.default_rng(1)
    c = matrix(coefficients, 12, 0)
    for _ in range(200):
        z, sums = random.normal(0, 9, (12, 3)), random.integers(-50, 50, (12, 3))
        smooth = correlated(z, coefficients, rounded=False)
        np.testing.assert_allclose(c @ smooth, z, atol=1e-9)
        released = sums + correlated(z, coefficients, rounded=True)
        seen, again = c @ sums + z, np.zeros((12, 3))
        for step in range(12):  # a function of C m + Z alone
            lags = range(1, min(step, 3) + 1)
            past = sum(coefficients[j] * again[step - j] for j in lags)
            again[step] = np.rint(seen[step] - past)
        np.testing.assert_array_equal(again, released)


def loss_of_block(
    shift: np.ndarray, seen: np.ndarray, rate: float, deviation: float
) -> np.ndarray:
    """ln of the density with the row, over that without it, of blocks of outputs."""
    exponent = (seen @ shift - shift @ shift / 2) / deviation**2
    return np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)


@pytest.mark.parametrize("epsilon", [0.5, 1.5])
def test_an_adaptive_opponent_reaches_the_bound_and_no_more(epsilon: float) -> None:
    """White box: C x + Z of one group, with directions chosen from earlier outputs.

    Others, who depend on what was released within the block, are known and taken off.
    """
    k, turns, rate, noise, draws = 3, 4, 0.3, 1.0, 400_000
    coefficients = np.array([1.0, 0.75, 0.6])
    norm = float(np.linalg.norm(coefficients))
    random = np.random.default_rng(7)
    loss, last = np.zeros(draws), np.zeros(draws)
    for _ in range(turns):
        # One of two orthogonal directions: the sign of what was seen before.
        turned = last > 0
        takes_part = random.random(draws) < rate
        z = random.normal(0, noise * norm, (draws, k, 2))
        direction = np.where(turned[:, None], [[1.0, 0.0]], [[0.0, 1.0]])
        shift = coefficients[None, :, None] * direction[:, None, :]
        seen = z + shift * takes_part[:, None, None]
        along = np.einsum("dkc,dc->dk", seen, direction)
        loss += loss_of_block(coefficients, along, rate, noise * norm)
        last = seen.sum(axis=(1, 2)) + 0.5 * last
    found = np.maximum(0.0, -np.expm1(epsilon - loss))
    plan = make(100, 10, turns * k, k)
    assert plan.sampling_probability == Fraction(3, 10)
    bound = accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon).guarantee
    error = found.std() / math.sqrt(draws)
    # Two-sided at 1e-6: the bound is tight for the removal of an example.
    tolerance = error * float(special.ndtri(1 - 5e-7))
    assert found.mean() == pytest.approx(bound, abs=tolerance)
