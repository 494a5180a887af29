"""Null clones: the bound holds, is as tight as was found, and rounds upwards."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from accounting.pld import gaussian, null_clones
from accounting.pld.null_clones import Shuffles

#: Gradients of all other examples, against 1 of the differing one.
OTHERS = (-1.0, -0.5, 0.5, 1.0)
NOISES = (0.8, 1.5, 3.0)
EPSILONS = (0.1, 0.5, 1.0, 2.0)
#: From a step that is next to always a clone to one that hardly ever is.
EXPONENTS = (0.02, 0.3, 1.0, 3.0)
SAMPLES = 40_000


def shuffles(steps, noise, epochs=1, size=5, larger=0):
    examples = steps * size + larger
    return Shuffles(steps=steps, epochs=epochs, examples=examples, noise=noise)


def log_density(x, own, other, noise, weights):
    """Returns ln density, up to a constant, of a shuffle whose own step has ``own``."""
    base = -((x - other) ** 2).sum(axis=-1, keepdims=True)
    exponents = (base + (x - other) ** 2 - (x - own) ** 2) / (2 * noise**2)
    return special.logsumexp(exponents, b=weights, axis=-1)


def divergences_of_two_steps(other, noise, weights):
    """Returns the divergences, at EPSILONS and in both directions, by quadrature."""
    line = np.linspace(-1 - 7 * noise, 1 + 7 * noise, 321)
    x = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1)
    real, ghost = (
        np.exp(log_density(x, own, other, noise, weights)) / (2 * np.pi * noise**2)
        for own in (1.0, 0.0)
    )
    return {
        (epsilon, is_removed): integrate.trapezoid(
            integrate.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), line), line
        )
        for epsilon in EPSILONS
        for is_removed, p, q in ((True, real, ghost), (False, ghost, real))
    }


def sampled_losses(rng, steps, own, against, other, noise):
    """Returns losses of one epoch, drawn where the own step has ``own``."""
    x = other + noise * rng.standard_normal((SAMPLES, steps))
    x[np.arange(SAMPLES), rng.integers(steps, size=SAMPLES)] += own - other
    weights = np.full(steps, 1 / steps)
    return log_density(x, own, other, noise, weights) - log_density(
        x, against, other, noise, weights
    )


def bound(run, epsilon):
    """Returns the least bound of EXPONENTS: each must hold."""
    return min(null_clones.delta_at(run, h, epsilon, 60) for h in EXPONENTS)


@pytest.mark.parametrize("larger", [0, 1])
@pytest.mark.parametrize("noise", NOISES)
def test_two_steps_never_exceed_the_bound(noise, larger):
    """Every h; seen to fail without beta, and with one clone more than there is."""
    run = shuffles(2, noise, size=1, larger=larger)
    weights = np.array([1, 1 + larger]) / (2 + larger)
    bounds = {epsilon: bound(run, epsilon) for epsilon in EPSILONS}
    for other in OTHERS:
        found = divergences_of_two_steps(other, noise, weights)
        for (epsilon, _), truth in found.items():
            assert bounds[epsilon] >= truth - 1e-5


@pytest.mark.parametrize("epochs", [1, 3])
def test_simulated_shuffles_never_exceed_the_bound(epochs):
    """Hoeffding: one of the comparisons fails with probability 1e-6 at most."""
    rng = np.random.default_rng(1)
    ends = ((1.0, 0.0), (0.0, 1.0))
    cases = list(itertools.product((0.8, 1.5), OTHERS, ends))
    slack = math.sqrt(math.log(len(cases) * len(EPSILONS) / 1e-6) / (2 * SAMPLES))
    runs = {noise: shuffles(4, noise, epochs) for noise, _, _ in cases}
    bounds = {
        (noise, epsilon): bound(run, epsilon)
        for noise, run in runs.items()
        for epsilon in EPSILONS
    }
    for noise, other, (own, against) in cases:
        losses = sum(
            sampled_losses(rng, 4, own, against, other, noise) for _ in range(epochs)
        )
        for epsilon in EPSILONS:
            truth = -np.expm1(np.minimum(epsilon - losses, 0.0)).mean()
            assert bounds[noise, epsilon] >= truth - slack


@pytest.mark.parametrize(
    ("steps", "noise", "delta", "epsilon"),
    [
        (1000, 2.0, 1e-8, 0.4628),
        (1000, 1.0, 1e-8, 5.6404),
        (562, 1.5, 2.7e-8, 2.4598),
        (562, 2.0, 2.7e-8, 0.6056),
        (562, 1.01, 2.7e-8, 5.4348),
    ],
)
def test_epsilon_of_one_epoch(steps, noise, delta, epsilon):
    run = shuffles(steps, noise, size=100)
    revealed = gaussian.gaussian_epsilon(noise, delta)
    found = null_clones.epsilon(run, delta, revealed)
    assert found == pytest.approx(epsilon, rel=1e-3)
    assert null_clones.delta(run, found * (1 + 1e-4)) <= delta
    # The theorem, term by term, from the closed form of beta and enclosed from below.
    unequal = shuffles(steps, noise, size=100, larger=7)
    assert found <= null_clones.epsilon(unequal, delta, revealed) < found * 1.02


def test_the_replaced_mass_is_the_divergence_of_a_step():
    for noise, h in ((0.8, 0.5), (1.0, 3.0), (2.0, 2.5)):
        run = shuffles(10, noise, epochs=3)
        p = math.exp(-h)
        near = special.ndtr(-noise * h + 0.5 / noise)
        closed = p * near - special.ndtr(-noise * h - 0.5 / noise)
        assert run.replaced(h) == pytest.approx(9 * closed, rel=1e-9)
        # In each epoch, and in each of both worlds.
        cost = 3 * (1 + math.exp(0.7)) * 9 * closed
        assert run.cost(h, 0.7) == pytest.approx(cost, rel=1e-9)


@pytest.mark.parametrize("larger", [0, 3])
def test_clones_are_counted_with_all_their_probability(larger):
    run, h = shuffles(300, 1.5, size=4, larger=larger), 2.0
    found = null_clones.counts(run, h)
    assert found.sum() == pytest.approx(1.0, rel=1e-9)
    exact = stats.binom.pmf(np.arange(300), 299, math.exp(-h))
    if larger:
        # Hidden among fewer: 1/a is the largest weight that a step may have.
        m = np.arange(1, 301)
        assert found @ np.arange(301) <= exact @ m
        assert found @ np.arange(301) == pytest.approx(
            exact @ ((4 * m + 1) / 5), rel=0.02
        )
    else:
        np.testing.assert_allclose(found[1:], exact, rtol=1e-9, atol=1e-300)
    parts, lost = null_clones.hiding(run, h)
    assert sum(weight for weight, _ in parts) + lost == pytest.approx(1.0, rel=1e-9)
    both = null_clones.directions(run, h, 20)
    assert all(one.infinite_mass >= lost > 0 for one in both)
    at_least = np.array([found[m:].sum() for m in range(301)])
    rounded = np.array([sum(w for w, m in parts if m >= least) for least in range(301)])
    assert (rounded <= at_least * (1 + 1e-9)).all()


def test_more_steps_are_never_worse():
    run = [shuffles(steps, 1.5, size=100) for steps in (2, 10, 100, 1000)]
    found = [null_clones.delta(one, 1.0) for one in run]
    assert found == sorted(found, reverse=True)
