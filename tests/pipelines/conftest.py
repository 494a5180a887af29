"""Small Parquet inputs and finished batches for the tests of the pipeline."""

from __future__ import annotations

import base64
import bz2
import contextlib
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

import dpsgd
from accounting.core.plan import DpSgdPlan
from pipelines.files.key_files import create_key_file
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout


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


@pytest.fixture(scope="session")
def input_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """100 rows in two files of 60 and 40, in row groups of 25.  Not to be changed."""
    folder = tmp_path_factory.mktemp("input")
    write_table(folder / "part-0.parquet", 0, 60, 25)
    write_table(folder / "part-1.parquet", 60, 40, 25)
    return folder


MakeLayout = Callable[..., Layout]


@pytest.fixture(scope="session")
def make_small_layout(input_folder: pathlib.Path) -> MakeLayout:
    """Layouts over ``input_folder``: 40 steps of 10 expected rows, capped at 14."""

    def make(physical_batch_size: int | None = None, **changes: object) -> Layout:
        fields = {
            "sampler": "truncated-poisson",
            "num_examples": 100,
            "expected_batch_size": 10,
            "num_steps": 40,
            "truncated_batch_size": 14,
            **changes,
        }
        plan = DpSgdPlan(**fields)  # type: ignore[arg-type]
        return make_layout(plan, list_blocks(str(input_folder)), physical_batch_size)

    return make


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A key file outside of every output folder."""
    create_key_file(tmp_path / "sampling.key")
    return tmp_path / "sampling.key"


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    input_folder: pathlib.Path,
    make_small_layout: MakeLayout,
) -> pathlib.Path:
    """A finished folder of batches: 40 steps, two records each.  Not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "batches"
    write_batches(
        dataset=list_blocks(str(input_folder)),
        layout=make_small_layout(physical_batch_size=8),
        out=out,
    )
    return out


@pytest.fixture
def batches(tmp_path: pathlib.Path, finished: pathlib.Path) -> pathlib.Path:
    """A copy of ``finished``, to be damaged."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "batches"))


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


def run_command(
    patch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """(exit code, all that was printed or logged) of a command, in process."""
    patch.setattr(logging.getLogger(), "handlers", [])
    patch.setattr(sys, "argv", ["dpsgd", *arguments])
    code: Any = 0
    try:
        dpsgd.main()
    except SystemExit as end:
        code = end.code or 0
    printed = capfd.readouterr()
    return code, printed.out + printed.err


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
    command = f'dpsgd() {{ "{sys.executable}" -m dpsgd "$@"; }}\n'
    for language, text, extra in readme_blocks:
        if extra is None:
            shell = ["bash", "-euc", command + text]
            result = subprocess.run(
                shell if language == "sh" else [sys.executable, "-c", text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
    return folder
