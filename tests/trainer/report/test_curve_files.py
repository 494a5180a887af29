"""The curve as CSV and as TensorBoard's events."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from trainer.report.curve_files import write_csv, write_events
from trainer.run.preflight import Request, check
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import tf

POINTS = [
    {"step": 0, "auc": None, "log_loss": 0.75, "num_examples": 9},
    {"step": 5, "auc": 0.5, "log_loss": 0.5, "num_examples": 9},
]


def test_csv_has_a_line_per_point(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "curve.csv"
    write_csv(POINTS, path)
    assert path.read_text() == "step,auc,log_loss\n0,,0.75\n5,0.5,0.5\n"


def test_events_are_what_tensorboard_reads_and_are_written_once(
    tmp_path: pathlib.Path,
) -> None:
    for points in (POINTS[:1], POINTS):  # as a run that goes on
        write_events(points, tmp_path / "board")
    (path,) = (tmp_path / "board").iterdir()
    assert "tfevents" in path.name
    events = list(tf.compat.v1.train.summary_iterator(str(path)))
    assert events[0].file_version == "brain.Event:2"
    found = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    assert found == [
        (0, "held_out/log_loss", 0.75),
        (5, "held_out/auc", 0.5),
        (5, "held_out/log_loss", 0.5),
    ]


def test_files_of_another_run_and_in_the_run_are_refused(
    small_batches: Any, held_out: Any, tmp_path: pathlib.Path
) -> None:
    def request(**files: pathlib.Path) -> Request:
        return Request(
            settings=TrainSettings(noise_multiplier=1.0, l2_norm_clip=1.0),
            batches=small_batches.path, held_out=held_out, run=tmp_path / "run",
            **files,
        )  # fmt: skip

    check(request(csv=tmp_path / "c.csv", tensorboard=tmp_path / "board"))
    write_csv(POINTS, tmp_path / "c.csv")
    write_events(POINTS, tmp_path / "board")
    for files, message in (
        ({"csv": tmp_path / "c.csv"}, "--csv .* no other run"),
        ({"tensorboard": tmp_path / "board"}, "--tensorboard .* no other run"),
        ({"csv": tmp_path / "run" / "c.csv"}, "--csv .* outside of --out"),
    ):
        with pytest.raises(InputError, match=message):
            check(request(**files))
