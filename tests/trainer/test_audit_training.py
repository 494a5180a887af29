"""The whole trainer under audit, and faults that are planted in it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from accounting import audit
from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from pipelines.manifest import read_manifest
from trainer import audit_mechanism, audit_training, dp_step, methods, noise
from trainer.audit_training import NUM_CANARIES, SmallRun

CLIP, DELTA = 3.0, 1e-5
DENSE, LAZY = "dense", "lazy"
RUN = SmallRun(
    sampler="truncated-poisson",
    steps_per_epoch=8,
    num_epochs=1,
    noise_multiplier=1.0,
    l2_norm_clip=CLIP,
)
#: Every other canary is real: their order says nothing to the sampler.
IS_REAL = np.arange(NUM_CANARIES) % 2 == 0


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Canaries and their batches, in a folder that runs can be added to."""
    folder = tmp_path_factory.mktemp("audit")
    audit_training._write_table(folder, IS_REAL * 10 * CLIP)
    audit_training._make_batches(folder, RUN)
    return folder


@pytest.fixture
def folder(batches: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("batches", "held-out"):
        (tmp_path / name).symlink_to(batches / name)
    return tmp_path


def _released(folder: pathlib.Path, embedding_noise: str = DENSE) -> np.ndarray:
    run = dataclasses.replace(RUN, embedding_noise=embedding_noise)
    return audit_training._train(folder, run, read_manifest(folder / "batches"))


def _verdict(
    folder: pathlib.Path, embedding_noise: str = DENSE, *, confidence: float = 0.999
) -> audit.Verdict:
    plan = read_manifest(folder / "batches").plan
    scores = audit_training._score(_released(folder, embedding_noise), RUN, plan)
    claim = audit.claim(plan, RUN.noise_multiplier, DELTA)
    return audit.judge(claim, scores[IS_REAL], scores[~IS_REAL], confidence=confidence)


@pytest.mark.parametrize("embedding_noise", [DENSE, LAZY])
def test_an_honest_run_is_consistent(
    folder: pathlib.Path, embedding_noise: str
) -> None:
    """Violated with probability 1e-6 at most."""
    verdict = _verdict(folder, embedding_noise, confidence=1 - 1e-6)
    assert not verdict.violated, verdict.text
    assert verdict.trials == NUM_CANARIES


def test_what_is_released_is_noise_and_clipped_canaries(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise a real canary adds one clip norm per step, a ghost nothing."""
    monkeypatch.setattr(noise, "normal", _no_noise)
    weights = _released(folder)
    plan = read_manifest(folder / "batches").plan
    steps = np.diff(np.concatenate([np.zeros((1, NUM_CANARIES)), weights]), axis=0)
    sums = steps * plan.expected_batch_size / CLIP
    assert np.allclose(sums, np.round(sums), atol=1e-3)
    assert set(np.unique(np.round(sums[:, IS_REAL]))) == {0.0, 1.0}
    assert not np.any(sums[:, ~IS_REAL])
    # Half of the canaries are real; five standard deviations of a binomial number.
    expected = plan.expected_batch_size * plan.num_steps / 2
    assert abs(sums.sum() - expected) < 5 * math.sqrt(expected)


def _no_noise(
    key: bytes, step: int, variable: int, shape: Any, place: Any = (), *, stddev: float
) -> np.ndarray:
    del key, step, variable, place, stddev
    return np.zeros(shape, np.float32)


def test_a_step_without_noise_is_found(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of eight steps gives away who is in it to whoever looks at that step."""
    drawn = noise.normal

    def drawn_but_at_step_5(key: bytes, step: int, *rest: Any, **more: Any) -> Any:
        return (_no_noise if step == 5 else drawn)(key, step, *rest, **more)

    def score_of_step_5(plan: Any, noise: Any, observe: Any, **_: Any) -> np.ndarray:
        del plan, noise
        return observe(5)

    monkeypatch.setattr(noise, "normal", drawn_but_at_step_5)
    monkeypatch.setattr(audit_mechanism, "score", score_of_step_5)
    assert _verdict(folder).violated


@pytest.mark.parametrize("embedding_noise", [DENSE, LAZY])
def test_a_run_without_noise_is_found(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, embedding_noise: str
) -> None:
    monkeypatch.setattr(noise, "normal", _no_noise)
    verdict = _verdict(folder, embedding_noise)
    assert verdict.findings[-1].epsilon_lower_bound > verdict.claim.epsilon


@pytest.mark.parametrize("embedding_noise", [DENSE, LAZY])
def test_half_the_noise_is_found(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, embedding_noise: str
) -> None:
    drawn = noise.normal

    def half(*arguments: Any, stddev: float) -> np.ndarray:
        return drawn(*arguments, stddev=stddev / 2)

    monkeypatch.setattr(noise, "normal", half)
    assert _verdict(folder, embedding_noise).violated


def test_a_clip_that_is_skipped_is_found(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = methods.gradient_sum
    monkeypatch.setattr(
        methods,
        "gradient_sum",
        lambda model, settings: honest(model, settings, l2_norm_clip=math.inf),
    )
    assert _verdict(folder).violated


def test_batches_that_are_added_twice_are_found(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = dp_step.Step.add

    def twice(step: Any, columns: Any, weight: Any) -> None:
        add(step, columns, weight)
        add(step, columns, weight)

    monkeypatch.setattr(dp_step.Step, "add", twice)
    assert _verdict(folder).violated


def test_labels_are_fair_coins_and_keys_are_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run from end to end; the coins within five standard deviations of half."""
    tables = []
    write = audit_training._write_table

    def written(folder: pathlib.Path, labels: np.ndarray) -> None:
        tables.append(labels)
        write(folder, labels)

    monkeypatch.setattr(audit_training, "_write_table", written)
    trials = audit_training.carry_out(
        dataclasses.replace(RUN, sampler="balls-and-bins")
    )
    (labels,) = tables
    assert set(labels) == {0.0, 10 * CLIP}
    assert len(trials.real) == np.sum(labels > 0)
    assert abs(len(trials.real) - NUM_CANARIES / 2) < 5 * math.sqrt(NUM_CANARIES / 4)
    assert len(trials.real) + len(trials.ghost) == NUM_CANARIES
    assert trials.plan.sampler == "balls-and-bins"
    assert trials.slack == 0
    claim = audit.claim(trials.plan, 1.0, DELTA)
    verdict = audit.judge(claim, trials.real, trials.ghost, confidence=1 - 1e-6)
    assert not verdict.violated, verdict.text


def test_a_small_run_is_like_the_audited_one() -> None:
    plan = DpSgdPlan(
        sampler="poisson",
        num_examples=36_800_000,
        expected_batch_size=65_536,
        num_steps=562 * 3,
        num_epochs=3,
    )
    small = audit_training.small_run(plan, 0.7, 2.0)
    assert (small.sampler, small.noise_multiplier, small.l2_norm_clip) == (
        "poisson", 0.7, 2.0,
    )  # fmt: skip
    assert (small.steps_per_epoch, small.num_epochs, small.expected_batch_size) == (
        32,
        2,
        128,
    )
    short = dataclasses.replace(
        plan, expected_batch_size=plan.num_examples, num_steps=3
    )
    assert audit_training.small_run(short, 0.7, 2.0).steps_per_epoch == 1


def test_a_job_that_fails_says_why_in_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError, match="Expected Parquet files") as raised:
        audit_training._make_batches(tmp_path, RUN)
    assert "\n" not in str(raised.value)
