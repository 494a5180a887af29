"""Neighbouring relations: the default, what is the same, and what is refused."""

import math

import numpy as np
import pytest
from scipy import special

from accounting import profiles
from accounting.core import accountant, neighboring_relation
from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.pld import dominating_pairs
from accounting.core.validation import InputError
from tests.accounting.plans import composed, delta_bounds, make_plan
from tests.sampler_fields import needed

ADD_OR_REMOVE = {"neighboring_relation": neighboring_relation.ADD_OR_REMOVE_ONE}

#: Every entry, as a function of a plan and the relation.
ENTRIES = [
    lambda plan, **relation: accountant.epsilon(
        plan, noise_multiplier=1.0, delta=1e-5, **relation
    ),
    lambda plan, **relation: accountant.delta(
        plan, noise_multiplier=1.0, epsilon=1.0, **relation
    ),
    lambda plan, **relation: accountant.noise_multiplier(
        plan, epsilon=1.0, delta=1e-5, **relation
    ),
]

#: Accounted for under add-or-remove, and under replace-one.
CYCLIC = {"cyclic-poisson", "truncated-cyclic-poisson"}
OF_ANY_NUMBER = {"poisson", "truncated-poisson", "balls-and-bins", *CYCLIC}
REPLACED = {"poisson", "deterministic", "cyclic-poisson"}
REPLACE = {"neighboring_relation": neighboring_relation.REPLACE_ONE}
#: The plan of the published numbers, at noise 1.1 and delta 1e-5.
PUBLISHED = {"num_examples": 60_000, "expected_batch_size": 600, "num_steps": 1000}


def make(small_plan, sampler):
    return small_plan(sampler, **needed(sampler, cap=220))


@pytest.mark.parametrize("entry", ENTRIES)
def test_independent_rows_are_the_same_under_add_or_remove(small_plan, entry):
    plan = small_plan("poisson")
    default = entry(plan)
    assert entry(plan, neighboring_relation="REPLACE_SPECIAL") == default
    assert entry(plan, **ADD_OR_REMOVE) == default


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - OF_ANY_NUMBER))
def test_add_or_remove_is_refused_with_a_reason(small_plan, sampler, entry):
    with pytest.raises(InputError, match=rf"ADD_OR_REMOVE_ONE.*{sampler}.*: .+\.$"):
        entry(make(small_plan, sampler), **ADD_OR_REMOVE)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - REPLACED))
def test_replace_one_is_refused_with_a_remedy(small_plan, sampler, entry):
    with pytest.raises(InputError, match="group_epsilon with group_size=2"):
        entry(make(small_plan, sampler), **REPLACE)


def published_epsilon(plan, relation):
    return accountant.epsilon(plan, noise_multiplier=1.1, delta=1e-5, **relation)


def test_published_epsilon_of_truncated_poisson_under_add_or_remove():
    plan = DpSgdPlan(sampler="truncated-poisson", truncated_batch_size=900, **PUBLISHED)
    found = published_epsilon(plan, ADD_OR_REMOVE).guarantee
    assert found == pytest.approx(1.51537, rel=2e-5)


def test_published_epsilon_of_poisson_under_replace_one():
    plan = DpSgdPlan(sampler="poisson", **PUBLISHED)
    found = published_epsilon(plan, REPLACE).guarantee
    assert 2.477 < found < 2.4785
    group = profiles.group_epsilon(plan, noise_multiplier=1.1, delta=1e-5, group_size=2)
    assert group == pytest.approx(3.420, abs=1e-3)


def test_poisson_under_replace_one_is_what_dp_accounting_composes(small_plan):
    """Both members of the pair cut into cells, which dp_accounting composes."""
    edges = np.concatenate(([-np.inf], np.linspace(-6, 6, 1201), [np.inf]))
    masses = {mean: np.diff(special.ndtr(edges - mean)) for mean in (-1, 0, 1)}
    one, other = (0.99 * masses[0] + 0.01 * masses[mean] for mean in (-1, 1))
    # Losses are rounded up, or down, by 1e-5 in each of 200 steps.
    low, high = composed((one, other), 200, 1e-5, interval=1e-5)
    plan = small_plan("poisson")
    ours = accountant.epsilon(plan, noise_multiplier=1.0, delta=1e-5, **REPLACE)
    assert low * 0.9999 <= ours.guarantee <= high
    assert high <= 1.003 * low


@pytest.mark.parametrize("noise", [0.5, 3.0])
@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_opposite_gradients_are_the_worst_to_replace(rate, noise):
    """Any two gradients of the unit disc, at any factor of the hockey stick."""
    axis = np.linspace(-1 - 7 * noise, 1 + 7 * noise, 141)
    cell = (axis[1] - axis[0]) ** 2

    def member(x, y):
        along = [np.exp(-(((axis - at) / noise) ** 2) / 2) for at in (x, y)]
        moved = np.multiply.outer(*along)
        still = np.exp(-((axis / noise) ** 2) / 2)
        density = rate * moved + (1 - rate) * np.multiply.outer(still, still)
        return density * cell / (2 * math.pi * noise**2)

    first = member(1.0, 0.0)
    others = [(-1, 0), (-0.5, 0), (0, 0), (0.7, 0), (0, 1), (-0.6, 0.8), (-0.3, -0.4)]
    for factor in (0.3, 1.0, 1.3, 3.0):
        worst, *rest = [
            np.maximum(first - factor * member(*other), 0.0).sum() for other in others
        ]
        assert max(rest) <= worst + 1e-6


def test_deterministic_batches_under_replace_one_have_half_the_noise(small_plan):
    plan = small_plan("deterministic")
    half = accountant.epsilon(plan, noise_multiplier=0.5, delta=1e-5)
    found = accountant.epsilon(plan, noise_multiplier=1.0, delta=1e-5, **REPLACE)
    assert found == half


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("noise", [0.0, 0.004, 0.3, 1.0])
@pytest.mark.parametrize(("sampler", "size"), [("poisson", 3), ("poisson", 100)])
def test_bounds_under_replace_one_enclose(sampler, size, noise, epsilon):
    plan = make_plan(sampler, 100, size, 3)
    answer = delta_bounds(plan, noise_multiplier=noise, epsilon=epsilon, **REPLACE)
    assert 0.0 <= answer.lower <= answer.guarantee <= 1.0
    # Subsampling does not hurt, nor does it to hide the steps of the example.
    assert answer.guarantee <= dominating_pairs.gaussian_delta(
        noise / 2 / math.sqrt(3), epsilon
    )
    assert answer.guarantee <= (1 - (1 - size / 100) ** 3) * (1 + 1e-12)
    if noise == 1.0 and answer.guarantee > 1e-15:
        assert answer.guarantee <= 1.001 * answer.lower
