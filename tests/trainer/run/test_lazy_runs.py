"""Whole runs with lazy noise: released weights are complete, kills change nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelines.files.processes import StoppedError
from tests.trainer.conftest import make_rows
from tests.trainer.run.whole_runs import private_settings, same_results
from trainer import train as module
from trainer.claims.lazy_noise import LazyNoise
from trainer.core.run.checkpoints import Checkpoints
from trainer.core.step import noise
from trainer.core.step.dp_step import Step
from trainer.model.evaluation import Evaluator
from trainer.report.progress import Silent
from trainer.run.iterates import Iterates
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results", "one_secret")


def _settings(**changes: Any) -> TrainSettings:
    fields = {
        "optimizer": "sgd", "learning_rate": 0.5, "embedding_noise": "lazy",
        "eval_every": 7, "keep_last": 2, "keep_every": 5,
    }  # fmt: skip
    return private_settings(**{**fields, **changes})


@pytest.fixture
def batches(small_batches: Any, batch_folder: Callable[..., Any]) -> Any:
    """Ten steps, each of three physical batches or more."""
    return batch_folder(
        small_batches.steps, "parts", physical_batch_size=6, truncated_batch_size=None
    )


@pytest.fixture
def request_for(request_for: Any, batches: Any) -> Any:
    def make(name: str = "run", **changes: Any) -> Request:
        fields = {"settings": _settings(), "batches": batches.path}
        fields |= {"checkpoint_every": 4, **changes}
        found: Request = request_for(name, **fields)
        return found

    return make


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Numbers of rows without noise whenever something could read the weights."""
    found: dict[str, list[int]] = {}
    made: list[LazyNoise] = []

    def watch(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            result = original(*args, **more) if what == "step" else None
            found.setdefault(what, []).append(made[0].num_pending)
            return result if what == "step" else original(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    create = LazyNoise.__init__

    def remember(self: LazyNoise, *args: Any, **more: Any) -> None:
        create(self, *args, **more)
        made.append(self)

    monkeypatch.setattr(LazyNoise, "__init__", remember)
    watch(Step, "finish", "step")
    watch(Checkpoints, "commit", "checkpoint")
    watch(Evaluator, "metrics", "evaluation")
    watch(Iterates, "keep", "kept iterate")
    watch(module, "export", "export")
    return found


def test_batches_without_padding_may_have_any_number_of_rows(
    request_for: Any, batch_folder: Any, pending: Any
) -> None:
    """Seen to fail: a step of 6 rows computes 10 more, whose ids no row had."""
    steps = [make_rows(6, seed) for seed in (1, 2)]
    steps[0]["categories"][0] = 0
    steps[1]["categories"] = 1
    made = batch_folder(steps, "full", physical_batch_size=6, truncated_batch_size=None)
    settings = _settings(keep_last=None, keep_every=None)
    train(request_for(batches=made.path, settings=settings))
    assert pending["export"] == [0]
    assert pending["step"][0] > 0


def test_nothing_that_leaves_lacks_noise_and_no_noise_is_used_twice(
    request_for: Any, pending: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Also of a run that is stopped, and goes on to the same results."""
    drawn: list[bytes] = []
    generator = noise._generator

    def spy(key: bytes) -> np.random.Generator:
        drawn.append(key)
        return generator(key)

    with monkeypatch.context() as patch:
        patch.setattr(noise, "_generator", spy)
        train(request_for("whole"))
    # Steps 0, 4, 5, 7, 8 and 10; 0, 7, 10 and the results of kept iterates; 5 and 10.
    assert pending["checkpoint"] == [0] * 6
    assert set(pending["evaluation"]) == {0}
    assert pending["kept iterate"] == [0] * 2
    assert pending["export"] == [0]
    assert len(pending["step"]) == 10
    # Else this test could not fail.
    assert min(pending["step"]) > 0
    # 10 steps of 4 variables and of the rows of a table, and 4 flushes of it.
    assert len(drawn) >= 10 * 5 + 4
    assert len(set(drawn)) == len(drawn)

    class StopAtSix(Silent):
        def advance(self, done: int) -> None:
            if done == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    pending.clear()
    request = request_for("stopped")
    with pytest.raises(StoppedError, match="step 7 of 10"):
        train(request, StopAtSix())
    assert set(pending["checkpoint"]) == {0}
    train(request)
    assert same_results(tmp_path / "whole", tmp_path / "stopped")
