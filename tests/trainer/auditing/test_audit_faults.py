"""Faults planted in the trainer, each of which an audit must find.

Each is refuted at the confidence that ``dpsgd audit`` states by default, with the share
of the error that one kind of run has for its checks.  A check counts as one that sees a
fault if its p-value is also below ``_SEEN``: it saw the fault, and was not lucky.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting import audits
from accounting.core.claim import AUTO_CLIP
from pipelines.batches.folder import read_manifest
from tests.trainer.auditing import audit_release, audit_run
from tests.trainer.auditing.audit_run import (
    DENSE,
    DENSE_FEW,
    LAZY,
    LAZY_FEW,
    MANY,
    NOISE,
    RUNS,
    Outcome,
    SmallRun,
)
from trainer.claims.lazy_noise import LazyNoise
from trainer.core.step import clipping, noise
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import tf

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("lean_results", "warm_starts"),
]

DELTA = 1e-5
#: What a kind's checks may err by: six statements share the confidence of 99.9 %.
_ERROR = 1e-3 / 6
_SEEN = 1e-9

Examine = Callable[..., Outcome]
Folder = Callable[[SmallRun], pathlib.Path]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """``batches(run)``: its canaries and their batches, made once."""

    @functools.cache
    def made(run: SmallRun) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("audit")
        audit_run.write_batches(folder, run)
        return folder

    return lambda run: made(dataclasses.replace(run, embedding_noise="", model=""))


@pytest.fixture
def folder_of(batches: Folder, tmp_path: pathlib.Path) -> Folder:
    """``folder_of(run)``: a new folder with its batches."""

    def made(run: SmallRun) -> pathlib.Path:
        folder = tmp_path / run.name
        folder.mkdir()
        for name in ("batches", "held-out"):
            (folder / name).symlink_to(batches(run) / name)
        return folder

    return made


@pytest.fixture
def examine(folder_of: Folder) -> Examine:
    return lambda run, **more: audit_run.examine(folder_of(run), run, **more)


def _contradicted(outcome: Outcome) -> set[str]:
    """Returns the refuted checks, after excluding that luck refuted them."""
    below = {c.name for c in outcome.checks if c.p_value < _ERROR / len(outcome.checks)}
    sure = {c.name for c in outcome.checks if c.p_value < _SEEN}
    return sure & below


LAYERS = "noise of each layer in each release"
SLICES = "noise of each range of a table"
READ = "noise of rows that are read"
SHARED = "noise shared by layers or releases"
WITHIN = "noise repeated within a table"
BATCHES = "excess that each batch adds"
CONTRIBUTIONS = "excess of canaries in each layer"
PADDING = "excess that padding adds"


def test_the_trainer_without_a_fault_is_consistent(examine: Examine) -> None:
    """All kinds together; violated with probability at most 1e-6."""
    error = 1e-6 / (len(RUNS) + 2)
    for outcome in map(examine, RUNS):
        assert len(outcome.checks) == 8
        assert min(c.p_value for c in outcome.checks) >= error / 8
        if outcome.run.num_canaries == MANY:
            claim = audits.claim(outcome.plan, NOISE, DELTA)
            verdict = audits.judge(
                claim, outcome.real, outcome.ghost, confidence=1 - error
            )
            assert not verdict.violated, verdict.text


def _drop_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        noise, "grid_normal", lambda *a, **_: np.zeros(a[3], dtype=np.int64)
    )
    monkeypatch.setattr(noise.LaterNoise, "_draw", lambda *a: np.zeros(a[-1]))


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
def test_what_is_released_is_noise_and_clipped_canaries(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    """Without noise a real canary adds one clip norm per step, a ghost nothing."""
    _drop_noise(monkeypatch)
    folder = folder_of(run)
    canaries = audit_release.Canaries(is_real=run.is_real)
    manifest = read_manifest(folder / "batches")
    changes = list(audit_run.changes(folder, run, manifest))
    assert len(changes) == 8 // run.steps_per_release
    sums = np.stack([canaries.project(change) for change in changes])
    times = np.zeros(sums.shape)
    for batch in audit_release.read_contents(folder / "batches"):
        times[batch.step // run.steps_per_release][batch.canaries - 1] += 1
    np.testing.assert_allclose(sums, times * run.is_real, atol=1e-3)
    # The squared length of all that was added is that of the canaries: no other
    # weight changed.
    squares = sum(
        np.sum(np.square(values, dtype=np.float64))
        for change in changes
        for values in change.values()
    )
    assert squares == pytest.approx(np.sum(sums**2), rel=1e-3)


def test_trials_alone_find_a_run_without_noise(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an epsilon that claims nothing, trials bound epsilon without assumptions."""
    _drop_noise(monkeypatch)
    outcome = examine(DENSE)
    claim = audits.claim(outcome.plan, NOISE, DELTA)
    verdict = audits.judge(claim, outcome.real, outcome.ghost, confidence=0.999)
    assert verdict.violated
    assert verdict.findings[-1].epsilon_lower_bound > claim.epsilon


@pytest.mark.parametrize(("run", "factor"), [(DENSE, 1), (LAZY, 2)])
def test_a_sum_beyond_an_automatic_clip_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun, factor: float
) -> None:
    """And without the fault nothing is contradicted, but with probability 1e-9."""
    honest = clipping.clip_scale
    monkeypatch.setattr(
        clipping,
        "clip_scale",
        lambda norms, kept, clip: honest(norms, kept, factor * clip),
    )
    small = dataclasses.replace(run, l2_norm_clip=AUTO_CLIP, num_steps=16)
    found = examine(small, within=False)
    assert (CONTRIBUTIONS in _contradicted(found)) == (factor > 1)
    assert bool(_contradicted(found)) == (factor > 1)


Patch = pytest.MonkeyPatch


def _half_the_noise(patch: Patch) -> None:
    of_step, of_rows = noise.grid_normal, noise.LaterNoise._draw
    patch.setattr(noise, "grid_normal", lambda *a, **b: of_step(*a, **b) // 2)
    patch.setattr(noise.LaterNoise, "_draw", lambda *a: of_rows(*a) / 2)


def _less_noise_of_rows_that_are_read(patch: Patch) -> None:
    drawn = noise.LaterNoise.of_read
    patch.setattr(noise.LaterNoise, "of_read", lambda *given: drawn(*given) / 2)


def _no_clip(patch: Patch) -> None:
    honest = clipping.clip_scale
    patch.setattr(
        clipping, "clip_scale", lambda norms, real, clip: honest(norms, real, math.inf)
    )


def _a_batch_that_is_used_twice(patch: Patch) -> None:
    add, calls = Step.add, []

    def twice(step: Step, *batch: Any) -> None:
        calls.append(1)
        for _ in range(1 + (len(calls) == 1)):
            add(step, *batch)

    patch.setattr(Step, "add", twice)


def _padding_that_counts(patch: Patch) -> None:
    add = Step.add
    patch.setattr(
        Step,
        "add",
        lambda step, columns, weight: add(step, columns, tf.ones_like(weight)),
    )


def _rows_that_are_read_without_the_noise_of_a_step(patch: Patch) -> None:
    complete = LazyNoise.complete_reads

    def too_far(lazy: Any, *arguments: Any) -> None:
        complete(lazy, *arguments)
        for reached, rows in zip(lazy._reached, lazy._just_read, strict=True):
            reached[rows] = lazy._total + 1  # what a step of rate 1 adds

    patch.setattr(LazyNoise, "complete_reads", too_far)


def _a_step_that_lazy_noise_does_not_count(patch: Patch) -> None:
    count = LazyNoise.count_step
    calls = itertools.count(1)

    def without_the_second(lazy: LazyNoise, rate: Any) -> None:
        before = lazy._total
        count(lazy, rate)
        if next(calls) == 2:
            lazy._total = before

    patch.setattr(LazyNoise, "count_step", without_the_second)


def _no_noise_in_an_empty_step(patch: Patch) -> None:
    """No step of the 32 is empty with probability (1 - 0.36)^32, 1 in 10^6."""
    begin, add, finish = Step.begin, Step.add, Step.finish
    found: list[int] = []

    def begun(step: Step, *arguments: Any) -> None:
        found.clear()
        begin(step, *arguments)

    def added(step: Step, columns: Any, weight: Any) -> None:
        found.append(int(tf.math.count_nonzero(weight)))
        add(step, columns, weight)

    def finished(step: Step, *settle: Any) -> Any:
        return finish(step, *settle) if sum(found) else None

    for name, value in (("begin", begun), ("add", added), ("finish", finished)):
        patch.setattr(Step, name, value)


def _a_flush_without_its_last_chunk(patch: Patch) -> None:
    chunks = LazyNoise._chunks

    def without_last(lazy: LazyNoise) -> Iterator[Any]:
        found = list(chunks(lazy))
        assert len(found) > 1
        return iter(found[:-1])

    patch.setattr(LazyNoise, "_chunks", without_last)


def _one_noise_for_all(name: str) -> Callable[[Patch], None]:
    """The same noise for every step, for every layer ("variable"), or all blocks."""
    labels = {
        "grid-noise": ["step", "variable", "block"],
        "lazy-noise": ["step", "place", "variable", "block"],
    }

    def plant(patch: Patch) -> None:
        derive = noise.derive

        def changed(key: bytes, label: str, *values: Any) -> bytes:
            named = dict(zip(labels.get(label, ()), values, strict=False))
            given = (named | {name: 0}).values() if named else values
            return derive(key, label, *given)

        patch.setattr(noise, "derive", changed)

    return plant


#: Faults, the runs in which they are planted, and the checks that see them.
FAULTS: list[tuple[Callable[[Patch], None], list[SmallRun], set[str]]] = [
    (_half_the_noise, [LAZY], {LAYERS, SLICES, READ}),
    (_less_noise_of_rows_that_are_read, [LAZY], {READ}),
    (_no_clip, [DENSE, DENSE_FEW], {BATCHES}),  # in one pass, and one by one
    (_a_batch_that_is_used_twice, [DENSE], {BATCHES}),
    (_padding_that_counts, [DENSE, LAZY], {PADDING}),
    (_rows_that_are_read_without_the_noise_of_a_step, [LAZY], {READ}),
    (_a_step_that_lazy_noise_does_not_count, [LAZY], {LAYERS, SLICES}),
    (_no_noise_in_an_empty_step, [DENSE_FEW, LAZY_FEW], {LAYERS}),
    (_a_flush_without_its_last_chunk, [LAZY], {SLICES}),
    (_one_noise_for_all("step"), [DENSE, LAZY], {SHARED}),
    (_one_noise_for_all("variable"), [LAZY], {SHARED}),
    (_one_noise_for_all("block"), [LAZY], {WITHIN}),
]


@pytest.mark.parametrize(
    ("plant", "run", "checks"),
    [(plant, run, checks) for plant, runs, checks in FAULTS for run in runs],
)
def test_a_fault_is_seen(
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Patch], None],
    run: SmallRun,
    checks: set[str],
) -> None:
    plant(monkeypatch)
    assert checks <= _contradicted(examine(run, within=WITHIN in checks))
