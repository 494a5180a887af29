"""Small Parquet inputs and finished batches for the tests of the pipeline."""

from __future__ import annotations

import base64
import bz2
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from accounting.core.plan import DpSgdPlan
from dpsgd import command_line
from pipelines.files import storage
from pipelines.files.key_sources import create_key_file
from pipelines.files.storage import StrPath, is_remote, pretty_json
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job.job_folder import open_job
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
from pipelines.tables.synthetic import SynthOptions, write_synth
from tests.sampler_fields import needed
from tests.warm_processes import warm_python


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


def prepared_bytes(folder: StrPath) -> dict[str, bytes]:
    """Every file of prepared data by its path, whichever files it was read from."""
    found = contents(folder)
    if (name := "_prepared.json") in found:
        record = json.loads(found[name])
        assert record["settings"].pop("sources")
        assert record["settings"].pop("read")
        found[name] = pretty_json(record)
    return found


@pytest.fixture(scope="session")
def pipeline_bytes() -> Callable[[beam.Pipeline], bytes]:
    """A pipeline's proto, and its DoFns as pickled: the proto holds them compressed."""

    def plain(payload: bytes) -> bytes:
        data = base64.b64decode(payload)
        with contextlib.suppress(OSError):
            return bz2.decompress(data)
        return zlib.decompress(data)

    def collect(pipeline: beam.Pipeline) -> bytes:
        proto = pipeline.to_runner_api()
        payloads = [
            beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
            for transform in proto.components.transforms.values()
            if transform.spec.urn == common_urns.primitives.PAR_DO.urn
        ]
        fns = [plain(payload.do_fn.payload) for payload in payloads]
        return b"".join([proto.SerializeToString(), *fns])

    return collect


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


#: Code blocks of pipelines/README.md that need a package of an optional extra.
OPTIONAL = {"import jax": "jax", "import torch": "opacus"}


@pytest.fixture(scope="session")
def readme_blocks(root: pathlib.Path) -> list[tuple[str, str, str | None]]:
    """(language, text, optional extra) of every code block of pipelines/README.md."""
    text = (root / "pipelines" / "README.md").read_text()
    found = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.M | re.S)
    assert text.count("```") == 2 * len(found), "a block without a language"
    extras = [
        next((e for word, e in OPTIONAL.items() if word in block), None)
        for _, block in found
    ]
    return [
        (language, block, extra)
        for (language, block), extra in zip(found, extras, strict=True)
    ]


@pytest.fixture(scope="session")
def readme_folder(
    tmp_path_factory: pytest.TempPathFactory,
    root: pathlib.Path,
    readme_blocks: list[tuple[str, str, str | None]],
) -> pathlib.Path:
    """Where all blocks that need no extra have run, in order.  Not to be changed."""
    folder = tmp_path_factory.mktemp("readme")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    python = os.fspath(warm_python())
    command = f'dpsgd() {{ "{python}" -m dpsgd "$@"; }}\n'
    for language, text, extra in readme_blocks:
        if extra is None:
            shell = ["bash", "-euc", command + text]
            result = subprocess.run(
                shell if language == "sh" else [python, "-c", text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
    return folder
