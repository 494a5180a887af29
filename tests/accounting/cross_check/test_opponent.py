"""The simulated opponent of shuffles: below the truth, and near it."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import special

from accounting.core import accountant
from accounting.core.pld import gaussian
from tests.accounting.cross_check import check, opponent
from tests.accounting.plans import make_plan


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    monkeypatch.setattr(opponent, "_NUM_VALUES", 400_000)


def orders(steps, noise, num_orders=1, examples=None):
    return opponent.RandomOrders(
        num_steps=steps,
        num_orders=num_orders,
        num_examples=examples or 10 * steps,
        noise=noise,
    )


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_one_step_is_the_gaussian_mechanism(delta):
    """One step hides nothing: the closed form is the truth."""
    exact = gaussian.gaussian_epsilon(1.0 / math.sqrt(2), delta)
    found = opponent.attained(orders(1, 1.0, num_orders=2), delta)
    assert 0.9 * exact < found.epsilon < exact


def test_two_unequal_steps_by_quadrature():
    """Batches of one and of two examples."""
    noise, line = 1.0, np.linspace(-8, 10, 601)
    x, y = np.meshgrid(line, line, indexing="ij")
    pair = []
    for mean in (2.0, 1.0):
        terms = [(x - mean) ** 2 + y**2, x**2 + (y - mean) ** 2]
        exponents = -np.array(terms) / (2 * noise**2)
        weights = np.array([2 / 3, 1 / 3])[:, None, None]
        density = np.exp(special.logsumexp(exponents, b=weights, axis=0))
        pair.append(density / (2 * np.pi * noise**2) * (line[1] - line[0]) ** 2)
    for delta in (1e-2, 1e-5):
        found = opponent.attained(orders(2, noise, examples=3), delta).epsilon
        reached, more = (
            np.maximum(pair[0] - math.exp(epsilon) * pair[1], 0).sum()
            for epsilon in (found, found * 1.1)
        )
        assert reached > delta > more


@pytest.mark.parametrize("sampler", ["dynamic-shuffle", "persistent-shuffle"])
def test_a_shuffle_is_judged_by_its_opponent(sampler):
    plan = make_plan(sampler, 1000, 50, 40, epochs=2)
    asked = {"noise_multiplier": 1.0, "delta": 1e-5}
    check.check_plan(plan)
    ours = accountant.epsilon(plan, **asked)
    found = check.cross_check(plan, **asked, ours=ours)
    assert found.disagreements == ()
    [opinion] = found.opinions
    # Another proof of nearly the same lower bound.
    assert 0.9 * ours.lower < opinion.low <= ours.guarantee
    poisson = dataclasses.replace(plan, sampler="poisson")
    wrong = accountant.epsilon(poisson, **asked)
    refuted = check.cross_check(plan, **asked, ours=wrong)
    assert refuted.disagreements == ("our epsilon is too small",)
