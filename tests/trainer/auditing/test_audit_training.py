"""An audit of the whole trainer; ``test_audit_faults`` plants faults in it."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import numpy as np
import pytest

from accounting.auditing import audit
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from tests.trainer.auditing import (
    audit_model,
    audit_release,
    audit_run,
    audit_training,
    joint_tests,
)
from tests.trainer.auditing.audit_training import NUM_CANARIES, SmallRun
from trainer import models
from trainer.core.step import noise
from trainer.gradients import clipping

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("weights_alone", "warm_starts"),
]

CLIP, DELTA = 3.0, 1e-5
PLAN = DpSgdPlan(
    sampler="truncated-poisson",
    num_examples=NUM_CANARIES,
    expected_batch_size=NUM_CANARIES // 8,
    num_steps=8,
    truncated_batch_size=NUM_CANARIES // 4,
)
DENSE, LAZY, *FEW = audit_training.small_runs(PLAN, 1.0, CLIP)
#: Every other canary is real: their order says nothing to the sampler.
IS_REAL = np.arange(NUM_CANARIES) % 2 == 0


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Canaries and their batches, in a folder to which runs can be added."""
    folder = tmp_path_factory.mktemp("audit")
    audit_run.write_table(folder, LAZY, IS_REAL)
    audit_run.make_batches(folder, LAZY)
    return folder


@pytest.fixture
def folder(batches: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("batches", "held-out"):
        (tmp_path / name).symlink_to(batches / name)
    return tmp_path


def _drop_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        noise, "grid_normal", lambda *a, **_: np.zeros(a[3], dtype=np.int64)
    )
    monkeypatch.setattr(noise.LaterNoise, "_draw", lambda *a: np.zeros(a[-1]))


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
def test_what_is_released_is_noise_and_clipped_canaries(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    """Without noise a real canary adds one clip norm per step, a ghost nothing."""
    _drop_noise(monkeypatch)
    manifest = read_manifest(folder / "batches")
    canaries = audit_release.Canaries(is_real=IS_REAL)
    changes = list(audit_run._changes(folder, run, manifest))
    assert len(changes) == 8 // run.steps_per_release
    sums = np.stack([canaries.project(change) for change in changes])
    batches = audit_release.read_contents(folder / "batches")
    for release, found in enumerate(sums):
        times = np.zeros(NUM_CANARIES)
        for batch in batches:
            if batch.step // run.steps_per_release == release:
                times[batch.canaries - 1] += 1
        assert np.allclose(found, times * IS_REAL, atol=1e-3)
    # The squared length of all that was added is that of the canaries: no other
    # weight changed.
    squares = sum(
        np.sum(np.square(values, dtype=np.float64))
        for change in changes
        for values in change.values()
    )
    assert squares == pytest.approx(np.sum(sums**2), rel=1e-3)


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
def test_trials_alone_find_a_run_without_noise(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    """At an epsilon that claims nothing, trials bound epsilon without assumptions."""
    _drop_noise(monkeypatch)
    outcome = audit_run.examine(folder, run, IS_REAL)
    claim = audit.claim(outcome.plan, 1.0, DELTA)
    verdict = audit.judge(claim, outcome.real, outcome.ghost, confidence=0.999)
    assert verdict.violated
    assert verdict.findings[-1].epsilon_lower_bound > claim.epsilon


def test_weights_that_are_not_finite_are_refused() -> None:
    canaries = audit_release.Canaries(is_real=np.ones(3, bool))
    batch = audit_release.Contents(step=0, canaries=np.array([1]), padded=False)
    checks = audit_release.ReleaseChecks(
        canaries, [batch], noise=1.0, steps_per_release=1
    )
    change = {layer: np.full(40, np.nan) for layer in audit_model.LAYERS}
    with pytest.raises(InputError, match="finite weights in release 0"):
        checks.add(change)


def test_the_models_take_both_paths(folder: pathlib.Path) -> None:
    manifest = read_manifest(folder / "batches")
    paths = [
        clipping.choose_path(
            models.make_model(
                manifest,
                model=f"tests.trainer.auditing.audit_model:{run.model}",
                embedding_dim=1,
                hidden=(),
                loss=models.make_loss("tests.trainer.auditing.audit_model:linear"),
            )
        )
        for run in (DENSE, FEW[0])
    ]
    assert paths == [clipping.ONE_PASS, clipping.SINGLE_EXAMPLES]
    assert {run.model for run in (DENSE, LAZY)} == {"weights"}
    assert [run.model for run in FEW] == ["unproven_weights", "weights"]


def test_canaries_are_of_all_kinds() -> None:
    directions = audit_model.directions(NUM_CANARIES)
    assert np.allclose(np.sum(directions**2, 1), 1)
    largest = np.abs(directions).max(1)
    kinds = np.arange(1, NUM_CANARIES + 1) % audit_model.num_kinds()
    assert np.allclose(largest[kinds == 0], 0.5)
    for layer in range(len(audit_model.LAYERS)):
        assert np.all(np.abs(directions[kinds == layer + 1, layer]) > 0.98)
    # Of any two layers, half of the canaries of a kind have opposite signs.
    signs = np.sign(directions)
    assert np.all(np.abs(signs.T @ signs - NUM_CANARIES * np.eye(4)) < 100)


def test_labels_are_fair_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run from end to end; the coins within five standard deviations of half."""
    tables = []
    write = audit_run.write_table

    def written(folder: pathlib.Path, run: SmallRun, is_real: np.ndarray) -> None:
        tables.append(is_real)
        write(folder, run, is_real)

    monkeypatch.setattr(audit_run, "write_table", written)
    outcome = audit_training.carry_out(
        dataclasses.replace(LAZY, sampler="balls-and-bins")
    )
    (is_real,) = tables
    assert len(outcome.real) == np.sum(is_real)
    assert abs(len(outcome.real) - NUM_CANARIES / 2) < 5 * math.sqrt(NUM_CANARIES / 4)
    assert len(outcome.real) + len(outcome.ghost) == NUM_CANARIES
    assert outcome.plan.sampler == "balls-and-bins"
    assert outcome.slack == 0
    claim = audit.claim(outcome.plan, 1.0, DELTA)
    (evidence,) = audit_training.evidence([outcome])
    verdict = joint_tests.judge(claim, [evidence], confidence=1 - 1e-6)
    assert not verdict.violated, verdict.text


def test_small_runs_are_like_the_audited_one() -> None:
    plan = DpSgdPlan(
        sampler="poisson",
        num_examples=36_800_000,
        expected_batch_size=65_536,
        num_steps=562 * 3,
        num_epochs=3,
    )
    small = audit_training.small_runs(plan, 0.7, 2.0)
    assert {run.sampler for run in small} == {"poisson"}
    assert {run.noise_multiplier for run in small} == {0.7}
    assert {run.l2_norm_clip for run in small} == {2.0}
    assert {run.num_epochs for run in small} == {2}
    assert [run.name for run in small] == ["dense", "lazy", "dense, few", "lazy, few"]
    assert [run.steps_per_epoch for run in small] == [16, 16, 32, 32]
    assert [run.expected_batch_size for run in small] == [256, 256, 1, 1]
    assert [run.steps_per_release for run in small] == [1, 4, 1, 4]
    short = dataclasses.replace(
        plan, expected_batch_size=plan.num_examples, num_steps=3
    )
    dense, lazy, *_ = audit_training.small_runs(short, 0.7, 2.0)
    assert dense.steps_per_epoch == lazy.steps_per_release == 1
