"""Noise is a function of key and run; runs that share a key share no noise."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelines.files.key_files import create_key_file
from tests.trainer.run.whole_runs import (
    ONE_ID,
    SMALL,
    private_settings,
    same_results,
    weights_of,
)
from trainer.core.step.dp_step import Step
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")


def test_zero_noise_and_a_clip_that_never_bites_equal_the_run_without_privacy(
    request_for: Any,
) -> None:
    plain = TrainSettings(method="non-private", optimizer="sgd", **SMALL)
    free = private_settings(noise_multiplier=0.0, l2_norm_clip=1e2, optimizer="sgd")
    requests = [
        request_for("plain", settings=plain, held_out=None),
        request_for("free", settings=free, held_out=None),
    ]
    for request in requests:
        train(request)
    for left, right in zip(*(weights_of(r.run) for r in requests), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_steps_of_several_batches_give_the_run_of_one_batch(
    request_for: Any, small_batches: Any, batch_folder: Callable[..., Any]
) -> None:
    split = batch_folder(small_batches.steps, "split", physical_batch_size=3)
    settings = private_settings(
        noise_multiplier=0.0, optimizer="sgd", learning_rate=1.0
    )
    whole = request_for("whole", settings=settings, held_out=None)
    parts = request_for("parts", settings=settings, held_out=None, batches=split.path)
    for request in (whole, parts):
        train(request)
    for left, right in zip(weights_of(whole.run), weights_of(parts.run), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The noise of all variables in all steps, as it is drawn."""
    found: list[bytes] = []
    begin = Step.begin

    def spy(self: Step, noise: Any, later: Any) -> None:
        found.extend(values.tobytes() for values in noise)
        begin(self, noise, later)

    monkeypatch.setattr(Step, "begin", spy)
    return found


def test_same_key_same_run_other_key_other_noise(
    request_for: Any, tmp_path: pathlib.Path, drawn: list[bytes]
) -> None:
    create_key_file(tmp_path / "other.key")
    for name in ("first", "again"):
        train(request_for(name, run_id=ONE_ID))
    other_key = tmp_path / "other.key"
    train(request_for("other", run_id=ONE_ID, noise_key_file=other_key))
    assert same_results(tmp_path / "first", tmp_path / "again")
    assert not same_results(tmp_path / "first", tmp_path / "other")
    first, again, other = np.array_split(np.array(drawn, object), 3)
    assert np.array_equal(first, again)
    assert not {*first} & {*other}


def test_runs_that_share_a_key_share_no_noise(
    request_for: Any, drawn: list[bytes]
) -> None:
    # Common noise would cancel in the difference of two released models.
    clip, rate = (
        private_settings(l2_norm_clip=1.0001),
        private_settings(learning_rate=0.01),
    )
    # As if two runs had drawn one id; and the same request again is another run.
    for name, changes in (
        ("first", {"run_id": ONE_ID}),
        ("second", {"run_id": ONE_ID, "settings": clip}),
        ("third", {"run_id": ONE_ID, "settings": rate}),
        ("fourth", {}),
        ("fifth", {}),
    ):
        train(request_for(name, held_out=None, **changes))
    num_variables = 5
    assert len(drawn) == 5 * 10 * num_variables
    assert len(set(drawn)) == len(drawn)


def test_a_replayed_step_draws_the_same_noise(
    request_for: Any, crash: Any, drawn: list[bytes]
) -> None:
    request = request_for(held_out=None, checkpoint_every=100)
    crash(request, 4)
    train(request)
    crashed = 5 * 5  # variables in the steps that were begun
    assert drawn[:crashed] == drawn[crashed : 2 * crashed]
    assert len(set(drawn)) == 10 * 5
