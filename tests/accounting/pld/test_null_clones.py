"""Null clones: the bound holds, is as tight as was found, and rounds upwards."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from accounting.claims import null_clones
from accounting.claims.null_clones import Shuffles
from accounting.core.pld import dominating_pairs

#: Gradients of all other examples, against 1 of the differing one.
OTHERS = (-1.0, -0.5, 0.5, 1.0)
NOISES = (0.8, 1.5, 3.0)
EPSILONS = (0.1, 0.5, 1.0, 2.0)
#: From a step that is next to always a clone to one that hardly ever is.
EXPONENTS = (0.02, 0.3, 1.0, 3.0)
SAMPLES = 40_000


def shuffles(steps, noise, orders=1, size=5, larger=0):
    examples = steps * size + larger
    return Shuffles(steps=steps, orders=orders, examples=examples, noise=noise)


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


@pytest.mark.parametrize("orders", [1, 3])
def test_simulated_shuffles_never_exceed_the_bound(orders):
    """Hoeffding: one of the comparisons fails with probability 1e-6 at most."""
    rng = np.random.default_rng(1)
    ends = ((1.0, 0.0), (0.0, 1.0))
    cases = list(itertools.product((0.8, 1.5), OTHERS, ends))
    slack = math.sqrt(math.log(len(cases) * len(EPSILONS) / 1e-6) / (2 * SAMPLES))
    runs = {noise: shuffles(4, noise, orders) for noise, _, _ in cases}
    bounds = {
        (noise, epsilon): bound(run, epsilon)
        for noise, run in runs.items()
        for epsilon in EPSILONS
    }
    for noise, other, (own, against) in cases:
        losses = sum(
            sampled_losses(rng, 4, own, against, other, noise) for _ in range(orders)
        )
        for epsilon in EPSILONS:
            truth = -np.expm1(np.minimum(epsilon - losses, 0.0)).mean()
            assert bounds[noise, epsilon] >= truth - slack


@pytest.mark.parametrize(
    ("steps", "noise", "delta", "epsilon"),
    [
        (1000, 2.0, 1e-8, 0.4628),
        (562, 1.5, 2.7e-8, 2.4598),
        (562, 1.01, 2.7e-8, 5.4348),
    ],
)
def test_epsilon_of_one_epoch(steps, noise, delta, epsilon):
    run = shuffles(steps, noise, size=100)
    revealed = dominating_pairs.gaussian_epsilon(noise, delta)
    found = null_clones.epsilon(run, delta, revealed)
    assert found == pytest.approx(epsilon, rel=1e-3)
    assert null_clones.delta(run, found * (1 + 1e-4)) <= delta
    # The theorem, term by term, from the closed form of beta and enclosed from below.
    unequal = shuffles(steps, noise, size=100, larger=7)
    assert found <= null_clones.epsilon(unequal, delta, revealed) < found * 1.02


def test_the_replaced_mass_is_the_divergence_of_a_step():
    for noise, h in ((0.8, 0.5), (1.0, 3.0), (2.0, 2.5)):
        run = shuffles(10, noise, orders=3)
        p = math.exp(-h)
        near = special.ndtr(-noise * h + 0.5 / noise)
        closed = p * near - special.ndtr(-noise * h - 0.5 / noise)
        assert run.replaced(h) == pytest.approx(9 * closed, rel=1e-9)
        # In each epoch, and in each of both worlds.
        cost = 3 * (1 + math.exp(0.7)) * 9 * closed
        assert run.cost(h, 0.7) == pytest.approx(cost, rel=1e-9)


def law_of_m(steps, size, larger, h):
    """Returns the probabilities of m by convolution, at index m."""
    p = math.exp(-h)
    if not larger:
        return np.append(0.0, stats.binom.pmf(np.arange(steps), steps - 1, p))
    few = stats.binom.pmf(
        np.arange(steps - larger + 1), steps - larger, p * size / (size + 1)
    )
    most = stats.binom.pmf(np.arange(larger), larger - 1, p)
    return np.append(0.0, np.convolve(few, most))


@pytest.mark.parametrize("larger", [0, 1, 3, 150, 299])
@pytest.mark.parametrize("size", [1, 4])
def test_clones_are_counted_and_rounded_down(size, larger):
    run, h = shuffles(300, 1.5, size=size, larger=larger), 2.0
    exact = law_of_m(300, size, larger, h)
    parts, lost = null_clones.hiding(run, h)
    assert sum(weight for weight, _ in parts) + lost == pytest.approx(1.0, rel=1e-12)
    both = null_clones.directions(run, h, 20)
    assert all(one.infinite_mass >= lost > 0 for one in both)
    at_least = np.array([exact[m:].sum() for m in range(301)])
    rounded = np.array([sum(w for w, m in parts if m >= least) for least in range(301)])
    assert (rounded <= at_least * (1 + 1e-12)).all()
    mean = sum(weight * m for weight, m in parts)
    assert mean == pytest.approx(exact @ np.arange(301), rel=0.02)


def test_any_number_of_steps_has_an_answer_and_more_are_never_worse():
    """Across 2^17, where amplification once stopped, up to 1e9."""
    counts = [2**14, 2**17, 2**17 + 1, 2**25, 10**9]
    found = []
    for steps in counts:
        run = shuffles(steps, 1.0, size=100)
        found.append(null_clones.epsilon(run, 1e-8, 6.0))
    assert all(one < other * (1 + 1e-3) for other, one in itertools.pairwise(found))
    assert found[1] == pytest.approx(found[2], rel=2e-4)
    assert found[-1] < 0.05 < 1.0 < found[1]


def repeated_losses(rng, steps, visits, present, other, noise, adapts):
    """Returns losses of one order that is repeated, drawn with or without the example.

    If it adapts, its gradient is the sign of the sum of all past outputs: each factor
    of the likelihood ratio depends on the past.
    """
    own = rng.integers(steps, size=SAMPLES)
    real, ghost = np.zeros((2, SAMPLES, steps))
    past = np.zeros(SAMPLES)
    for _, step in itertools.product(range(visits), range(steps)):
        gradient = np.where(past < 0, -1.0, 1.0) if adapts else np.ones(SAMPLES)
        mean = np.where(own == step, gradient * present, other)
        x = mean + noise * rng.standard_normal(SAMPLES)
        real[:, step] += (x - other) ** 2 - (x - gradient) ** 2
        ghost[:, step] += (x - other) ** 2 - x**2
        past += x
    both = (special.logsumexp(sums / (2 * noise**2), axis=1) for sums in (real, ghost))
    losses = next(both) - next(both)
    return losses if present else -losses


@pytest.mark.parametrize(("steps", "visits"), [(3, 5), (20, 2)])
def test_an_order_that_is_repeated_never_exceeds_the_bound(steps, visits):
    """Hoeffding, as above; seen to fail where the noise of one visit stands in beta."""
    rng = np.random.default_rng(2)
    noise, flags = 1.0, (True, False)
    cases = list(itertools.product((-1.0, 0.5), flags, flags))
    slack = math.sqrt(math.log(len(cases) * len(EPSILONS) / 1e-6) / (2 * SAMPLES))
    bounds = [bound(shuffles(steps, noise), epsilon) for epsilon in EPSILONS]
    scale = noise * math.sqrt(visits)
    for other, present, adapts in cases:
        losses = repeated_losses(rng, steps, visits, present, other, scale, adapts)
        for epsilon, proven in zip(EPSILONS, bounds, strict=True):
            truth = -np.expm1(np.minimum(epsilon - losses, 0.0)).mean()
            assert proven >= truth - slack
