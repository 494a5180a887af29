"""Guarantees of pipelines.job.transforms and pipelines.job.poisson_batching."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.batches.reader import read_batches
from pipelines.batches.verify import verify
from pipelines.files.key_files import create_key_file, insecure_key
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job import job_folder, packing, poisson_batching, sizing, transforms
from pipelines.job.packing import Layout, sample_and_pack
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import local_threads, worker_bytes
from pipelines.job.steps import reduce_step
from pipelines.sampling.samplers import (
    Participations,
    sample_block,
)

MakeLayout = Callable[..., Layout]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every public file and every batch, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.*"))}


@pytest.fixture
def dataset(input_folder: pathlib.Path) -> Dataset:
    return list_blocks(str(input_folder))


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
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    sampler: str,
) -> None:
    cap = 3 if sampler == "truncated-poisson" else None
    layout = make_small_layout(
        sampler=sampler, expected_batch_size=1, num_steps=200, truncated_batch_size=cap
    )
    write_batches(dataset=dataset, layout=layout, out=tmp_path / "o")
    steps = ids_by_step(tmp_path / "o")
    assert sorted(steps) == list(range(200))
    # (1 - 1/100)^100 = 0.37 of 200 steps are empty; none of them with chance 1e-39.
    assert sum(not ids for ids in steps.values()) > 20


def elements_of(layout: Layout, dataset: Dataset) -> dict[int, list[tuple[int, bytes]]]:
    """What the map step emits, by group, in the order of the blocks."""
    elements: dict[int, list[tuple[int, bytes]]] = {}
    for block in dataset.blocks:
        packed = sample_and_pack(
            layout, insecure_key(0), [block], dataset.is_listed,
            edges=layout.group_edges(),
        )  # fmt: skip
        for group in range(layout.num_groups):
            piece = packed.piece(group)
            assert len(piece) == packed.sizes[group]
            elements.setdefault(group, []).append((block.ordinal, piece))
    return elements


def writer(layout: Layout, folder: pathlib.Path) -> reduce_step.WriteGroupFn:
    (folder / "private" / "files").mkdir(parents=True)
    write = reduce_step.WriteGroupFn(layout, str(folder), num_blocks=5)
    write.start_bundle()
    return write


def test_bytes_do_not_depend_on_the_order_of_arrival(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def equal_priorities(*arguments: object) -> Participations:
        chosen = sample_block(*arguments)  # type: ignore[arg-type]
        return dataclasses.replace(chosen, priority=np.zeros_like(chosen.priority))

    # Arrival must not even decide between rows of the same priority.
    monkeypatch.setattr(packing, "sample_block", equal_priorities)
    layout = make_small_layout(4)
    for order, direction in (("listed", 1), ("reversed", -1)):
        write = writer(layout, tmp_path / order)
        for group, pieces in elements_of(layout, dataset).items():
            written = list(write.process((group, iter(pieces[::direction]))))
            assert written == [layout.file(group).name]
    assert len(contents(tmp_path / "listed")) == layout.num_groups
    assert contents(tmp_path / "listed") == contents(tmp_path / "reversed")


def test_no_element_is_lost_or_counted_twice(
    tmp_path: pathlib.Path, dataset: Dataset, make_small_layout: MakeLayout
) -> None:
    layout = make_small_layout(4)
    write = writer(layout, tmp_path)
    pieces = elements_of(layout, dataset)[0]
    for delivered in (pieces[1:], pieces[:-1], [*pieces, pieces[2]], [pieces[0]] * 5):
        with pytest.raises(InputError, match="loses and repeats nothing"):
            list(write.process((0, delivered)))
    assert contents(tmp_path) == {}
    ordinals = [ordinal for ordinal, _ in pieces]
    gather = transforms._AwaitFn(range(5), (0, 2))
    for named in (ordinals[1:], ordinals[:-1], [*ordinals, 2], [0] * 5):
        with pytest.raises(InputError, match="loses and repeats nothing"):
            list(gather.process((0, named)))
    assert list(gather.process((0, ordinals[::-1]))) == [0, 2]
    list(write.process((0, pieces)))
    assert len(contents(tmp_path)) == 1


def test_several_workers_of_the_local_runner_are_refused(
    tmp_path: pathlib.Path, dataset: Dataset, make_small_layout: MakeLayout
) -> None:
    with pytest.raises(InputError, match="direct_num_workers=2"):
        write_batches(
            dataset=dataset,
            layout=make_small_layout(8),
            out=tmp_path / "o",
            options=PipelineOptions(["--direct_num_workers=2"]),
        )
    assert not (tmp_path / "o").exists()


def test_bytes_depend_on_the_key_and_not_on_threads_or_the_shuffle(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_small_layout(8)

    def run(name: str, key: pathlib.Path = key_file, **options: object) -> dict:
        out = tmp_path / name
        write_batches(dataset=dataset, layout=layout, out=out, key_file=key, **options)
        return contents(out)

    one = run("one", memory_limit=sizing._BASE_BYTES + (1 << 20))
    monkeypatch.setattr(poisson_batching, "local_threads", lambda *_: 4)
    assert run("threads") == one
    engine = PipelineOptions(["--runner=BundleBasedDirectRunner"])
    assert run("files", options=engine) == one
    assert run("by-value", options=engine, shuffle="engine") == one
    create_key_file(tmp_path / "other.key")
    other = run("other", key=tmp_path / "other.key")
    assert set(other) == set(one)
    assert not any(other[name] == one[name] for name in one)
    # Other batch sizes, but manifests differ in the commitment to the key alone.
    manifests = [read_manifest(tmp_path / name).to_json() for name in ("one", "other")]
    ids = [manifest.pop("batches_id") for manifest in manifests]
    assert ids[0] != ids[1]
    assert manifests[0] == manifests[1]


def test_a_limit_below_one_block_or_range_of_steps_is_refused(
    dataset: Dataset, make_small_layout: MakeLayout
) -> None:
    layout = make_small_layout()
    with pytest.raises(InputError, match="memory_limit=1000"):
        local_threads(layout, dataset, 1000)
    assert local_threads(layout, dataset, 1 << 40) == len(os.sched_getaffinity(0))
    # A worker of an engine does the work of one thread.
    least = worker_bytes(layout, dataset)
    by_value = worker_bytes(layout, dataset, by_value=True)
    assert by_value == least + sizing._CHANNEL_BYTES  # what is on its way
    assert local_threads(layout, dataset, least) == 1
    with pytest.raises(InputError, match=f"memory_limit={least - 1}"):
        local_threads(layout, dataset, least - 1)


def test_existing_output_is_never_replaced(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    batches: pathlib.Path,
) -> None:
    before = contents(batches)
    with pytest.raises(InputError, match="it holds finished batches"):
        write_batches(dataset=dataset, layout=make_small_layout(8), out=batches)
    assert contents(batches) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="empty or new folder"):
        write_batches(
            dataset=dataset, layout=make_small_layout(8), out=tmp_path / "full"
        )
    assert os.listdir(tmp_path / "full") == ["thesis.txt"]


def test_an_unfinished_job_of_other_options_input_or_key_is_refused(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, out = make_small_layout(8), tmp_path / "o"
    job_folder.open_job(out, layout, dataset, key_file)
    create_key_file(tmp_path / "other.key")

    def resume(**changes: object) -> None:
        options = {"dataset": dataset, "layout": layout, "key_file": key_file}
        write_batches(out=out, **{**options, **changes})  # type: ignore[arg-type]

    with pytest.raises(InputError, match="the same options or columns"):
        resume(layout=make_small_layout(9))
    with pytest.raises(InputError, match="the same sampling key"):
        resume(key_file=tmp_path / "other.key")
    footers = {**dataset.footers, "part-0.parquet": "0" * 64}
    changed = dataclasses.replace(dataset, footers=footers)
    with pytest.raises(InputError, match="the same input"):
        resume(dataset=changed)
    resume()
    assert verify(out).findings == ()


def test_two_jobs_do_not_write_one_folder(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
) -> None:
    layout, out = make_small_layout(8), tmp_path / "o"
    job_folder.open_job(out, layout, dataset, key_file)
    with (
        job_folder.lock_job(out),
        pytest.raises(InputError, match="no other job"),
    ):
        write_batches(dataset=dataset, layout=layout, out=out, key_file=key_file)


def test_an_unfinished_job_of_another_version_is_refused(
    tmp_path: pathlib.Path, dataset: Dataset, make_small_layout: MakeLayout
) -> None:
    """Its finished files hold other choices than this version would go on with."""
    layout, out = make_small_layout(8), tmp_path / "o"
    job_folder.open_job(out, layout, dataset, None)
    path = out / "private" / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "1"}))
    with pytest.raises(InputError, match=r"same batch format version.*release"):
        write_batches(dataset=dataset, layout=layout, out=out)
    assert not list(out.glob("*.tfrecord"))
