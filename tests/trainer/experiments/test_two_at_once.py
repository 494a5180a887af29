"""Experiments: one process at a time writes their folder."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.core.files import locks
from trainer.cli.experiments import compare_body


def test_of_two_at_once_the_second_is_refused(tmp_path: pathlib.Path) -> None:
    class Settings:
        out = tmp_path / "new" / "out"

    def work(settings: Any) -> None:
        compare_body.run(settings, as_json=True)

    # Without a lock the experiment begins, finds no settings, and leaves nothing.
    with pytest.raises(AttributeError):
        work(Settings)
    assert list(tmp_path.iterdir()) == []
    Settings.out.mkdir(parents=True)
    with (
        locks.locked(Settings.out, "out"),
        pytest.raises(InputError, match="no other job to write"),
    ):
        work(Settings)
