"""The statement says what is claimed, by which theorem, and what is not covered."""

import dataclasses
import functools
import json
import math

import pytest

from accounting import statement
from accounting.claims.model_mix.theorem import Mixing
from accounting.core import accountant, intervals
from accounting.core import claim as claims
from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.validation import InputError
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


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_text_names_everything_a_reviewer_asks_for(small_plan, sampler):
    text = make(small_plan, sampler).to_text()
    rate = "q=1/50" if "cyclic" in sampler else "q=1/100"
    for words in ("1e-05", "zero-out", rate, "T=200", "n=10,000", "dpsgd"):
        assert words in text
    for item in statement.NOT_COVERED:
        assert item in text


def test_steps_that_make_no_whole_epochs_are_never_called_one(small_plan):
    said = make(small_plan, "poisson")
    assert "T=200 in 2 epochs, q=1/100" in said.to_text()
    odd = dataclasses.replace(said.plan, num_steps=250, num_epochs=1)
    text = dataclasses.replace(said, plan=odd).to_text()
    assert "T=250 in 2.5 epochs, q=1/100" in text


def test_a_printed_epsilon_is_rounded_up(small_plan):
    said = make(small_plan)
    printed = float(said.claim.split("(")[1].split(",")[0])
    assert printed >= said.epsilon.guarantee
    assert printed == pytest.approx(said.epsilon.guarantee, abs=1.1e-4)


def test_shuffles_say_what_is_proven_and_what_cannot_be(small_plan):
    exact = accountant.epsilon(
        small_plan("deterministic"), noise_multiplier=2.0, delta=1e-5
    ).guarantee
    fresh, repeated = (
        make(small_plan, sampler, noise_multiplier=2.0)
        for sampler in ("dynamic-shuffle", "persistent-shuffle")
    )
    assert fresh.epsilon.guarantee < 0.9 * exact
    assert fresh.epsilon.guarantee < repeated.epsilon.guarantee < exact
    for said in (fresh, repeated):
        assert "null clones" in said.epsilon.method
        assert "no proof can go below" in said.claim


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


def test_no_noise_is_no_claim(small_plan):
    said = make(small_plan, "deterministic", noise_multiplier=0.0)
    assert said.claim.startswith("No guarantee is claimed")
    assert said.to_json()["epsilon"] is None


def test_what_was_proven_is_printed_with_all_its_digits(small_plan):
    delta, noise = 1.23456789e-5, 1.0123456789012
    said = make(small_plan, delta=delta, noise_multiplier=noise)
    assert f", {delta!r})-differentially private" in said.claim
    assert f"multiplier {noise!r}," in said.to_text()
    for upper in (None, math.inf):
        unproven = intervals.Bounds(upper=upper, lower=1.0, method="a lower bound")
        claim = dataclasses.replace(said, epsilon=unproven).claim
        assert claim.endswith(f" {delta!r}.")


@pytest.mark.parametrize("stated", [None, 0.5, 2.0])
def test_the_clip_norm_that_is_stated_is_the_one_of_the_mixing(small_plan, stated):
    mixing = Mixing(mix_width=0.2, l2_norm_clip=1.0)
    with pytest.raises(InputError, match=f"l2_norm_clip={stated!r} .* 1.0"):
        make(small_plan, "poisson", l2_norm_clip=stated, theorem=mixing)
    assert make(small_plan, "poisson", theorem=mixing).l2_norm_clip == 1.0


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
