"""The simulation of random allocation: against quadrature, sums and closed forms."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from accounting.core.pld import gaussian
from tests.accounting.cross_check import simulation


def allocation(steps, epochs, noise):
    return simulation.RandomAllocation(
        num_steps=steps, num_epochs=epochs, noise_multiplier=noise
    )


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_one_step_is_the_gaussian_mechanism(noise):
    """Every order is exact there, also where delta is 1e-30."""
    for epsilon in (0.0, 1.0, 8.0 / noise**2, 20.0 / noise):
        exact = gaussian.gaussian_delta(noise / math.sqrt(3), epsilon)
        found = simulation.estimate(allocation(1, 3, noise), epsilon, 60_000)
        assert found.low <= exact <= found.high
        assert found.high - found.low < 0.25 * exact


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_two_steps_by_quadrature(noise):
    x = np.linspace(-9 * noise, 9 * noise + 4, 2001)
    weight = np.exp(-((x / noise) ** 2) / 2)
    weight /= weight.sum()
    ratio = np.exp((2 * x - 1) / (2 * noise**2))
    mean = (ratio[:, None] + ratio[None, :]) / 2
    mass = weight[:, None] * weight[None, :]
    for epsilon in (0.0, 1.0, 3.0):
        exact = float((mass * np.maximum(mean - math.exp(epsilon), 0)).sum())
        found = simulation.estimate(allocation(2, 1, noise), epsilon, 80_000)
        assert found.low <= exact <= found.high
        assert found.high - found.low < 0.3 * exact


def test_tuples_are_drawn_with_the_weights_of_their_agreements():
    """All 3^4 tuples of three steps: how often each pattern of counts appears."""
    noise, steps, order, size = 0.8, 3, 4, 200_000
    weights: dict[tuple[int, ...], float] = {}
    for drawn in itertools.product(range(steps), repeat=order):
        counts = np.bincount(drawn, minlength=steps)
        pairs = sum(math.comb(int(count), 2) for count in counts)
        pattern = tuple(sorted(map(int, counts)))
        weights[pattern] = weights.get(pattern, 0) + math.exp(pairs / noise**2)
    tuples = simulation._tuples(noise, steps, order)
    total = sum(weights.values())
    assert math.exp(tuples.log_sums[0, order]) * math.factorial(order) == (
        pytest.approx(total, rel=1e-12)
    )
    found = simulation._occupation(np.random.default_rng(1), tuples, size)
    assert np.all(found.sum(axis=1) == order)
    assert np.all(found[:, steps:] == 0)
    patterns = np.sort(found[:, :steps], axis=1)
    drawn, seen = np.unique(patterns, axis=0, return_counts=True)
    frequencies = dict(zip(map(tuple, drawn.tolist()), seen / size, strict=True))
    assert set(frequencies) == set(weights)
    for pattern, weight in weights.items():
        share = weight / total
        # Five deviations: four patterns, so a false alarm in one of 400,000 seeds.
        assert abs(frequencies[pattern] - share) < 5 * math.sqrt(share / size)


def test_the_interval_holds_and_is_relative_to_delta(monkeypatch):
    """What an estimate fails by, over many seeds, at the error that is asked for."""
    exact = gaussian.gaussian_delta(1.0, 6.0)
    shares = []
    for seed in range(40):
        monkeypatch.setattr(simulation, "SEED", seed)
        found = simulation.estimate(allocation(1, 1, 1.0), 6.0, 4000)
        assert found.low <= exact <= found.high
        shares.append((found.mean - exact) / (found.high - found.low))
    # The interval is of some five deviations on each side, not of fifty.
    assert 0.02 < float(np.std(shares)) < 0.25


def test_equal_questions_have_equal_answers():
    asked = allocation(5, 2, 1.0), 1.0, 5000
    found = simulation.estimate(*asked)
    assert found == simulation.estimate(*asked)
    assert found.num_samples == 500


def test_moments_are_those_of_all_tuples():
    noise, steps = 1.3, 7
    for order in (1, 2, 3):
        agreements = [
            sum(a == b for a, b in itertools.combinations(drawn, 2))
            for drawn in itertools.product(range(steps), repeat=order)
        ]
        exact = special.logsumexp(np.array(agreements) / noise**2)
        exact -= order * math.log(steps)
        found = simulation._log_chernoff(allocation(steps, 1, noise), order, 0.0)
        assert found == pytest.approx(exact, abs=1e-12)
