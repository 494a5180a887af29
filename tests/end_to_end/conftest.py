"""Commands as a person types them, in this process."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from dpsgd import fit_stages
from tests.command_line import invoke


@pytest.fixture
def typed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """``typed(*arguments)``: what `dpsgd ARGUMENTS` prints; stages run here, too."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        done = invoke([*arguments], catch=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def stage(number: int, total: int, title: str, given: Any, **_: Any) -> None:
        call(*given)

    monkeypatch.setattr(fit_stages, "run_stage", stage)
    return call
