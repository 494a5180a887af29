"""Small Parquet inputs and finished batches for the tests of the pipeline."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.plan import DpSgdPlan
from dpsgd import command_line
from pipelines.files import storage
from pipelines.files.key_sources import create_key_file
from pipelines.files.storage import StrPath, is_remote
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job.job_folder import open_job
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
from pipelines.tables.synthetic import SynthOptions, write_synth
from tests.sampler_fields import needed


def write_table(path: pathlib.Path, first: int, count: int, row_group: int) -> None:
    """Rows whose ``id`` says which they are, beside a list and a narrow column."""
    ids = np.arange(first, first + count)
    table = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "pair": pa.FixedSizeListArray.from_arrays(
                pa.array((np.repeat(ids, 2) / 2).astype("f4")), 2
            ),
            "label": pa.array((ids % 2).astype("i1")),
        }
    )
    pq.write_table(table, path, row_group_size=row_group)


def write_text(out: pathlib.Path, rows: int, files: int, seed: int = 0) -> None:
    """Writes rows of Criteo's format into some files of about equal size."""
    whole = write_synth(out, SynthOptions(num_rows=rows, seed=seed))
    lines = whole.read_bytes().splitlines(keepends=True)
    for number in range(files):
        part = lines[rows * number // files : rows * (number + 1) // files]
        (out / f"part-{number:05d}.txt").write_bytes(b"".join(part))


@pytest.fixture(scope="session")
def input_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """100 rows in two files of 60 and 40, in row groups of 25.  Not to be changed."""
    folder = tmp_path_factory.mktemp("input")
    write_table(folder / "part-0.parquet", 0, 60, 25)
    write_table(folder / "part-1.parquet", 60, 40, 25)
    return folder


@pytest.fixture(scope="session")
def dataset(input_folder: pathlib.Path) -> Dataset:
    """The rows of ``input_folder``."""
    return list_blocks(str(input_folder))


def small_layout(dataset: Dataset, size: int | None = 8, **changes: Any) -> Layout:
    """40 steps of 10 expected rows; capped at 14, or in 4 epochs."""
    fields = {"sampler": "truncated-poisson", "num_examples": 100, **changes}
    fields = {"expected_batch_size": 10, "num_steps": 40, **fields}
    fields = {**needed(fields["sampler"], cap=14, bands=4), **fields}
    if "poisson" not in fields["sampler"]:
        fields.setdefault("num_epochs", 4)
    return make_layout(DpSgdPlan(**fields), dataset, size)


@dataclasses.dataclass(frozen=True)
class SmallJobs:
    """Jobs over ``input_folder`` under one key, in the folder of a test."""

    folder: pathlib.Path
    dataset: Dataset
    key_file: pathlib.Path

    def layout(self, size: int | None = 8, **changes: Any) -> Layout:
        return small_layout(self.dataset, size, **changes)

    def write(self, out: StrPath = "o", layout: Any = None, **options: Any) -> Any:
        """Writes batches to a path in the folder, or to one in a store; returns it."""
        options = {"dataset": self.dataset, "key_file": self.key_file, **options}
        place = out if is_remote(out) else self.folder / out
        write_batches(layout=layout or self.layout(), out=place, **options)
        return place

    def open(self, out: str = "o", layout: Any = None) -> tuple[pathlib.Path, str]:
        """Opens the folder of a job; returns it, and the id of its batches."""
        layout = layout or self.layout()
        found = open_job(self.folder / out, layout, self.dataset, self.key_file)
        return self.folder / out, found[1]


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A key file outside of every output folder."""
    create_key_file(tmp_path / "sampling.key")
    return tmp_path / "sampling.key"


@pytest.fixture
def jobs(tmp_path: pathlib.Path, dataset: Dataset, key_file: pathlib.Path) -> SmallJobs:
    """See ``SmallJobs``."""
    return SmallJobs(tmp_path, dataset, key_file)


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, dataset: Dataset
) -> pathlib.Path:
    """A finished folder of batches: 40 steps, two records each.  Not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "batches"
    write_batches(dataset=dataset, layout=small_layout(dataset), out=out)
    return out


@pytest.fixture
def batches(tmp_path: pathlib.Path, finished: pathlib.Path) -> pathlib.Path:
    """A copy of ``finished``, to be damaged."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "batches"))


def contents(folder: StrPath) -> dict[str, bytes]:
    """Every file of a folder, here or in a store, by its path; the key apart."""
    kept = (path for path in storage.walk(folder) if not path.endswith("sampling.key"))
    return {path: storage.read_bytes(f"{folder}/{path}") for path in kept}


class Ran(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def printed(self) -> str:
        return self.out + self.err


#: ``command("verify", folder)`` runs ``dpsgd verify`` in this process.
Command = Callable[..., Ran]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """See ``Command``."""

    def run(*arguments: object) -> Ran:
        code: Any = 0
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [])
            patch.setattr(sys, "argv", ["dpsgd", *map(str, arguments)])
            try:
                command_line.main()
            except SystemExit as end:
                code = end.code or 0
        return Ran(code, *capfd.readouterr())

    return run
