"""Guarantees of pipelines.job.spill, and jobs that sort rows in two passes."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.plan import DpSgdPlan
from pipelines.core.batches.columns import Column
from pipelines.files import storage
from pipelines.files.key_sources import read_key_file
from pipelines.inputs.known_input import know_input
from pipelines.inputs.parquet_blocks import Block, Dataset
from pipelines.job import packing, poisson_batching
from pipelines.job.packing import Layout
from pipelines.job.sizing import make_layout, worker_bytes
from pipelines.job.spill import (
    FILE_BYTES,
    FanIn,
    Spill,
    choose_fan_in,
    is_written,
    spill_path,
    traffic,
)
from pipelines.job.steps.map_step import Secrets, SpillBlocksFn
from tests.pipelines.conftest import SmallJobs, contents

#: Prepared Criteo: a label, 13 integers and 26 categories.
COLUMNS = (
    Column(name="label", dtype="int8"),
    Column(name="integers", dtype="float32", shape=(13,)),
    Column(name="categories", dtype="int32", shape=(26,)),
)


def large(rows: int, row_group: int, epochs: int = 1) -> tuple[Layout, Dataset]:
    """Prepared Criteo, in batches of 65,536."""
    num_steps = epochs * -(-rows // 65_536)
    plan = DpSgdPlan(
        sampler="poisson", num_examples=rows, expected_batch_size=65_536,
        num_steps=num_steps,
    )  # fmt: skip
    blocks = tuple(
        Block(path="a", name="a", row_group=number, num_rows=row_group,
              first_row=number * row_group, ordinal=number)
        for number in range(-(-rows // row_group))
    )  # fmt: skip
    dataset = Dataset(
        columns=COLUMNS, blocks=blocks, description={}, files={}, hidden=(), footers={}
    )
    return make_layout(plan, dataset), dataset


@pytest.mark.parametrize(
    ("rows", "epochs", "passes"),
    [(10**6, 1, 1), (64 * 10**6, 1, 1), (10**9, 1, 2), (10**9, 100, 2)],
)
def test_requests_are_few_or_large_and_workers_stay_small(
    rows: int, epochs: int, passes: int
) -> None:
    layout, dataset = large(rows, 65_536, epochs)
    chosen = choose_fan_in(layout, dataset)
    asked = traffic(layout, len(dataset.blocks), chosen)
    assert (2 if chosen.files_per_merge else 1) == passes
    assert asked.shuffle_reads <= 1 << 16 or asked.bytes_per_read >= 200 << 10
    # Both passes have files of the same size, and slices of the same size.
    if passes == 2:
        files, parts = chosen.num_files(len(dataset.blocks)), chosen.num_parts(layout)
        merges = chosen.num_merges(len(dataset.blocks))
        reads = files * parts, layout.num_units * merges
        assert max(reads) < 1.5 * min(reads)
        assert asked.stored_bytes / 2 / parts / merges < 1.1 * FILE_BYTES
    if epochs == 1:
        assert worker_bytes(layout, dataset, fan_in=chosen) < 1 << 30


def test_every_block_is_in_one_file_and_every_unit_in_one_part() -> None:
    layout, dataset = large(10**9, 65_536)
    chosen = choose_fan_in(layout, dataset)
    edges, groups = layout.unit_edges(), layout.group_edges()
    assert set(groups) <= set(edges)
    assert np.all(np.diff(edges) >= 0)
    assert np.all(np.diff(edges) <= layout.steps_per_unit)
    assert (edges[0], edges[-1]) == (0, layout.plan.num_steps)
    assert len(edges) == layout.num_units + 1
    units = chosen.num_parts(layout) * chosen.units_per_part
    assert 0 <= units - layout.num_units < chosen.units_per_part
    blocks = chosen.num_files(len(dataset.blocks)) * chosen.blocks_per_file
    assert 0 <= blocks - len(dataset.blocks) < chosen.blocks_per_file


def test_two_passes_through_a_store_give_the_same_bytes_and_leave_none(
    jobs: SmallJobs, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = jobs.layout(4)
    whole = jobs.write("whole", layout)
    assert layout.units_per_group == 1
    monkeypatch.setattr(packing, "_UNIT_BYTES", 1)
    assert layout.num_units == layout.plan.num_steps
    chosen = FanIn(blocks_per_file=2, units_per_part=3, files_per_merge=2)
    monkeypatch.setattr(poisson_batching, "choose_fan_in", lambda *_: chosen)
    seen: list[set[str]] = []
    finish = poisson_batching.finish_job

    def look(*arguments: object) -> object:
        (folder,) = storage.names(scratch)
        (flushed,) = storage.names(f"{scratch}/{folder}")
        path = f"{scratch}/{folder}/{flushed}"
        seen.append(storage.names(path))
        for name in seen[-1]:
            # Its end is that of the index, which has an edge more than slices.
            (first,) = np.frombuffer(storage.read_bytes(f"{path}/{name}")[:8], "<i8")
            slices = 3 if name.startswith("part-") else chosen.num_parts(layout)
            assert first == 8 * (slices + 1)
        return finish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(poisson_batching, "finish_job", look)
    engine = PipelineOptions(["--runner=BundleBasedDirectRunner"])
    out, scratch = (f"{s3_folder}/{name}" for name in "os")
    jobs.write(out, layout, scratch=scratch, options=engine)
    assert storage.names(scratch) == set()
    assert contents(out) == contents(whole)
    [names] = seen
    assert len(names) == traffic(layout, 5, chosen).shuffle_files


def test_a_file_is_written_again_if_it_is_cut(
    jobs: SmallJobs, tmp_path: pathlib.Path
) -> None:
    layout, dataset = jobs.layout(4), jobs.dataset
    spill = Spill(folder=str(tmp_path), fan_in=FanIn(blocks_per_file=3))
    known = know_input(read_key_file(jobs.key_file), dataset)
    secrets = Secrets(key_file=str(jobs.key_file))
    sample = SpillBlocksFn(layout, secrets, known, spill)
    sample.setup()
    sample.start_bundle()
    one, two, three, four, five = dataset.blocks
    assert list(sample.process((one, two, three))) == [(0, 0), (0, 1), (0, 2)]
    assert list(sample.process((four, five))) == [(0, 3), (0, 4)]
    path = pathlib.Path(spill_path(tmp_path, 0))
    whole = path.read_bytes()
    assert is_written(path)
    for size in (len(whole) - 1, 0):
        path.write_bytes(whole[:size])
        assert not is_written(path)
        list(sample.process((one, two, three)))
        assert path.read_bytes() == whole
