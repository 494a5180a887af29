"""How long a run would take: a few of its steps, on made-up rows.

A rehearsal makes batches and trains as the run would, with its flags, batch size, cap
and columns, in a folder that is removed.  It reads no row of the table, and releases
nothing of it.  Ids are 0 or 1, so that a step that reads many rows of large tables may
take longer.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import time

import numpy as np
import pyarrow.parquet as pq

from pipelines.files import processes
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    Dataset,
    list_blocks,
    without_note,
)
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from pipelines.tables.prepared_files import arrow_table
from trainer.report.progress import Silent
from trainer.settings.requests import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

#: Steps of the made-up plan; it ends earlier once steps have taken this many seconds.
_STEPS, _SECONDS = 40, 4.0
#: The first steps trace and warm up.
_FIRST = 2


class _EnoughError(Exception):
    """Ends the rehearsal."""


class _Clock(Silent):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def advance(self, done: int) -> None:
        """As in ``Reporter``.

        Raises:
          _EnoughError: the steps so far tell how long one takes.
        """
        self.ends.append(time.perf_counter())
        timed = self.ends[_FIRST:]
        if (len(timed) > 1 and timed[-1] - timed[0] >= _SECONDS) or done == _STEPS - 1:
            raise _EnoughError

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        timed = self.ends[_FIRST:]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


def time_of_run(
    prepared: pathlib.Path, settings: BatchSettings, training: TrainSettings
) -> str:
    """Returns how long the steps of a run would take here, in words.

    Args:
      prepared: Folder of the prepared rows that would train.
      settings: How its batches would be sampled.
      training: How it would train.

    Raises:
      InputError: batches or training would be refused.
    """
    rows = list_blocks(str(prepared))
    plan = settings.plan(rows.num_examples)
    with tempfile.TemporaryDirectory(prefix="dpsgd-rehearsal-") as name:
        folder = pathlib.Path(name)
        _write_rows(folder / "rows", rows, _STEPS * settings.expected_batch_size)
        of_few = BatchSettings(
            expected_batch_size=settings.expected_batch_size,
            num_epochs=1,
            truncated_batch_size=plan.truncated_batch_size,
            bands=plan.bands and min(plan.bands, _STEPS),
        )
        folders = f"{folder}/rows", f"{folder}/batches"
        processes.call(MAKE_BATCHES, *folders, of_few)
        seconds = _seconds_per_step(folder, training)
    return (
        f"The {plan.num_steps:,} steps of a run take about "
        f"{_rounded(plan.num_steps * seconds)} here, as some did on made-up rows."
    )


def _write_rows(folder: pathlib.Path, rows: Dataset, count: int) -> None:
    """Writes rows of zeros and ones with the columns and the description of others."""
    random = np.random.default_rng(0)
    made_up = (
        random.integers(0, 2, (count, *column.shape)).astype(column.dtype)
        for column in rows.columns
    )
    note = json.dumps(without_note(rows.description)).encode()
    schema = pq.read_schema(rows.blocks[0].path)
    schema = schema.with_metadata({DATASET_METADATA_KEY: note})
    folder.mkdir()
    pq.write_table(arrow_table(made_up, schema), folder / "rows.parquet")


def _seconds_per_step(folder: pathlib.Path, training: TrainSettings) -> float:
    request = Request(
        settings=training,
        batches=folder / "batches",
        held_out=None,
        run=folder / "run",
    )
    clock = _Clock()
    with contextlib.suppress(_EnoughError):
        train(request, clock)
    return clock.seconds


def _rounded(seconds: float) -> str:
    """Returns a time to two digits, in the largest unit of which there is one.

    Example:
      >>> _rounded(44.4), _rounded(150), _rounded(7700)
      ('44 s', '2.5 min', '2.1 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
