"""Requests of small runs, and crashes of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.run.whole_runs import ONE_SECRET, Chain, Planted, private_settings
from trainer.core.run import session
from trainer.core.step.dp_step import Step
from trainer.run.preflight import Request
from trainer.train import train


@pytest.fixture
def request_for(small_batches: Any, held_out: Any, tmp_path: pathlib.Path) -> Any:
    def make(name: str = "run", **changes: Any) -> Any:
        fields = {
            "settings": private_settings(),
            "batches": small_batches.path,
            "held_out": held_out,
            "run": tmp_path / name,
        }
        return Request(**{**fields, **changes})

    return make


@pytest.fixture
def one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts have one secret, and so the same noise in the same step.

    Runs are then the same bit for bit if, and only if, they compute the same.
    """
    monkeypatch.setattr(session, "new_secret", lambda: ONE_SECRET)


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """The commits of the runs of a test."""
    return Chain(monkeypatch)


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``crash(request, step)`` runs until after the given number of steps."""

    def run(request: Request, step: int) -> None:
        count = 0
        finish = Step.finish

        def finish_or_crash(self: Step, settle: Any) -> Any:
            nonlocal count
            if count == step:
                raise Planted
            count += 1
            return finish(self, settle)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "finish", finish_or_crash)
            with pytest.raises(Planted):
                train(request)

    return run
