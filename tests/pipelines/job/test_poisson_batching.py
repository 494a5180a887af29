"""Guarantees of pipelines.job.transforms and pipelines.job.poisson_batching."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.batches.folder import read_batches, read_manifest
from pipelines.batches.verify import verify
from pipelines.files.key_sources import create_key_file
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job import job_folder, poisson_batching, sizing, transforms
from pipelines.job.sizing import local_threads, worker_bytes
from tests.pipelines.conftest import SmallJobs, contents, small_layout


def ids_by_step(folder: pathlib.Path) -> dict[int, list[int]]:
    """The ids of the real rows of each step, in order."""
    steps: dict[int, list[int]] = {}
    for batch in read_batches(folder):
        ids = batch.columns["id"][batch.weight == 1]
        steps.setdefault(batch.step, []).extend(ids.tolist())
        pairs = batch.columns["pair"][batch.weight == 1]
        assert (pairs == np.stack([ids, ids], 1) / 2).all(), "a row was torn apart"
    return steps


@pytest.mark.parametrize("sampler", ["truncated-poisson", "poisson"])
def test_every_step_is_written_also_when_no_example_chose_it(
    jobs: SmallJobs, sampler: str
) -> None:
    cap = {"truncated_batch_size": 3} if sampler == "truncated-poisson" else {}
    sizes = {"expected_batch_size": 1, "num_steps": 200, **cap}
    out = jobs.write("o", jobs.layout(None, sampler=sampler, **sizes))
    steps = ids_by_step(out)
    assert sorted(steps) == list(range(200))
    # (1 - 1/100)^100 = 0.37 of 200 steps are empty; none of them with chance 1e-39.
    assert sum(not ids for ids in steps.values()) > 20


def test_no_element_is_lost_or_counted_twice() -> None:
    ordinals = list(range(5))
    gather = transforms._AwaitFn(5, (0, 2))
    for named in (ordinals[1:], ordinals[:-1], [*ordinals, 2], [0] * 5):
        with pytest.raises(InputError, match="deliver each of 5"):
            list(gather.process((0, named)))
    assert list(gather.process((0, ordinals[::-1]))) == [0, 2]


def test_bytes_depend_on_the_key_and_not_on_threads_or_the_engine(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, **options: Any) -> dict[str, bytes]:
        return contents(jobs.write(name, **options))

    one = run("one", memory_limit=sizing._BASE_BYTES + (1 << 20))
    monkeypatch.setattr(poisson_batching, "local_threads", lambda *_: 4)
    assert run("threads") == one
    engine = PipelineOptions(["--runner=BundleBasedDirectRunner"])
    assert run("engine", options=engine) == one
    create_key_file(jobs.folder / "other.key")
    other = run("other", key_file=jobs.folder / "other.key")
    assert set(other) == set(one)
    assert not any(other[name] == one[name] for name in one)
    # Other batch sizes, but manifests differ in the commitment to the key alone.
    folders = [jobs.folder / name for name in ("one", "other")]
    manifests = [read_manifest(folder).to_json() for folder in folders]
    ids = [manifest.pop("batches_id") for manifest in manifests]
    assert ids[0] != ids[1]
    assert manifests[0] == manifests[1]


def test_a_limit_below_one_block_or_range_of_steps_is_refused(dataset: Dataset) -> None:
    layout = small_layout(dataset, None)
    with pytest.raises(InputError, match="memory_limit=1000"):
        local_threads(layout, dataset, 1000)
    assert local_threads(layout, dataset, 1 << 40) == len(os.sched_getaffinity(0))
    # A worker of an engine does the work of one thread.
    least = worker_bytes(layout, dataset)
    assert local_threads(layout, dataset, least) == 1
    with pytest.raises(InputError, match=f"memory_limit={least - 1}"):
        local_threads(layout, dataset, least - 1)


def test_existing_output_is_never_replaced(
    jobs: SmallJobs, batches: pathlib.Path
) -> None:
    before = contents(batches)
    with pytest.raises(InputError, match="it holds finished batches"):
        jobs.write("batches")
    assert contents(batches) == before
    full = jobs.folder / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="empty or new folder"):
        jobs.write("full")
    assert os.listdir(full) == ["thesis.txt"]


def test_an_unfinished_job_of_other_options_input_key_or_version_is_refused(
    jobs: SmallJobs,
) -> None:
    out, _ = jobs.open()
    other_key = jobs.folder / "other.key"
    create_key_file(other_key)
    footers = {**jobs.dataset.footers, "part-0.parquet": "0" * 64}
    changed = dataclasses.replace(jobs.dataset, footers=footers)
    for what, changes in {
        "options or columns": {"layout": jobs.layout(9)},
        "sampling key": {"key_file": other_key},
        "input": {"dataset": changed},
    }.items():
        with pytest.raises(InputError, match=f"the same {what}"):
            jobs.write(**changes)
    # Its finished files hold other choices than this version would go on with.
    path = out / "private" / "job.json"
    told = path.read_text()
    path.write_text(json.dumps({**json.loads(told), "version": "1"}))
    with pytest.raises(InputError, match=r"same batch format version.*release"):
        jobs.write()
    assert not list(out.glob("*.tfrecord"))
    path.write_text(told)
    assert verify(jobs.write()).findings == ()


def test_two_jobs_do_not_write_one_folder(jobs: SmallJobs) -> None:
    out, _ = jobs.open()
    with job_folder.lock_job(out), pytest.raises(InputError, match="no other job"):
        jobs.write()
