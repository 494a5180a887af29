"""Refusals come before anything is written, or end the run."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.run.whole_runs import private_settings
from trainer.core.run.run_record import read_run
from trainer.report.progress import Silent
from trainer.run import privacy
from trainer.train import train


def test_nothing_is_written_where_a_request_is_refused(
    request_for: Any, tmp_path: pathlib.Path, small_batches: Any
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for changes, message in (
        ({"name": "full"}, "new or empty"),
        ({"batches": tmp_path / "full"}, r"manifest\.json"),
        ({"held_out": tmp_path / "full"}, "parquet"),
        ({"settings": private_settings(model="nothing:here")}, "nothing"),
        ({"settings": private_settings(keep_last=11)}, "keep_last=11"),
    ):
        with pytest.raises(InputError, match=message):
            train(request_for(**changes))
        assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_batches_that_change_during_the_run_end_it(
    request_for: Any, small_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(*_: object) -> None:
        path = small_batches.path / small_batches.manifest.files[2].name
        data = bytearray(path.read_bytes())
        data[-30] ^= 1
        path.write_bytes(data)

    reporter = Silent()
    monkeypatch.setattr(reporter, "start", lambda *_, **__: edit())
    request = request_for()
    with pytest.raises(InputError, match="changed"):
        train(request, reporter)
    record, manifest = read_run(request.run)
    assert not record.complete
    # Steps 0 to 7 were read; that step 7 was whole shows with the batch after it.
    assert record.num_steps_executed == 7
    assert not (request.run / "model.keras").exists()
    statement = privacy.run_statement(record, manifest, delta=1e-3)
    assert "after 7 of T=10 steps" in statement.to_text()
