"""dp_accounting's own epsilon beside ours, for every sampler that it can judge."""

import dataclasses
import math
import pathlib
import re
from importlib import metadata

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import special

from accounting import accountant, events, statement
from accounting.model_mix.theorem import Mixing
from accounting.plan import DpSgdPlan
from accounting.validation import InputError

ROOT = pathlib.Path(__file__).parents[2]
#: Relative; both accountants round privacy losses up, by 1e-4 at the most.
CLOSE = 1e-3
#: From dp_accounting 0.6 on.
TRUNCATED_EVENT = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")


def checked(plan, noise_multiplier=1.0, delta=1e-5):
    ours = accountant.epsilon(plan, noise_multiplier=noise_multiplier, delta=delta)
    return events.cross_check(
        plan,
        noise_multiplier=noise_multiplier,
        delta=delta,
        ours=ours.guarantee,
    )


def test_poisson_is_a_composed_poisson_event(small_plan):
    event = events.dp_event(small_plan("poisson"), noise_multiplier=1.5)
    step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.5))
    assert event == dp_accounting.SelfComposedDpEvent(step, 200)


def test_the_sampling_probability_of_an_event_is_rounded_up(small_plan):
    plan = small_plan("poisson", num_examples=30_001, expected_batch_size=7)
    event = events.dp_event(plan, noise_multiplier=1.5)
    assert event.event.sampling_probability >= plan.sampling_probability


def test_deterministic_batches_are_a_gaussian_event_of_every_epoch(small_plan):
    event = events.dp_event(small_plan("deterministic"), noise_multiplier=1.5)
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(1.5), 2
    )


@pytest.mark.parametrize("noise", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("sampler", ["deterministic", "poisson", "truncated-poisson"])
def test_our_epsilon_is_that_of_dp_accounting(small_plan, sampler, noise):
    cap = 200 if sampler == "truncated-poisson" else None
    found = checked(small_plan(sampler, truncated_batch_size=cap), noise)
    assert found.ours == pytest.approx(found.epsilon, rel=CLOSE)
    assert found.difference == found.ours - found.epsilon
    assert found.accountant == f"dp-accounting {metadata.version('dp-accounting')}"


def test_a_large_epsilon_is_checked_on_a_grid_that_fits(small_plan):
    # Of 1e-4, the grid would have millions of points, and take a minute.
    found = checked(small_plan("poisson", num_steps=10_000, num_epochs=1), 0.1)
    assert found.ours > 1000
    assert found.ours == pytest.approx(found.epsilon, rel=CLOSE)


def test_the_guarantee_of_a_repeated_shuffle_is_that_of_deterministic_batches(
    small_plan,
):
    """Which dp_accounting knows; of the shuffle itself it does not."""
    theirs = checked(small_plan("deterministic")).epsilon
    plan = small_plan("persistent-shuffle")
    ours = accountant.epsilon(plan, noise_multiplier=1.0, delta=1e-5)
    assert ours.guarantee == pytest.approx(theirs, rel=CLOSE)


@pytest.mark.parametrize("epochs", [1, 3])
def test_balls_and_bins_of_two_steps_is_that_of_dp_accounting(small_plan, epochs):
    """Both outputs of an epoch cut into cells, whose masses dp_accounting composes."""
    noise = 1.0
    edges = np.concatenate(([-np.inf], np.linspace(-7, 8, 301), [np.inf])) / noise
    ghost = np.diff(special.ndtr(edges))
    present = np.diff(special.ndtr(edges - 1 / noise))
    added = np.multiply.outer(ghost, ghost).ravel()
    removed = np.multiply.outer(present, ghost)
    removed = ((removed + removed.T) / 2).ravel()
    kept = (added > 0) & (removed > 0)
    pair = [dict(enumerate(np.log(masses[kept]))) for masses in (added, removed)]
    directions = [
        privacy_loss_distribution.from_two_probability_mass_functions(*members)
        for members in (pair, reversed(pair))
    ]
    theirs = max(
        loss.self_compose(epochs).get_epsilon_for_delta(1e-5) for loss in directions
    )
    plan = DpSgdPlan(
        sampler="balls-and-bins", num_examples=200, expected_batch_size=100,
        num_steps=2 * epochs, num_epochs=epochs,
    )  # fmt: skip
    ours = accountant.epsilon(plan, noise_multiplier=noise, delta=1e-5)
    assert ours.guarantee == pytest.approx(theirs, rel=CLOSE)


def test_a_small_cap_costs_dp_accountings_epsilon_as_well(small_plan):
    capped = small_plan("truncated-poisson", truncated_batch_size=170)
    poisson = checked(small_plan("poisson"))
    found = checked(capped)
    assert found.ours == pytest.approx(found.epsilon, rel=CLOSE)
    assert found.epsilon > poisson.epsilon


@pytest.mark.skipif(not TRUNCATED_EVENT, reason="dp_accounting has no such event")
def test_a_cap_that_costs_much_is_what_dp_accounting_says(small_plan):
    found = checked(small_plan("truncated-poisson", truncated_batch_size=110))
    assert found.ours == pytest.approx(found.epsilon, rel=CLOSE)


@pytest.mark.skipif(TRUNCATED_EVENT, reason="dp_accounting knows it")
def test_truncation_without_an_event_is_said_to_be_added(small_plan):
    plan = small_plan("truncated-poisson", truncated_batch_size=110)
    with pytest.raises(InputError, match=r"has an event for\. Install"):
        events.dp_event(plan, noise_multiplier=1.0)
    found = checked(plan)
    assert "Pr[Bin(n, q) > B]" in found.to_text()
    # The additive bound proves nothing here; ours is by another theorem.
    assert found.epsilon == math.inf
    assert found.to_json()["epsilon"] is found.difference is None


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        ("persistent-shuffle", "cross-check --sampler deterministic"),
        ("dynamic-shuffle", "no event for it. Omit"),
        ("balls-and-bins", "no event for it. Omit"),
    ],
)
def test_a_plan_without_an_event_is_refused_with_the_reason(
    small_plan, sampler, reason
):
    with pytest.raises(InputError, match=f"sampler='{sampler}'.*{reason}"):
        events.dp_event(small_plan(sampler), noise_multiplier=1.0)


def test_model_mix_is_refused_with_the_reason(small_plan):
    mixing = Mixing(l2_norm_clip=1.0, mix_width=0.5, linf_factor=1)
    with pytest.raises(InputError, match=r"of ModelMix.*no event for ModelMix"):
        events.check_plan(small_plan("poisson"), mixing)


def test_no_noise_is_an_infinite_epsilon_of_both(small_plan):
    found = checked(small_plan("deterministic"), noise_multiplier=0.0)
    assert found.epsilon == found.ours == math.inf
    assert found.difference is None


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


def test_a_statement_names_no_other_dp_accounting_than_the_tested(
    small_plan, monkeypatch
):
    monkeypatch.setattr(metadata, "version", lambda package: "9.9")
    said = statement.privacy_statement(
        small_plan("poisson"), noise_multiplier=1.0, delta=1e-5
    )
    assert "9.9" not in said.to_json()["reference_accountant"]


def test_answers_are_frozen(small_plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        checked(small_plan("deterministic")).epsilon = 0.0
