"""Users bounded on Flink and Spark: what this process, or the local runner, keeps."""

from __future__ import annotations

import contextlib
import csv
import functools
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from dpsgd import command_line
from pipelines.core.users.bounded import SAMPLED
from pipelines.job.engine_tasks import run_on_engine
from pipelines.job.runtime.tasks import Runtime
from pipelines.users import bound_folder
from pipelines.users.bound import bound
from pipelines.users.bound_job import BoundSettings
from tests.pipelines.conftest import contents

# Threads that served an engine end with an exception when it hangs up.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)

MOST, NUM = 3, 6000
USER = np.random.default_rng(0).zipf(1.5, NUM) % 900
#: Rows come in pairs of equal ones, of equal users.
ROWS: list[dict[str, Any]] = [
    {"who": f"u{USER[number // 2]}", "row": number // 2, "y": number // 2 % 2}
    for number in range(NUM)
]
SCHEMA = """\
version = 1
[columns.who]
kind = "user"
[columns.row]
kind = "numeric"
[columns.y]
kind = "label"
task = "binary"
[split]
by = "hash"
column = "who"
"""


@pytest.fixture(autouse=True)
def several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes runs of rows short, and parts of users small.

    Workers are threads of this process.
    """
    monkeypatch.setattr(bound_folder, "RUN_ROWS", 900)
    monkeypatch.setattr(bound_folder, "TASK_BYTES", 1 << 17)


@pytest.mark.parametrize("sampled", SAMPLED)
def test_a_bounded_table_has_the_bytes_of_this_process(
    sampled: str,
    engine_options: list[str],
    sampling_key: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    source = str(tmp_path / "table.parquet")
    table = {"user": USER, "x": np.arange(NUM) / NUM}
    pq.write_table(pa.table(table), source, row_group_size=300)
    settings = BoundSettings(
        user_column="user",
        max_examples_per_user=MOST,
        num_examples=NUM,
        sampled=sampled,
    )
    engine = functools.partial(run_on_engine, PipelineOptions(engine_options))
    for place, run_tasks in (("here", None), ("there", engine)):
        out = tmp_path / place
        bound(
            source,
            out,
            settings,
            key_file=sampling_key,
            runtime=Runtime(run_tasks=run_tasks),
        )
    found = contents(tmp_path / "there")
    assert found == contents(tmp_path / "here")
    assert len(found) > 2


def test_a_prepared_table_of_users_has_the_bytes_of_this_process(
    engine_options: list[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("schema.toml").write_text(SCHEMA)
    with open("table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    line = (
        "prepare --input table.csv --schema schema.toml --row-group-rows 400 "
        f"--key-file key --max-examples-per-user {MOST} --num-examples {NUM} "
        "--sample users --out"
    )
    for out, options in (("here", []), ("there", engine_options)):
        monkeypatch.setattr("sys.argv", ["dpsgd", *line.split(), out, *options])
        with contextlib.suppress(SystemExit):
            command_line.main()
    found = contents(tmp_path / "there")
    assert found == contents(tmp_path / "here")
    assert len([name for name in found if name.startswith("train/")]) > 2
