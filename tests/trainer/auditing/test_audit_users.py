"""Canaries that are users, whose rows are bounded, batched and trained on."""

from __future__ import annotations

import collections
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from accounting.auditing import audit
from accounting.core import accountant
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.users.bounded import ROW_WEIGHTS, ROWS, USERS, Bounded
from pipelines.tables import bounding
from tests.trainer.auditing import audit_release, audit_run, audit_training, joint_tests
from tests.trainer.auditing.audit_model import CANARY
from tests.trainer.auditing.audit_training import NUM_CANARIES, SmallRun
from tests.trainer.auditing.joint_tests import JointVerdict
from trainer.auditing import settings_of_run
from trainer.run import privacy

pytestmark = pytest.mark.usefixtures("weights_alone", "warm_starts")

CLIP, NOISE, DELTA, MOST = 3.0, 1.0, 1e-5, 3
PLAN = DpSgdPlan(
    sampler="poisson",
    num_examples=NUM_CANARIES,
    expected_batch_size=NUM_CANARIES // 8,
    num_steps=8,
)


def runs(sampled: str, rows: int = MOST) -> list[SmallRun]:
    return audit_training.small_runs(PLAN, NOISE, CLIP, sampled, rows)


def test_small_runs_have_the_rows_of_a_user() -> None:
    dense = runs(ROWS)[0]
    assert (dense.raw_rows, dense.canary_rows) == (30, 3)
    assert dense.num_examples == 30 * NUM_CANARIES
    assert dense.expected_batch_size * dense.steps_per_epoch == dense.num_examples
    of_records = runs(USERS)[0]
    assert (of_records.canary_rows, of_records.num_examples) == (1, NUM_CANARIES)


def note_of(sampled: str) -> Bounded:
    return Bounded(
        user_column="u", max_examples_per_user=4, num_examples=99, sampled=sampled
    )


@pytest.mark.parametrize("sampled", [ROWS, USERS])
def test_a_run_about_users_is_audited_with_users(
    settings_of: Any, sampled: str
) -> None:
    note = note_of(sampled)
    found = settings_of(PLAN, note)
    assert found.is_of_users
    assert found.num_canary_rows == (4 if sampled == ROWS else 1)
    if sampled == USERS:
        with pytest.raises(InputError, match="canary_rows=10 does not apply"):
            settings_of(PLAN, note, canary_rows=10)
    assert not settings_of(PLAN).is_of_users


def test_the_best_of_several_runs_is_refused() -> None:
    """Seen to fail: the audited claim was the epsilon of one run, which is smaller."""
    selection = {"num_runs": 4, "shape": 1.0}
    record: Any = SimpleNamespace(method="dp-sgd", selection=selection)
    with pytest.raises(InputError, match="the best of several"):
        settings_of_run(record, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("sampled", [ROWS, USERS])
def test_the_audited_relation_is_that_of_the_statement(
    settings_of: Any, sampled: str
) -> None:
    """Empty slots are never drawn, so that bounds with ghosts do not hold."""
    note = note_of(sampled)
    capped = DpSgdPlan(
        sampler="truncated-poisson",
        num_examples=99,
        expected_batch_size=9,
        num_steps=11,
        truncated_batch_size=9,
    )
    assert privacy.relation_of(capped, note) == ADD_OR_REMOVE_ONE
    found = settings_of(capped, note)
    assert found.neighboring_relation == ADD_OR_REMOVE_ONE
    count = note.examples_per_user
    claim = audit.claim(capped, NOISE, DELTA, count, found.neighboring_relation)
    stated = accountant.epsilon(
        capped,
        noise_multiplier=NOISE,
        delta=DELTA,
        neighboring_relation=ADD_OR_REMOVE_ONE,
        max_examples_per_user=count,
    )
    assert claim.epsilon == stated.guarantee


def test_bound_leaves_so_many_rows_of_a_canary(tmp_path: pathlib.Path) -> None:
    for sampled in (ROWS, USERS):
        folder, run = tmp_path / sampled, runs(sampled)[2]
        folder.mkdir()
        audit_run.write_table(folder, run, np.ones(run.num_canaries, bool))
        raw = pq.read_table(folder / "data")[CANARY].to_numpy()
        assert set(raw) == set(range(1, run.num_canaries + 1))
        audit_run.bound_users(folder, run)
        found = pq.read_table(folder / "bounded")
        if sampled == ROWS:
            counts = collections.Counter(found[CANARY].to_pylist())
            assert set(counts.values()) == {MOST}
        else:
            rows = np.array(found[ROW_WEIGHTS].to_pylist()).sum(1)
            assert sorted(set(rows)) == [1, 2, 3]
        assert len(counts if sampled == ROWS else found) == run.num_canaries


def test_rows_of_a_canary_are_compared_once_in_a_step() -> None:
    batches = [np.array([5, 3, 5, 9]), np.array([3, 1, 1, 9, 2])]
    found = audit_release._each_once(batches)
    assert [list(each) for each in found] == [[5, 3, 9], [1, 2]]


def judged(run: SmallRun, confidence: float) -> JointVerdict:
    outcome = audit_training.carry_out(run)
    count = run.rows_per_user if run.sampled == ROWS else 1
    claim = audit.claim(outcome.plan, NOISE, DELTA, count)
    return joint_tests.judge(
        claim, audit_training.evidence([outcome]), confidence=confidence
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("sampled", [ROWS, USERS])
def test_users_that_are_bounded_are_consistent(sampled: str, kind: int) -> None:
    """Dense and lazy noise; violated with probability at most 1e-6."""
    verdict = judged(runs(sampled)[kind], 1 - 1e-6)
    assert not verdict.violated, verdict.text
    assert verdict.trials == NUM_CANARIES


@pytest.mark.thorough
def test_a_bound_that_keeps_everything_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim is for one row per user; all ten rows of a canary are kept."""

    def everything(rows: str, most: int) -> str:
        del most
        return f"select place, true as is_first from {rows}"

    monkeypatch.setattr(bounding, "least_rows", everything)
    verdict = judged(runs(ROWS, 1)[0], 0.999)
    assert verdict.closest.violated, verdict.text
    assert verdict.closest.findings[-1].epsilon_lower_bound > verdict.claim.epsilon
