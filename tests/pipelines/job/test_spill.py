"""Guarantees of pipelines.job.spill."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column, row_bytes
from pipelines.files import storage
from pipelines.files.key_sources import read_key_file
from pipelines.inputs.parquet_blocks import Block, Dataset, know_input
from pipelines.job import packing, poisson_batching
from pipelines.job.job_folder import read_checksum
from pipelines.job.packing import OVERHEAD_BYTES, Layout
from pipelines.job.sizing import make_layout, worker_bytes
from pipelines.job.spill import (
    SliceReader,
    Spill,
    blocks_per_file,
    file_bytes,
    is_written,
    spill_path,
    write_spill,
)
from pipelines.job.transforms import Secrets, SpillBlocksFn, WriteSpilledFn
from tests.pipelines.conftest import SmallJobs, contents


@pytest.fixture
def place(here_or_s3: str) -> str:
    """A folder, here or in a store."""
    return here_or_s3


def test_slices_are_those_of_any_store(place: str) -> None:
    pieces = [bytes([group]) * (1000 * group) for group in range(5)]
    path = spill_path(place, 0)
    write_spill(path, [len(piece) for piece in pieces], pieces)
    slices = SliceReader(5)
    read = [slices.read(path, group) for group in (4, 0, 2)]
    assert read == [pieces[4], b"", pieces[2]]
    with pytest.raises(FileNotFoundError):
        slices.read(spill_path(place, 1), 0)


def test_a_file_under_its_final_name_is_complete(place: str) -> None:
    path = spill_path(place, 0)
    with pytest.raises(ValueError, match="instead of"):
        write_spill(path, [3, 3], [b"abc", b"ab"])
    assert storage.names(place) == set()
    write_spill(path, [3, 3], [b"abc", b"def"])
    assert storage.names(place) == {"block-000000000"}
    assert storage.size(path) == 24 + 6
    assert storage.size(spill_path(place, 1)) is None


def test_no_row_travels_through_the_engine_and_finished_work_is_not_repeated(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, blocks = jobs.layout(), jobs.dataset.blocks
    out, _ = jobs.open()
    (out / "private" / "spill").mkdir()
    spill = Spill(folder=str(out / "private" / "spill"))
    known = know_input(read_key_file(jobs.key_file), jobs.dataset)
    secrets = Secrets(key_file=str(jobs.key_file))
    sample = SpillBlocksFn(layout, secrets, known, spill)
    sample.setup()
    sample.start_bundle()
    write = WriteSpilledFn(layout, str(out), len(blocks), spill)
    write.start_bundle()
    sent = [element for block in blocks for element in sample.process([block])]
    assert sent == [(0, block.ordinal) for block in blocks]
    names = [name for group in (0, 3) for name in write.process(group)]
    assert names == [layout.file(0).name, layout.file(3).name]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    # An engine that lost a worker runs everything again.
    monkeypatch.setattr("pipelines.job.transforms.sample_and_pack", never)
    for block in blocks:
        list(sample.process([block]))
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.job.transforms.encode_steps", never)
        list(write.process(0))
        with pytest.raises(InputError, match="AssertionError"):
            list(write.process(1))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    # What is shorter than its checksum says is not finished.
    path = out / layout.file(0).name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert read_checksum(str(out), path.name, len(whole) - 1) is None
    list(write.process(0))
    assert path.read_bytes() == whole


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
        Block(path="a", label=f"a#{number}", row_group=number, num_rows=row_group,
              first_row=number * row_group, ordinal=number)
        for number in range(-(-rows // row_group))
    )  # fmt: skip
    dataset = Dataset(
        columns=COLUMNS, blocks=blocks, description={}, files={}, footers={}
    )
    return make_layout(plan, dataset), dataset


def test_files_are_large_and_workers_stay_small() -> None:
    layout, dataset = large(10**9, 65_536)
    count = blocks_per_file(layout, dataset)
    largest = count * 65_536 * (row_bytes(COLUMNS) + OVERHEAD_BYTES)
    assert file_bytes(layout) / 2 < largest <= file_bytes(layout)
    assert largest / layout.num_units > 50_000
    assert worker_bytes(layout, dataset, is_shared=True) < 1.3 * (1 << 30)
    assert blocks_per_file(*large(10**6, 65_536)) == 1
    edges = layout.unit_edges()
    assert {*edges} >= {layout.steps(each)[0] for each in range(layout.num_groups)}
    assert (edges[0], edges[-1]) == (0, layout.plan.num_steps)
    assert len(edges) == layout.num_units + 1
    assert np.all((np.diff(edges) >= 0) & (np.diff(edges) <= layout.steps_per_unit))


def test_several_blocks_in_a_file_and_units_in_a_group_give_the_same_bytes(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = jobs.layout(4)
    whole = jobs.write("whole", layout)
    assert layout.units_per_group == 1
    monkeypatch.setattr(packing, "_UNIT_BYTES", 1)
    assert layout.num_units == layout.plan.num_steps
    monkeypatch.setattr(poisson_batching, "blocks_per_file", lambda *_: 2)
    engine = PipelineOptions(["--runner=BundleBasedDirectRunner"])
    assert contents(jobs.write("o", layout, options=engine)) == contents(whole)


def test_a_file_is_written_again_if_it_is_cut(
    jobs: SmallJobs, tmp_path: pathlib.Path
) -> None:
    layout, dataset = jobs.layout(4), jobs.dataset
    spill = Spill(folder=str(tmp_path), blocks_per_file=3)
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
