"""Requests of small runs, and crashes of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from pipelines.files.key_files import create_key_file
from tests.trainer.run.whole_runs import Planted, private_settings
from trainer.core.step.dp_step import Step
from trainer.run.preflight import Request
from trainer.train import train


@pytest.fixture
def request_for(small_batches: Any, held_out: Any, tmp_path: pathlib.Path) -> Any:
    create_key_file(tmp_path / "noise.key")

    def make(name: str = "run", *, run_id: str | None = None, **changes: Any) -> Any:
        if run_id is not None:  # as if the run had been killed at once
            private = tmp_path / name / "private"
            private.mkdir(parents=True, exist_ok=True)
            (private / "run.id").write_text(run_id + "\n")
        fields = {
            "settings": private_settings(),
            "batches": small_batches.path,
            "held_out": held_out,
            "run": tmp_path / name,
            "noise_key_file": tmp_path / "noise.key",
        }
        return Request(**{**fields, **changes})

    return make


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``crash(request, step)`` runs until after the given number of steps."""

    def run(request: Request, step: int) -> None:
        count = 0
        finish = Step.finish

        def finish_or_crash(self: Step) -> None:
            nonlocal count
            if count == step:
                raise Planted
            count += 1
            finish(self)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "finish", finish_or_crash)
            with pytest.raises(Planted):
                train(request)

    return run
