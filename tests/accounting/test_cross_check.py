"""Our epsilon beside that of dp_accounting, asked about the plan's ``DpEvent``."""

import dp_accounting
import pytest

from accounting import cross_check, lower_bounds
from accounting.claims.model_mix import Mixing
from accounting.core import accountant
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan

#: Relative; both accountants round privacy losses up, by 1e-4 at the most.
CLOSE = 1e-3
#: From dp_accounting 0.6 on.
NEW = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
NEEDS_NEW = pytest.mark.skipif(not NEW, reason="dp_accounting has no such event")
REPLACE = {"neighboring_relation": "REPLACE_ONE"}
USERS = {"max_examples_per_user": 2}


def both(plan, noise, delta=1e-5, **asked):
    """Returns our epsilon and theirs."""
    question = {"noise_multiplier": noise, "delta": delta, **asked}
    ours = accountant.epsilon(plan, **question).guarantee
    return ours, cross_check.second_opinion(plan, **question).epsilon


@pytest.mark.parametrize(
    ("sampler", "noise", "asked"),
    [
        ("deterministic", 1.0, {}),
        ("deterministic", 2.0, REPLACE),
        ("deterministic", 2.0, USERS),
        ("poisson", 2.0, {}),
        ("poisson", 0.6, {}),
        pytest.param("poisson", 2.0, REPLACE, marks=NEEDS_NEW),
        pytest.param("poisson", 2.0, USERS, marks=[NEEDS_NEW, pytest.mark.thorough]),
        ("truncated-poisson", 3.0, {}),
    ],
)
def test_our_epsilon_is_that_of_dp_accounting(small_plan, sampler, noise, asked):
    cap = 200 if sampler == "truncated-poisson" else None
    ours, theirs = both(small_plan(sampler, truncated_batch_size=cap), noise, **asked)
    assert ours == pytest.approx(theirs, rel=CLOSE)


def test_a_small_cap_costs_dp_accountings_epsilon_as_well(small_plan):
    capped = both(small_plan("truncated-poisson", truncated_batch_size=170), 2.0)
    assert capped[0] == pytest.approx(capped[1], rel=CLOSE)
    assert capped[1] > both(small_plan("poisson"), 2.0)[1]


@NEEDS_NEW
def test_a_tight_cap_under_add_or_remove_is_no_error():
    """Ours holds for any number of examples up to n, dp_accounting's for n itself."""
    plan = make_plan("truncated-poisson", 70, 5, 31, cap=6)
    asked = {"neighboring_relation": "ADD_OR_REMOVE_ONE"}
    ours, theirs = both(plan, 2.126, **asked)
    question = {"noise_multiplier": 2.126, "delta": 1e-5, **asked}
    assert lower_bounds.epsilon(plan, **question).lower <= theirs < ours


def test_a_method_of_its_own_is_refused(small_plan):
    mixing = Mixing(l2_norm_clip=1.0, mix_width=0.5, linf_factor=1)
    with pytest.raises(InputError, match=r"of ModelMix.*no event for ModelMix"):
        cross_check.check_plan(small_plan("poisson"), mixing, "REPLACE_SPECIAL", 1)
