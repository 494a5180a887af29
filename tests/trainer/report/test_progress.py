"""Progress on a terminal and in a log."""

from __future__ import annotations

import math

import pytest

from pipelines.files import progress_bars
from trainer.report import progress


def test_a_log_gets_lines_with_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bars, "_LINE_SECONDS", 0.0)
    with progress.Terminal() as reporter:
        reporter.say("training [3] models")
        reporter.start(4, done=2)
        for done in (3, 4):
            reporter.advance(done)
        reporter.stop()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training [3] models"
    assert lines[1].startswith("training: step 3 of 4, ")
    assert "steps/s" in lines[1]
    assert lines[-1].endswith("0 s left")


def test_a_log_is_not_flooded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bars, "_LINE_SECONDS", math.inf)
    with progress.Terminal() as reporter:
        reporter.start(1000, done=0)
        for done in range(1, 1001):
            reporter.advance(done)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_second_run_is_followed_like_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bars, "_LINE_SECONDS", math.inf)
    with progress.Terminal() as reporter:
        for _ in range(2):
            reporter.start(2, done=0)
            reporter.advance(1)
            reporter.advance(2)
            reporter.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["training: step 2 of 2"] * 2


def test_the_speed_leaves_out_what_was_done_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.Terminal() as reporter:
        reporter.start(10**9, done=10**9)
        reporter.advance(10**9)
    assert "1,000,000,000, 0.0 steps/s" in capsys.readouterr().err
