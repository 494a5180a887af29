"""Others' epsilon beside ours: what agrees, and what is called an error of ours."""

import dataclasses
import json
import math
from importlib import metadata

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import special

from accounting.claims.model_mix.theorem import Mixing
from accounting.core import accountant
from accounting.core.intervals import Bounds
from accounting.core.validation import InputError
from accounting.lower_bounds import poisson_batches
from tests.accounting.cross_check import check, simulation
from tests.accounting.plans import make_plan

pytestmark = pytest.mark.usefixtures("answers_once")

#: Relative; both accountants round privacy losses up, by 1e-4 at the most.
CLOSE = 1e-3
#: From dp_accounting 0.6 on.
NEW = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
NEEDS_NEW = pytest.mark.skipif(not NEW, reason="dp_accounting has no such event")
REPLACE = {"neighboring_relation": "REPLACE_ONE"}
USERS = {"max_examples_per_user": 2}


def checked(plan, noise_multiplier=1.0, delta=1e-5, wrong=1.0, **asked):
    """The cross-check of our epsilon, times ``wrong``."""
    ours = accountant.epsilon(
        plan, noise_multiplier=noise_multiplier, delta=delta, **asked
    )
    lower = ours.lower and ours.lower * wrong
    return check.cross_check(
        plan,
        noise_multiplier=noise_multiplier,
        delta=delta,
        ours=dataclasses.replace(ours, upper=ours.guarantee * wrong, lower=lower),
        **asked,
    )


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    monkeypatch.setattr(simulation, "_NUM_VALUES", 2_000_000)


@pytest.mark.parametrize(
    ("sampler", "noise"),
    [
        ("deterministic", 1.0),
        ("poisson", 2.0),
        ("truncated-poisson", 3.0),
        pytest.param("poisson", 0.6, marks=pytest.mark.thorough),
        pytest.param("truncated-poisson", 0.6, marks=pytest.mark.thorough),
    ],
)
def test_our_epsilon_is_that_of_dp_accounting(small_plan, sampler, noise):
    cap = 200 if sampler == "truncated-poisson" else None
    found = checked(small_plan(sampler, truncated_batch_size=cap), noise)
    assert found.disagreements == ()
    exact = found.opinions[0]
    assert exact.ours.guarantee == pytest.approx(exact.value, rel=CLOSE)
    version = metadata.version("dp-accounting")
    assert exact.source == f"dp-accounting {version}, loss distribution"
    if sampler != "truncated-poisson":
        assert exact.high - exact.low < 0.01 * exact.value
        # An upper bound that is looser, and says nothing from below.
        renyi = found.opinions[1]
        assert exact.value < renyi.value == renyi.high
        assert renyi.low == 0


@pytest.mark.parametrize(
    ("sampler", "asked"),
    [
        ("deterministic", REPLACE),
        ("deterministic", USERS),
        pytest.param("poisson", REPLACE, marks=NEEDS_NEW),
        pytest.param("poisson", USERS, marks=[NEEDS_NEW, pytest.mark.thorough]),
    ],
)
def test_other_relations_and_users_are_those_of_dp_accounting(
    small_plan, sampler, asked
):
    found = checked(small_plan(sampler), noise_multiplier=2.0, **asked)
    assert found.disagreements == ()
    assert found.opinions[0].ours.guarantee == pytest.approx(
        found.opinions[0].value, rel=CLOSE
    )


@pytest.mark.parametrize(
    ("sampler", "wrong", "text"),
    [
        ("poisson", 0.99, "our epsilon is too small"),
        ("deterministic", 0.99, "our epsilon is too small"),
        # Of a claim at an epsilon that is too small, delta is.
        ("balls-and-bins", 0.95, "our delta is too small"),
        # Its lower bound is as wrong, and above what the other proves.
        ("deterministic", 1.01, "our lower bound on epsilon is too large"),
    ],
)
def test_a_contradiction_beyond_the_error_is_an_error_of_ours(
    small_plan, sampler, wrong, text
):
    found = checked(small_plan(sampler), noise_multiplier=2.0, wrong=wrong)
    assert text in found.disagreements
    assert "ERROR of ours" in found.to_text()
    assert found.to_json()["agrees"] is False


@pytest.mark.parametrize(
    ("sampler", "wrong", "quantity"),
    [("poisson", 1.01, "epsilon"), ("balls-and-bins", 1.05, "delta")],
)
def test_a_bound_that_is_only_looser_is_a_note_and_no_error(
    small_plan, sampler, wrong, quantity
):
    plan = small_plan(sampler)
    sound = checked(plan, noise_multiplier=2.0).opinions[0]
    assert sound.looser is None
    found = checked(plan, noise_multiplier=2.0, wrong=wrong)
    assert found.disagreements == ()
    assert "ERROR" not in found.to_text()
    text = found.opinions[0].looser
    assert text.startswith(f"our {quantity} is ")
    assert text.endswith(" % larger: valid, and looser than theirs")
    assert text in found.to_text()
    assert found.to_json()["agrees"] is True
    assert found.to_json()["opinions"][0]["looser"] == text


@NEEDS_NEW
@pytest.mark.parametrize(
    ("size", "batch", "steps", "cap", "noise", "delta"),
    [
        (70, 5, 31, 5, 2.126, 2e-8),
        (70, 5, 31, 6, 2.126, 1e-5),
        (20, 1, 28, 1, 5.324, 9.4e-6),
    ],
)
def test_a_tight_cap_under_add_or_remove_is_no_error(
    size, batch, steps, cap, noise, delta
):
    """Ours holds for any number of examples up to n, dp_accounting's for n itself."""
    plan = make_plan("truncated-poisson", size, batch, steps, cap=cap)
    asked = {"neighboring_relation": "ADD_OR_REMOVE_ONE"}
    found = checked(plan, noise, delta, **asked)
    assert found.disagreements == ()
    [opinion] = found.opinions
    assert opinion.looser is not None
    lower = poisson_batches.epsilon(
        plan, noise_multiplier=noise, delta=delta, **asked
    ).lower
    assert lower <= opinion.value < opinion.ours.guarantee


def test_a_lower_bound_that_is_too_large_is_an_error_of_ours(small_plan):
    plan = small_plan("deterministic")
    ours = accountant.epsilon(plan, noise_multiplier=1.0, delta=1e-5)
    wrong = dataclasses.replace(ours, lower=1.01 * ours.guarantee)
    found = check.cross_check(plan, noise_multiplier=1.0, delta=1e-5, ours=wrong)
    assert "our lower bound on epsilon is too large" in found.disagreements


def test_a_large_epsilon_is_checked_on_a_grid_that_fits(small_plan):
    # Of 1e-4, the grid would have millions of points, and take a minute.
    found = checked(small_plan("poisson", num_steps=1_000, num_epochs=1), 0.2)
    assert 100 < found.opinions[0].ours.guarantee < 600
    assert found.opinions[0].low > 100
    assert found.disagreements == ()


def test_a_library_whose_numbers_overflow_says_nothing():
    """Of the closed form 799.786, dp_accounting says 800.7 on every grid."""
    plan = make_plan("deterministic", 6000, 361, 187, epochs=11)
    found = checked(plan, 3.512829577251744 / 36, delta=2.6400772593109056e-11)
    assert found.opinions[0].ours.guarantee == pytest.approx(799.786, rel=1e-6)
    assert found.disagreements == ()
    assert "overflow" in found.to_text()


@pytest.mark.parametrize(("noise", "delta"), [(1.1, 1e-5), (0.7, 1e-12)])
def test_balls_and_bins_are_simulated_at_any_delta(small_plan, noise, delta):
    plan = small_plan("balls-and-bins", num_steps=60, num_epochs=3)
    found = checked(plan, noise, delta)
    assert found.disagreements == ()
    [opinion] = found.opinions
    assert opinion.quantity == "delta"
    assert opinion.low <= delta * (1 + 1e-9) <= opinion.high * 1.03
    assert opinion.high - opinion.low < 0.2 * delta
    assert f"seed {simulation.SEED}" in found.to_text()
    json.dumps(found.to_json(), allow_nan=False)


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
    plan = make_plan("balls-and-bins", 200, 100, 2 * epochs, epochs=epochs)
    ours = accountant.epsilon(plan, noise_multiplier=noise, delta=1e-5)
    assert ours.guarantee == pytest.approx(theirs, rel=CLOSE)


def test_a_small_cap_costs_dp_accountings_epsilon_as_well(small_plan):
    capped = small_plan("truncated-poisson", truncated_batch_size=170)
    untruncated = checked(small_plan("poisson"), 2.0).opinions[0]
    found = checked(capped, 2.0).opinions[0]
    assert found.ours.guarantee == pytest.approx(found.value, rel=CLOSE)
    assert found.value > untruncated.value


@NEEDS_NEW
def test_a_cap_that_costs_much_costs_less_than_dp_accounting_says(small_plan):
    """It counts a ghost that displaces another as an example: see `truncated_users`."""
    found = checked(small_plan("truncated-poisson", truncated_batch_size=110), 2.0)
    [opinion] = found.opinions
    assert found.disagreements == ()
    assert opinion.ours.guarantee < opinion.value


@pytest.mark.skipif(NEW, reason="dp_accounting knows it")
def test_a_cap_that_dp_accounting_cannot_judge_says_nothing(small_plan):
    found = checked(small_plan("truncated-poisson", truncated_batch_size=110), 2.0)
    [opinion] = found.opinions
    # The additive bound proves nothing here; ours is by another theorem.
    assert opinion.value == math.inf
    assert opinion.to_json()["value"] is None
    assert opinion.disagreement is None


def test_a_plan_that_nobody_else_can_judge_is_refused(small_plan):
    check.check_plan(small_plan("balls-and-bins"))
    many = small_plan("dynamic-shuffle", num_steps=10_000)
    check.check_plan(dataclasses.replace(many, sampler="persistent-shuffle"))
    many = dataclasses.replace(many, num_steps=50_001, num_epochs=1)
    with pytest.raises(InputError, match=r"of 50,001 shuffled steps.*Omit"):
        check.check_plan(many)
    mixing = Mixing(l2_norm_clip=1.0, mix_width=0.5, linf_factor=1)
    with pytest.raises(InputError, match=r"of ModelMix.*no event for ModelMix"):
        check.check_plan(small_plan("poisson"), mixing)


@pytest.mark.parametrize("sampler", ["deterministic", "balls-and-bins"])
def test_no_noise_is_an_infinite_epsilon_of_both(small_plan, sampler):
    found = checked(small_plan(sampler), noise_multiplier=0.0)
    assert found.disagreements == ()
    json.dumps(found.to_json(), allow_nan=False)
    # A finite epsilon without noise is an error.
    if sampler == "deterministic":
        wrong = Bounds(upper=1.0, method="none")
        found = check.cross_check(
            small_plan(sampler), noise_multiplier=0.0, delta=1e-5, ours=wrong
        )
        assert "our epsilon is too small" in found.disagreements
