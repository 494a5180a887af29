"""The statement says what is claimed, by which theorem, and what is not covered."""

import dataclasses
import functools
import json

import pytest

from accounting import statement
from accounting.core import claim as claims
from accounting.core import intervals
from accounting.core.plan import SAMPLERS, DpSgdPlan
from tests.accounting.plans import make_plan
from tests.sampler_fields import needed

pytestmark = pytest.mark.usefixtures("answers_once")


@functools.cache
def make(small_plan, sampler="truncated-poisson", **changes):
    plan = small_plan(sampler, **needed(sampler, cap=220))
    arguments = {"noise_multiplier": 1.0, "delta": 1e-5, "l2_norm_clip": 1.0}
    return statement.privacy_statement(plan, **{**arguments, **changes})


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_epsilon_never_travels_alone(small_plan, sampler):
    said = make(small_plan, sampler)
    fields = json.loads(json.dumps(said.to_json(), allow_nan=False))
    for name in [
        "claim", "epsilon", "delta", "bound", "theorem", "neighboring_relation",
        "mechanism", "sampling", "plan", "sampling_probability", "noise_multiplier",
        "l2_norm_clip", "accountant", "discretization", "pessimism", "not_covered",
    ]:  # fmt: skip
        assert fields[name], name
    assert fields["neighboring_relation"] == "REPLACE_SPECIAL"
    assert fields["sampling_probability"] == str(said.plan.sampling_probability)
    assert DpSgdPlan.from_json(fields["plan"]) == said.plan


def test_a_lower_bound_alone_is_no_claim(small_plan):
    only = intervals.Bounds(upper=None, lower=1.23456, method="a lower bound")
    said = statement.PrivacyStatement(
        plan=small_plan("poisson"),
        noise_multiplier=1.0,
        l2_norm_clip=None,
        delta=1e-5,
        epsilon=only,
    )
    assert not said.is_guarantee
    assert said.claim.startswith("No guarantee is claimed")
    assert "1.2345 " in said.claim
    assert said.to_json()["epsilon"] is None


@pytest.mark.parametrize(
    ("sampler", "claim"),
    [
        ("truncated-poisson", ()),
        ("dynamic-shuffle", (claims.NULL_CLONES,)),
        ("balls-and-bins", (claims.RANDOM_ALLOCATION,)),
    ],
)
def test_a_bound_by_a_theorem_outside_of_the_core_says_so(small_plan, sampler, claim):
    """Seen to fail without `Sampler.claims`."""
    said = make(small_plan, sampler)
    assert said.relies_on == claim
    text = said.to_text()
    assert text.count("relies on") == len(claim)
    for name in claim:
        assert f"relies on   the {name}: {claims.RELIANCES[name]}." in text


def test_batches_that_nothing_certified_are_relied_on(small_plan):
    said = make(small_plan)
    for certified, relied in (
        (None, ()),  # a plan without batches
        (True, ()),
        (False, (claims.BATCH_JOB,)),
    ):
        found = dataclasses.replace(said, batches_certified=certified)
        assert found.relies_on == relied
        assert found.to_text().count("relies on   the batch job") == len(relied)


def test_a_theorem_behind_the_attacks_alone_is_named():
    """The epsilon is by the revealed order; the rates at small epsilons by clones."""
    plan = make_plan("dynamic-shuffle", 400, 50, 8, epochs=1)
    said = statement.privacy_statement(plan, noise_multiplier=1.0, delta=1e-5)
    assert "null clones" not in said.epsilon.method
    assert any("null clones" in each for each in said.trade_off.methods)
    assert said.relies_on == (claims.NULL_CLONES,)
