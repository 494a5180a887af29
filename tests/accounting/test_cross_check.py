"""Our epsilon beside that of dp_accounting, asked about the plan's ``DpEvent``."""

import pathlib
import re
from importlib import metadata

import dp_accounting
import pytest

from accounting import cross_check, statement
from accounting.claims.model_mix import Mixing
from accounting.core import accountant
from accounting.core.validation import InputError
from tests.sampler_fields import needed

#: Relative; both accountants round privacy losses up, by 1e-4 at the most.
CLOSE = 1e-3
#: From dp_accounting 0.6 on, which knows replace-one.
NEW = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
NEEDS_NEW = pytest.mark.skipif(not NEW, reason="dp_accounting has no such event")
ROOT = pathlib.Path(__file__).parents[2]
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
        ("truncated-poisson", 3.0, {}),
        ("cyclic-poisson", 2.0, {}),
        ("truncated-cyclic-poisson", 2.0, {}),
    ],
)
def test_our_epsilon_is_that_of_dp_accounting(small_plan, sampler, noise, asked):
    plan = small_plan(sampler, **needed(sampler, cap=200))
    ours, theirs = both(plan, noise, **asked)
    assert ours == pytest.approx(theirs, rel=CLOSE)


def test_a_small_cap_costs_epsilon(small_plan):
    """Seen to fail without the cost: their answer was that of Poisson batches."""
    plan = small_plan("truncated-poisson", truncated_batch_size=170)
    capped, plain = both(plan, 2.0), both(small_plan("poisson"), 2.0)
    assert plain[1] < capped[0] * (1 + CLOSE) <= capped[1] * (1 + 2 * CLOSE)
    found = cross_check.second_opinion(plan, noise_multiplier=2.0, delta=1e-5)
    assert "Pr[Bin(n, q) > B]" in found.event


def test_a_method_of_its_own_is_refused(small_plan):
    mixing = Mixing(l2_norm_clip=1.0, mix_width=0.5, linf_factor=1)
    with pytest.raises(InputError, match=r"of ModelMix.*no event for ModelMix"):
        cross_check.ask(small_plan("poisson"), 1.0, theorem=mixing)


def test_the_sampling_probability_of_an_event_is_rounded_up(small_plan):
    plan = small_plan("poisson", num_examples=30_001, expected_batch_size=7)
    event, _ = cross_check.ask(plan, noise_multiplier=1.5)
    assert event.event.sampling_probability >= plan.sampling_probability


@pytest.mark.parametrize(
    ("sampler", "unit"),
    [("dynamic-shuffle", {}), ("balls-and-bins", {}), ("poisson", USERS)],
)
def test_a_plan_without_an_event_is_refused(small_plan, sampler, unit):
    with pytest.raises(InputError, match=f"sampler='{sampler}'.* has no event for it"):
        cross_check.ask(small_plan(sampler), noise_multiplier=1.0, **unit)


def test_a_statement_names_the_dp_accounting_that_these_tests_ran_against(small_plan):
    """Not whichever a user has: of that nobody knows whether it agrees."""
    said = statement.privacy_statement(
        small_plan("poisson"), noise_multiplier=1.0, delta=1e-5
    )
    named = re.findall(r"\d[.\d]+", said.to_json()["reference_accountant"])
    assert metadata.version("dp-accounting") in named
    locks = (ROOT / "deploy/lock").glob("py*.txt")
    text = "".join(lock.read_text() for lock in locks)
    pinned = re.findall(r"^dp-accounting==(\S+)", text, re.MULTILINE)
    assert set(pinned) == set(named)
