"""Users bounded on Flink and Spark: what this process keeps."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

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
