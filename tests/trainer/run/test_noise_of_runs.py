"""Noise is a function of key and run; runs that share a key share no noise."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from pipelines.files.key_files import create_key_file
from tests.trainer.run.whole_runs import (
    LINEAR,
    ONE_ID,
    SMALL,
    private_settings,
    same_results,
    weights_of,
)
from trainer.averaging import best_iterate
from trainer.core.step.dp_step import Step
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")


def test_zero_noise_and_a_clip_that_never_bites_equal_the_run_without_privacy(
    request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_iterate, "ONE_IN", 2**40)  # no row is left out
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


def test_runs_share_noise_only_if_key_id_and_settings_are_the_same(
    request_for: Any, tmp_path: pathlib.Path, drawn: list[bytes]
) -> None:
    """Common noise would cancel in the difference of two released models."""
    create_key_file(tmp_path / "other.key")
    one: dict[str, Any] = {"run_id": ONE_ID}  # as if two runs had drawn one id
    for name, changes, more in (
        ("first", one, {}),
        ("again", one, {}),
        ("another key", {**one, "noise_key_file": tmp_path / "other.key"}, {}),
        ("another rate", one, {"learning_rate": 0.01}),
        ("another id", {}, {}),
    ):
        settings = private_settings(optimizer="sgd", model=LINEAR, **more)
        train(request_for(name, held_out=None, settings=settings, **changes))
    assert same_results(tmp_path / "first", tmp_path / "again")
    assert not same_results(tmp_path / "first", tmp_path / "another key")
    num_variables = 2
    found = np.array(drawn, object).reshape(5, 10 * num_variables)
    assert np.array_equal(found[0], found[1])
    assert len({*found[1:].ravel()}) == found[1:].size
