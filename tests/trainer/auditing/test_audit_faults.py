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

from accounting.auditing import audit
from accounting.core.claim import AUTO_CLIP
from pipelines.batches.folder import read_manifest
from tests.trainer.auditing import audit_release, audit_run
from tests.trainer.auditing.audit_run import (
    CLIP,
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
from tests.trainer.auditing.residuals import contradicted
from trainer.claims.lazy_noise import LazyNoise
from trainer.core.step import dp_step, noise, per_example
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import tf
from trainer.gradients.engine.backward_pass import BackwardPass
from trainer.gradients.engine.gradient_parts import TableRows

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("lean_results", "warm_starts"),
]

DELTA = 1e-5
#: What a kind's checks may err by: six statements share the confidence of 99.9 %.
_ERROR = 1e-3 / 6
_SEEN = 1e-9

Examine = Callable[[SmallRun], Outcome]
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
    return lambda run: audit_run.examine(folder_of(run), run)


def _contradicted(outcome: Outcome) -> set[str]:
    """Returns the refuted checks, after excluding that luck refuted them."""
    below = {c.name for c in outcome.checks if c.p_value < _ERROR / len(outcome.checks)}
    sure = {c.name for c in outcome.checks if c.p_value < _SEEN}
    return sure & below


LAYERS = "noise of each layer in each release"
SLICES = "noise of each range of a table"
READ = "noise of rows that are read"
SHARED = "noise shared by layers or releases"
BETWEEN_PARTS = "noise shared by batches of a step"
WITHIN = "noise repeated within a table"
BATCHES = "excess that each batch adds"
CONTRIBUTIONS = "excess of canaries in each layer"
PADDING = "excess that padding adds"
LARGEST = "largest value of noise"


def test_the_trainer_without_a_fault_is_consistent(examine: Examine) -> None:
    """All kinds together; violated with probability at most 1e-6."""
    error = 1e-6 / (len(RUNS) + 2)
    for outcome in map(examine, RUNS):
        assert len(outcome.checks) == 10
        assert not contradicted(outcome.checks, error)
        if outcome.run.num_canaries == MANY:
            claim = audit.claim(outcome.plan, NOISE, DELTA)
            verdict = audit.judge(
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


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
def test_trials_alone_find_a_run_without_noise(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    """At an epsilon that claims nothing, trials bound epsilon without assumptions."""
    _drop_noise(monkeypatch)
    outcome = examine(run)
    claim = audit.claim(outcome.plan, NOISE, DELTA)
    verdict = audit.judge(claim, outcome.real, outcome.ghost, confidence=0.999)
    assert verdict.violated
    assert verdict.findings[-1].epsilon_lower_bound > claim.epsilon


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
@pytest.mark.parametrize("factor", [1, 2])
def test_a_sum_beyond_an_automatic_clip_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun, factor: float
) -> None:
    """And without the fault nothing is contradicted, but with probability 1e-9."""
    honest = per_example.clip_scale
    monkeypatch.setattr(
        per_example,
        "clip_scale",
        lambda norms, kept, clip: honest(norms, kept, factor * clip),
    )
    found = examine(dataclasses.replace(run, l2_norm_clip=AUTO_CLIP, num_steps=16))
    assert (CONTRIBUTIONS in _contradicted(found)) == (factor > 1)
    assert bool(_contradicted(found)) == (factor > 1)


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
def test_half_the_noise_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    of_step, of_rows = noise.grid_normal, noise.LaterNoise._draw
    monkeypatch.setattr(noise, "grid_normal", lambda *a, **b: of_step(*a, **b) // 2)
    monkeypatch.setattr(noise.LaterNoise, "_draw", lambda *a: of_rows(*a) / 2)
    assert {LAYERS, SLICES, READ} <= _contradicted(examine(run))


def test_half_the_noise_of_a_step_of_several_batches_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the eight has one batch with probability below 1e-30.

    Of `DENSE` every second step has, and one audit in 256 none of several.
    """
    several = dataclasses.replace(
        DENSE, physical_batch_size=DENSE.expected_batch_size // 2
    )
    start = dp_step._DenseTotal.start
    monkeypatch.setattr(
        dp_step._DenseTotal, "start", lambda total, values: start(total, values // 2)
    )
    assert {LAYERS, READ} <= _contradicted(examine(several))


def test_less_noise_of_rows_that_are_read_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = noise.LaterNoise.of_read
    monkeypatch.setattr(
        noise.LaterNoise, "of_read", lambda *arguments: drawn(*arguments) / 2
    )
    assert READ in _contradicted(examine(LAZY))


def test_embeddings_that_are_left_out_of_the_norm_are_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    squared_norm = TableRows.squared_norm
    monkeypatch.setattr(
        TableRows, "squared_norm", lambda part: tf.zeros_like(squared_norm(part))
    )
    assert {BATCHES, CONTRIBUTIONS} <= _contradicted(examine(DENSE))


def test_a_clip_of_each_layer_by_itself_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_sum = BackwardPass.scaled_sum

    def of_each_layer(found: Any, scale: Any, cap: Any) -> list[Any]:
        sums, kept = [], scale > 0
        for piece, part in zip(found.pieces, found.parts, strict=True):
            one = dataclasses.replace(found, pieces=[piece], parts=[part])
            _, scale = per_example.clip_scale(one.norms(), kept, CLIP)
            sums.append(map(tf.convert_to_tensor, scaled_sum(one, scale, cap)))
        return [tf.add_n(values) for values in zip(*sums, strict=True)]

    monkeypatch.setattr(BackwardPass, "scaled_sum", of_each_layer)
    assert {BATCHES, CONTRIBUTIONS} <= _contradicted(examine(DENSE))


@pytest.mark.parametrize("run", [DENSE, DENSE_FEW], ids=["one pass", "one by one"])
def test_no_clip_is_seen_on_each_path(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    honest = per_example.clip_scale
    monkeypatch.setattr(
        per_example,
        "clip_scale",
        lambda norms, real, clip: honest(norms, real, math.inf),
    )
    assert BATCHES in _contradicted(examine(run))


def test_one_batch_of_the_run_that_is_used_twice_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = Step.add, []

    def twice(step: Step, *batch: Any) -> None:
        calls.append(1)
        for _ in range(1 + (len(calls) == 1)):
            add(step, *batch)

    monkeypatch.setattr(Step, "add", twice)
    assert BATCHES in _contradicted(examine(DENSE))


@pytest.mark.parametrize("run", [DENSE, LAZY], ids=["dense", "lazy"])
def test_a_padding_weight_that_is_ignored_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
    add = Step.add
    monkeypatch.setattr(
        Step,
        "add",
        lambda step, columns, weight: add(step, columns, tf.ones_like(weight)),
    )
    assert {PADDING, LARGEST} <= _contradicted(examine(run))


def test_rows_that_are_read_without_the_noise_of_one_step_are_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = LazyNoise.complete_reads

    def too_far(lazy: Any, *arguments: Any) -> None:
        complete(lazy, *arguments)
        for reached, rows in zip(lazy._reached, lazy._just_read, strict=True):
            reached[rows] = lazy._total + 1  # what a step of rate 1 adds

    monkeypatch.setattr(LazyNoise, "complete_reads", too_far)
    assert READ in _contradicted(examine(LAZY))


def test_a_step_that_lazy_noise_does_not_count_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = LazyNoise.count_step
    calls = itertools.count(1)

    def without_the_second(lazy: LazyNoise, rate: Any) -> None:
        before = lazy._total
        count(lazy, rate)
        if next(calls) == 2:
            lazy._total = before

    monkeypatch.setattr(LazyNoise, "count_step", without_the_second)
    assert {LAYERS, SLICES} <= _contradicted(examine(LAZY))


@pytest.mark.parametrize("run", [DENSE_FEW, LAZY_FEW], ids=["dense", "lazy"])
def test_no_noise_in_an_empty_step_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, run: SmallRun
) -> None:
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
        monkeypatch.setattr(Step, name, value)
    assert LAYERS in _contradicted(examine(run))


def test_a_flush_that_forgets_its_last_chunk_is_seen(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = LazyNoise._chunks

    def without_last(lazy: LazyNoise) -> Iterator[Any]:
        found = list(chunks(lazy))
        assert len(found) > 1
        return iter(found[:-1])

    monkeypatch.setattr(LazyNoise, "_chunks", without_last)
    assert SLICES in _contradicted(examine(LAZY))


@pytest.mark.parametrize(
    ("run", "change", "check"),
    [
        (DENSE, {"step": 0}, SHARED),
        (LAZY, {"step": 0}, SHARED),
        (DENSE, {"variable": 0}, SHARED),
        (LAZY, {"variable": 0}, SHARED),
        (LAZY, {"block": 0}, WITHIN),
    ],
    ids=["step", "lazy-step", "variable", "lazy-variable", "block"],
)
def test_noise_that_is_drawn_twice_is_seen(
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    run: SmallRun,
    change: dict[str, int],
    check: str,
) -> None:
    """The same noise for every step, for every layer, or for all blocks."""
    labels = {
        "grid-noise": ["step", "variable", "block"],
        "lazy-noise": ["step", "place", "variable", "block"],
    }
    derive = noise.derive

    def changed(key: bytes, label: str, *values: Any) -> bytes:
        named = dict(zip(labels.get(label, ()), values, strict=False))
        return derive(key, label, *(named | change).values() if named else values)

    monkeypatch.setattr(noise, "derive", changed)
    assert check in _contradicted(examine(run))
