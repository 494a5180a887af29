"""Neighbouring relations: the default, what is the same, and what is refused."""

import pytest

from accounting import accountant, neighboring_relation
from accounting.plan import SAMPLERS
from accounting.validation import InputError

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
    lambda plan, **relation: accountant.delta_by_direction(
        plan, noise_multiplier=1.0, epsilon=1.0, **relation
    ),
    lambda plan, **relation: accountant.epsilon_curve(
        plan, noise_multiplier=1.0, deltas=[1e-5], **relation
    ),
    lambda plan, **relation: accountant.delta_curve(
        plan, noise_multiplier=1.0, epsilons=[1.0], **relation
    ),
]


def make(small_plan, sampler):
    cap = 220 if sampler == "truncated-poisson" else None
    return small_plan(sampler, truncated_batch_size=cap)


@pytest.mark.parametrize("entry", ENTRIES)
def test_poisson_is_the_same_under_add_or_remove(small_plan, entry):
    plan = small_plan("poisson")
    default = entry(plan)
    assert entry(plan, neighboring_relation="REPLACE_SPECIAL") == default
    assert entry(plan, **ADD_OR_REMOVE) == default


def test_poisson_agrees_with_dp_accounting_under_add_or_remove(small_plan):
    import dp_accounting
    from dp_accounting.pld import pld_privacy_accountant

    plan = small_plan("poisson")
    found = accountant.epsilon(plan, noise_multiplier=1.0, delta=1e-5, **ADD_OR_REMOVE)
    theirs = pld_privacy_accountant.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(0.01, gaussian), 200)
    assert found.upper == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"poisson"}))
def test_add_or_remove_is_refused_with_a_reason(small_plan, sampler, entry):
    with pytest.raises(InputError, match=rf"ADD_OR_REMOVE_ONE.*{sampler}.*: .+\.$"):
        entry(make(small_plan, sampler), **ADD_OR_REMOVE)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_replace_one_is_refused_with_a_remedy(small_plan, sampler, entry):
    with pytest.raises(InputError, match="max_examples_per_user=2"):
        entry(make(small_plan, sampler), neighboring_relation="REPLACE_ONE")


def test_unknown_relations_are_named(small_plan):
    with pytest.raises(InputError, match="neighboring_relation='zero-out' to be one"):
        accountant.epsilon(
            small_plan("poisson"),
            noise_multiplier=1.0,
            delta=1e-5,
            neighboring_relation="zero-out",
        )


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_supported_is_what_is_not_refused(sampler):
    for relation in neighboring_relation.RELATIONS:
        if neighboring_relation.is_supported(sampler, relation):
            assert neighboring_relation.check_relation(sampler, relation) == relation
        else:
            with pytest.raises(InputError):
                neighboring_relation.check_relation(sampler, relation)
