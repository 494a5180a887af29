"""Several runs that are declared together are one run of all their epochs."""

from __future__ import annotations

import dataclasses
import json
import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from accounting.claims.model_mix import Mixing
from accounting.core import accountant
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
)
from accounting.core.plan import DpSgdPlan, together
from accounting.core.pld.dominating_pairs import gaussian_epsilon
from accounting.core.validation import InputError
from accounting.statement import privacy_statement
from tests.command_line import invoke
from tests.sampler_fields import needed

RUNS, NOISE, DELTA = 4, 1.3, 1e-5
#: Of 3 epochs; with all of their runs, written out.
PLAN = {"num_examples": 400, "expected_batch_size": 20, "num_steps": 60}
OF_ALL = {**PLAN, "num_steps": 240, "num_epochs": 12}
USERS = {"neighboring_relation": ADD_OR_REMOVE_ONE, "max_examples_per_user": 3}
CASES = [
    ("poisson", {}),
    ("poisson", USERS),
    ("truncated-poisson", {}),
    ("truncated-poisson", USERS),
    ("deterministic", {"max_examples_per_user": 2}),
    ("balls-and-bins", {}),
    ("cyclic-poisson", {}),
]


def _plan(sampler: str, **fields: int) -> DpSgdPlan:
    own = needed(sampler, cap=40)
    return DpSgdPlan(sampler=sampler, **{**PLAN, "num_epochs": 3, **own, **fields})


@pytest.mark.parametrize(("sampler", "unit"), CASES)
def test_the_statement_is_that_of_one_run_of_all_steps_and_epochs(sampler, unit):
    plan, of_all = _plan(sampler), _plan(sampler, **OF_ALL)
    asked = {"noise_multiplier": NOISE, "delta": DELTA, **unit}
    found = privacy_statement(plan, of_runs=RUNS, **asked)
    whole, alone = (privacy_statement(each, **asked) for each in (of_all, plan))
    assert found.epsilon == whole.epsilon
    assert found.trade_off == whole.trade_off
    assert alone.epsilon.guarantee < found.epsilon.guarantee
    # It is about a run: what is executed is its own plan.
    assert found.plan == plan
    assert found.to_json()["of_runs"] == RUNS
    assert "one of at most 4 runs of this plan on this table" in found.claim
    assert " runs of this plan" not in alone.claim


def test_a_row_of_batches_by_epochs_is_used_once_in_each_epoch_of_each_run():
    plan = _plan("deterministic")
    found = privacy_statement(plan, noise_multiplier=NOISE, delta=DELTA, of_runs=RUNS)
    exact = gaussian_epsilon(NOISE / math.sqrt(3 * RUNS), DELTA)
    assert found.epsilon.guarantee == pytest.approx(exact, rel=1e-9)
    # Steps that make no whole epochs are one round, of all rows, in each run.
    odd = _plan("deterministic", num_steps=30, num_epochs=1)
    assert together(odd, 2) == _plan("deterministic", num_steps=60, num_epochs=2)


def test_epsilon_and_noise_are_those_of_dp_accounting():
    """Its own composition of the steps of each run, one run after another.

    Of Poisson batches both relations have one pair, which it knows by the second.
    """
    plan, num_runs = _plan("poisson"), 2

    def exact(noise):
        step = dp_accounting.PoissonSampledDpEvent(
            0.05, dp_accounting.GaussianDpEvent(noise)
        )
        found = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        for _ in range(num_runs):
            found.compose(dp_accounting.SelfComposedDpEvent(step, plan.num_steps))
        return found.get_epsilon(DELTA)

    asked = {"noise_multiplier": NOISE, "delta": DELTA, "of_runs": num_runs}
    found = privacy_statement(plan, **asked).epsilon.guarantee
    assert found == pytest.approx(exact(NOISE), rel=1e-3)
    noise = accountant.noise_multiplier(
        together(plan, num_runs), epsilon=2.0, delta=DELTA
    ).guarantee
    assert exact(noise) == pytest.approx(2.0, rel=1e-3)


def test_what_is_proven_of_one_run_or_clip_alone_is_refused():
    persistent = _plan("persistent-shuffle")
    assert together(persistent, 1) == persistent
    with pytest.raises(InputError, match="of_runs=2 to be 1 for sampler='persistent"):
        together(persistent, 2)
    once = dataclasses.replace(persistent, num_steps=20, num_epochs=1)
    with pytest.raises(InputError, match="of_runs=2 to be 1"):
        together(once, 2)  # whose plan of all would repeat one order
    mixing = Mixing(mix_width=0.1, l2_norm_clip=1.0)
    asked = {"noise_multiplier": NOISE, "delta": DELTA, "l2_norm_clip": 1.0}
    with pytest.raises(InputError, match="of_runs=2 to be 1 for ModelMix"):
        privacy_statement(_plan("poisson"), theorem=mixing, of_runs=2, **asked)
    with pytest.raises(InputError, match=r"l2_norm_clip=2\.0 to be that of ModelMix"):
        privacy_statement(
            _plan("poisson"), theorem=mixing, **{**asked, "l2_norm_clip": 2.0}
        )


# -- the command -----------------------------------------------------------------------

FLAGS = [
    "--num-examples=400", "--batch-size=20", "--epochs=3", f"--delta={DELTA}",
    "--noise-multiplier=1.3",
]  # fmt: skip


def _run(*arguments: str) -> str:
    return invoke(["plan", *FLAGS, *arguments]).stdout


def test_the_plan_of_several_runs_is_answered_for_all_of_them():
    found = json.loads(_run("--of-runs=4", "--json"))
    assert found["question"]["of_runs"] == RUNS
    answers = {each["sampler"]: each for each in found["answers"]}
    assert "persistent-shuffle" not in answers
    for sampler in ("deterministic", "poisson", "balls-and-bins"):
        exact = accountant.epsilon(
            _plan(sampler, **OF_ALL), noise_multiplier=NOISE, delta=DELTA
        )
        assert answers[sampler]["epsilon"] == exact.to_json()
        assert answers[sampler]["plan"] == _plan(sampler).to_json()
    assert "of 4 runs together" in _run("--of-runs=4", "--sampler=deterministic")
