"""Progress on a terminal and in a log."""

from __future__ import annotations

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
