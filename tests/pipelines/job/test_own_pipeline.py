"""PoissonBatches in pipelines of users, and pipelines/README.md."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.batches.verify import verify
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.poisson_batching import PoissonBatches
from tests.pipelines.conftest import SmallJobs, contents, small_layout
from tests.warm_processes import warm_python


@pytest.fixture
def plan(dataset: Dataset) -> DpSgdPlan:
    return small_layout(dataset).plan


def local_pipeline(*options: str) -> beam.Pipeline:
    return beam.Pipeline(runner="FnApiRunner", options=PipelineOptions(list(options)))


def test_the_blocks_of_the_readme_run(
    tmp_path: pathlib.Path, root: pathlib.Path
) -> None:
    """In order, in one folder; but for those that need a package of an extra."""
    text, python = (root / "pipelines/README.md").read_text(), os.fspath(warm_python())
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.M | re.S)
    assert text.count("```") == 2 * len(blocks), "a block without a language"
    own = [each for each in blocks if not re.search("import (jax|torch)", each[1])]
    assert (len(own), len(blocks)) == (4, 6)
    for language, block in own:
        shell = ["bash", "-euc", f'dpsgd() {{ "{python}" -m dpsgd "$@"; }}\n{block}']
        command = shell if language == "sh" else [python, "-c", block]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    for name in ("batches", "own-batches"):
        assert verify(tmp_path / name).findings == ()
    assert (tmp_path / "sampling.key").stat().st_mode & 0o777 == 0o600


def test_the_result_is_that_of_the_command(jobs: SmallJobs, plan: DpSgdPlan) -> None:
    layout, own = jobs.layout(), jobs.folder / "own"
    batches = PoissonBatches(
        plan, jobs.dataset, own, key_file=jobs.key_file, physical_batch_size=8
    )
    with local_pipeline() as pipeline:
        names = pipeline | batches
        wanted = [layout.file(group).name for group in range(layout.num_groups)]
        assert_that(names, equal_to(wanted))
    assert batches.finish() == read_manifest(own)
    assert contents(own) == contents(jobs.write("whole"))


class _Fail(beam.DoFn):
    """Lets some elements pass."""

    def __init__(self, num: int) -> None:
        self._left = num

    def process(self, name: str) -> Iterator[str]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("what comes after fails")
        yield name


def test_a_pipeline_that_failed_goes_on_where_it_stopped(
    tmp_path: pathlib.Path, dataset: Dataset, plan: DpSgdPlan
) -> None:
    out = tmp_path / "o"

    def run(allowed: int) -> PoissonBatches:
        batches = PoissonBatches(plan, dataset, out)
        with local_pipeline() as pipeline:
            names = pipeline | batches
            _ = names | beam.ParDo(_Fail(allowed))
        return batches

    with pytest.raises(RuntimeError, match="what comes after fails"):
        run(5)
    early = {path: path.stat().st_mtime_ns for path in out.glob("*.tfrecord")}
    assert len(early) == 6
    with pytest.raises(InputError, match="6 are there"):
        PoissonBatches(plan, dataset, out).finish()
    run(100).finish()
    assert verify(out).findings == ()
    assert {path: path.stat().st_mtime_ns for path in early} == early


def test_what_cannot_be_kept_is_refused_when_the_pipeline_is_built(
    tmp_path: pathlib.Path, dataset: Dataset, finished: pathlib.Path
) -> None:
    new = tmp_path / "o"
    wrong: list[tuple[str, pathlib.Path, dict[str, Any], list[str]]] = [
        ("sampler='dynamic-shuffle'", new, {"sampler": "dynamic-shuffle"}, []),
        ("direct_num_workers=3", new, {}, ["--direct_num_workers=3"]),
        ("num_examples=99", new, {"num_examples": 99}, []),
        ("finished batches", finished, {}, []),
    ]

    def build(out: pathlib.Path, changes: dict[str, Any], options: list[str]) -> None:
        plan = small_layout(dataset, **changes).plan
        _ = local_pipeline(*options) | PoissonBatches(plan, dataset, out)

    for message, *how in wrong:
        with pytest.raises(InputError, match=message):
            build(*how)
    assert not new.exists()


def test_a_step_before_it_is_refused(
    tmp_path: pathlib.Path, dataset: Dataset, plan: DpSgdPlan
) -> None:
    blocks = local_pipeline() | beam.Create(dataset.blocks)
    with pytest.raises(InputError, match=r"pipeline \| PoissonBatches"):
        _ = blocks | PoissonBatches(plan, dataset, tmp_path / "o")
    assert not (tmp_path / "o").exists()  # before any work
