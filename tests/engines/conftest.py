"""Engines for the tests, where they have been built, and batches to compare with."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from accounting.core.plan import DpSgdPlan
from pipelines.files.key_sources import create_key_file
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
from tests.benchmarks.prepared_rows import write_table
from tests.engines.harness import embedded, parts
from tests.sampler_fields import needed

ROWS = 50_000


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """50,000 rows of Criteo's shape in 13 blocks, the last one smaller."""
    folder = tmp_path_factory.mktemp("input")
    write_table(folder / "part-0.parquet", ROWS, rows_per_group=4000)
    return list_blocks(str(folder))


@pytest.fixture(scope="session")
def layout_of(dataset: Dataset) -> Callable[[str], Layout]:
    """Sampler -> a layout of 200 steps in two epochs; a cap cuts a third of them."""

    def make(sampler: str) -> Layout:
        plan = DpSgdPlan(
            sampler=sampler,
            num_examples=ROWS,
            expected_batch_size=500,
            num_steps=200,
            num_epochs=2,
            **needed(sampler, cap=510),
        )
        return make_layout(plan, dataset)

    return make


@pytest.fixture(scope="session")
def sampling_key(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One key for all jobs."""
    path = tmp_path_factory.mktemp("key") / "sampling.key"
    create_key_file(path)
    return path


@pytest.fixture(scope="session")
def local_batches(
    tmp_path_factory: pytest.TempPathFactory,
    dataset: Dataset,
    layout_of: Callable[[str], Layout],
    sampling_key: pathlib.Path,
) -> Callable[[str], pathlib.Path]:
    """Sampler -> the folder that the local runner made.  Not to be changed."""
    made: dict[str, pathlib.Path] = {}

    def make(sampler: str) -> pathlib.Path:
        if sampler not in made:
            made[sampler] = tmp_path_factory.mktemp("local") / sampler
            write_batches(
                dataset=dataset,
                layout=layout_of(sampler),
                out=made[sampler],
                key_file=sampling_key,
            )
        return made[sampler]

    return make


@pytest.fixture(scope="session", params=parts.ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Flink, then Spark; skips where they have not been built."""
    if reason := parts.missing():
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="session")
def engine_options(
    engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Options with which Beam runs on a job server that is kept between tests."""
    log = tmp_path_factory.mktemp("engine") / f"{engine}.log"
    with embedded.job_server(engine, log) as options:
        yield options
