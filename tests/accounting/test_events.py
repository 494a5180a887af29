"""The events of dp_accounting that describe a plan, or why there is none."""

import pathlib
import re
from importlib import metadata

import dp_accounting
import pytest

from accounting import cross_check, statement
from accounting.core.validation import InputError

ROOT = pathlib.Path(__file__).parents[2]
#: From dp_accounting 0.6 on: truncated events, users, and replace-one.
NEW = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")


def test_the_sampling_probability_of_an_event_is_rounded_up(small_plan):
    plan = small_plan("poisson", num_examples=30_001, expected_batch_size=7)
    event = cross_check.ask(plan, noise_multiplier=1.5).event
    assert event.event.sampling_probability >= plan.sampling_probability


@pytest.mark.skipif(not NEW, reason="dp_accounting has no such event")
def test_a_user_is_a_mixture_of_gaussians(small_plan):
    found = cross_check.ask(
        small_plan("poisson"), noise_multiplier=1.5, max_examples_per_user=2
    )
    assert found.event.event.sensitivities == (0.0, 1.0, 2.0)
    assert found.event.event.sampling_probs == pytest.approx((0.9801, 0.0198, 1e-4))


@pytest.mark.skipif(not NEW, reason="dp_accounting has no such event")
def test_replace_one_is_asked_under_replace_one(small_plan):
    found = cross_check.ask(
        small_plan("poisson"), noise_multiplier=1.5, neighboring_relation="REPLACE_ONE"
    )
    assert found.relation == "REPLACE_ONE"


@pytest.mark.skipif(NEW, reason="dp_accounting knows them")
@pytest.mark.parametrize(
    "asked", [{"neighboring_relation": "REPLACE_ONE"}, {"max_examples_per_user": 2}]
)
def test_what_the_installed_dp_accounting_lacks_is_refused(small_plan, asked):
    with pytest.raises(InputError, match=r"Install dp-accounting==0\.6\.0"):
        cross_check.ask(small_plan("poisson"), noise_multiplier=1.0, **asked)


@pytest.mark.skipif(NEW, reason="dp_accounting knows it")
def test_truncation_without_an_event_is_added(small_plan):
    plan = small_plan("truncated-poisson", truncated_batch_size=110)
    found = cross_check.ask(plan, noise_multiplier=1.0)
    assert "Pr[Bin(n, q) > B]" in found.text


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        ("persistent-shuffle", "no event for it. Omit"),
        ("dynamic-shuffle", "no event for it. Omit"),
        ("balls-and-bins", "no event for it. Omit"),
    ],
)
def test_a_plan_without_an_event_is_refused_with_the_reason(
    small_plan, sampler, reason
):
    with pytest.raises(InputError, match=f"sampler='{sampler}'.*{reason}"):
        cross_check.ask(small_plan(sampler), noise_multiplier=1.0)


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
