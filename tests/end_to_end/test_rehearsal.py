"""The time of a run is that of its steps, and no row is read for it."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpsgd import rehearsal
from pipelines.job.batch_settings import BatchSettings
from trainer.cli.train_command import train_request
from trainer.core.tf_compat import keras


def _without_values(path: pathlib.Path) -> None:
    """Overwrites all values of a Parquet file, but not its footer."""
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    path.write_bytes(whole[:4] + bytes(len(whole) - 4 - footer) + whole[-footer:])
    with pytest.raises(OSError, match="deserialize"):
        pq.read_table(path)


def one_weight(manifest: Any) -> Any:
    values = keras.Input((), name="x")
    return keras.Model(values, keras.layers.Dense(1)(values[:, None]))


@pytest.mark.usefixtures("warm_starts")
def test_it_takes_steps_of_the_plan_reads_no_row_and_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"label": np.zeros(4000, "i1"), "x": np.zeros(4000, "f4")}
    folder, scratch = tmp_path / "rows", tmp_path / "scratch"
    for one in (folder, scratch):
        one.mkdir()
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    _without_values(folder / "rows.parquet")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(rehearsal, "_STEPS", 6)
    training = train_request(
        ["--batches=.", "--out=.", "--epsilon=3", "--delta=1e-5",
         f"--model={__name__}:one_weight"]
    ).settings  # fmt: skip
    sampling = BatchSettings(expected_batch_size=100, num_epochs=2)
    said = rehearsal.time_of_run(folder, sampling, training)
    assert said.startswith("The 80 steps of a run take about ")
    assert not list(scratch.glob("dpsgd*"))


def test_the_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 20.0, 20.5, 21.0, 21.5, 30.0])
    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: next(seconds))
    clock = rehearsal._Clock()
    for done in range(1, 6):
        clock.advance(done)
    with pytest.raises(rehearsal._EnoughError):
        clock.advance(6)
    assert clock.seconds == pytest.approx((30.0 - 20.5) / 3)
