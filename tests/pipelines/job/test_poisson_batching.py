"""Guarantees of pipelines.job.transforms and pipelines.job.poisson_batching."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.plan import SAMPLERS
from accounting.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.batches.reader import read_batches
from pipelines.batches.verify import verify
from pipelines.core.sampling.samplers import (
    Participations,
    find_boundaries,
    sample_block,
)
from pipelines.files.key_files import create_key_file, insecure_key, read_key_file
from pipelines.inputs.known_input import know_input
from pipelines.inputs.parquet_blocks import Dataset, list_blocks, read_block
from pipelines.job import job_folder, packing, poisson_batching, sizing, transforms
from pipelines.job.packing import Layout, sample_and_pack
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import local_threads, worker_bytes
from pipelines.job.steps import map_step, reduce_step

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


def expected_ids(dataset: Dataset, layout: Layout, key: bytes) -> dict[int, list[int]]:
    """The same by a per-row loop over the sampler's choices: no Beam, no packing."""
    steps: dict[int, list[tuple[int, int]]] = {
        step: [] for step in range(layout.plan.num_steps)
    }
    key = know_input(key, dataset).data_set_key(key)
    rows_of = [block.rows for block in dataset.blocks]
    boundaries = find_boundaries(layout.plan, key, rows_of)
    for block in dataset.blocks:
        rows = read_block(block, dataset.columns, dataset.is_listed)
        chosen = sample_block(layout.plan, key, block.rows, boundaries)
        for row, step, priority in zip(
            chosen.row, chosen.step, chosen.priority, strict=True
        ):
            steps[int(step)].append((int(priority), int(rows["id"][row])))
    cap = layout.plan.truncated_batch_size
    return {s: [i for _, i in sorted(found)][:cap] for s, found in steps.items()}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_hold_what_the_sampler_chose(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
    sampler: str,
) -> None:
    cap = 11 if sampler == "truncated-poisson" else None
    layout = make_small_layout(
        4, sampler=sampler, truncated_batch_size=cap, num_epochs=4
    )
    write_batches(dataset=dataset, layout=layout, out=tmp_path / "o", key_file=key_file)
    expected = expected_ids(dataset, layout, read_key_file(key_file))
    assert ids_by_step(tmp_path / "o") == expected
    largest = max(len(ids) for ids in expected.values())
    if sampler in ("poisson", "balls-and-bins"):
        assert largest > 11
    else:
        assert largest == layout.plan.largest_batch_size
    assert verify(tmp_path / "o").findings == ()


@pytest.mark.parametrize("sampler", ["truncated-poisson", "poisson"])
def test_every_step_is_written_also_when_no_example_chose_it(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    sampler: str,
) -> None:
    cap = 3 if sampler == "truncated-poisson" else None
    layout = make_small_layout(
        sampler=sampler, expected_batch_size=1, num_steps=500, truncated_batch_size=cap
    )
    write_batches(dataset=dataset, layout=layout, out=tmp_path / "o")
    steps = ids_by_step(tmp_path / "o")
    assert sorted(steps) == list(range(500))
    # (1 - 1/100)^100 = 0.37 of 500 steps are empty; none of them with chance 1e-99.
    assert sum(not ids for ids in steps.values()) > 100


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


_RUN = """
import sys
from accounting.plan import DpSgdPlan
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
source, out, key = sys.argv[1:]
dataset = list_blocks(source)
plan = DpSgdPlan(sampler="truncated-poisson", num_examples=100, expected_batch_size=10,
                 num_steps=40, truncated_batch_size=14)
layout = make_layout(plan, dataset, 8)
print("started", flush=True)
write_batches(dataset=dataset, layout=layout, out=out, key_file=key)
"""


@pytest.mark.thorough
def test_a_killed_job_is_finished_by_the_same_command(
    tmp_path: pathlib.Path,
    root: pathlib.Path,
    input_folder: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
) -> None:
    """SIGKILL as soon as k files are there, for several k; then run it again."""
    whole = tmp_path / "whole"
    layout = make_small_layout(8)
    write_batches(dataset=dataset, layout=layout, out=whole, key_file=key_file)
    out = tmp_path / "killed"
    command = [sys.executable, "-c", _RUN, str(input_folder), str(out), str(key_file)]
    kept: dict[str, int] = {}
    for least in (1, 6, 12):
        process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 600
        while len(list(out.glob("*.tfrecord"))) < least and process.poll() is None:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
        process.wait()
        for name, changed in kept.items():
            assert (out / name).stat().st_mtime_ns == changed, "written twice"
        finished = job_folder._finished(out, layout)
        kept = {
            layout.file(g).name: (out / layout.file(g).name).stat().st_mtime_ns
            for g in finished
        }
        # A file under its final name is complete, killed or not.
        for path in out.glob("*.tfrecord"):
            assert path.read_bytes() == (whole / path.name).read_bytes()
    # The last kill may have come at any moment of the end, or after it.
    if not (out / "manifest.json").exists() or (out / "private" / "job.json").exists():
        write_batches(dataset=dataset, layout=layout, out=out, key_file=key_file)
    assert contents(out) == contents(whole)
    assert sorted(os.listdir(out / "private")) == ["checksums.json"]


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
    state = json.loads(path.read_text())
    for change in ({"version": "1"}, {}):  # version 1 did not say which it was
        state.pop("version", None)
        path.write_text(json.dumps({**state, **change}))
        with pytest.raises(InputError, match=r"same batch format version.*release"):
            write_batches(dataset=dataset, layout=layout, out=out)
    assert not list(out.glob("*.tfrecord"))


def test_a_workers_error_is_one_line_and_resumable(
    tmp_path: pathlib.Path,
    input_folder: pathlib.Path,
    make_small_layout: MakeLayout,
) -> None:
    copy = tmp_path / "input"
    copy.mkdir()
    for path in input_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    dataset, layout = list_blocks(str(copy)), make_small_layout(8)
    lost = (copy / "part-1.parquet").read_bytes()
    (copy / "part-1.parquet").unlink()
    out = tmp_path / "o"
    with pytest.raises(InputError, match="to be readable") as error:
        write_batches(dataset=dataset, layout=layout, out=out)
    assert "\n" not in str(error.value)
    assert not (out / "manifest.json").exists()
    (copy / "part-1.parquet").write_bytes(lost)
    write_batches(dataset=dataset, layout=layout, out=out)
    assert verify(out).findings == ()


def test_success_with_missing_files_is_noticed(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poisson_batching, "_run_pipeline", lambda *arguments: None)
    with pytest.raises(InputError, match="0 are there"):
        write_batches(dataset=dataset, layout=make_small_layout(8), out=tmp_path / "o")
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_the_pipeline_holds_no_key(
    tmp_path: pathlib.Path,
    dataset: Dataset,
    make_small_layout: MakeLayout,
    key_file: pathlib.Path,
    pipeline_bytes: Callable[..., bytes],
) -> None:
    """The key is in neither the pipeline proto nor any public file, in any spelling."""
    import apache_beam as beam

    key = read_key_file(key_file)
    layout = make_small_layout(8)
    pipeline = beam.Pipeline()
    _ = (
        pipeline
        | beam.Create(dataset.blocks)
        | transforms.WriteBatches(
            layout,
            str(tmp_path / "o"),
            map_step.Secrets(key_file=str(key_file)),
            dataset=dataset,
        )
    )
    proto = pipeline_bytes(pipeline)
    assert str(key_file).encode() in proto
    write_batches(dataset=dataset, layout=layout, out=tmp_path / "o", key_file=key_file)
    public = (tmp_path / "o" / "manifest.json").read_bytes()
    for secret in (key, key.hex().encode(), key[::-1], str(list(key)).encode()):
        assert secret not in proto
        assert secret not in public


def test_the_number_of_real_rows_is_not_in_the_manifest(
    finished: pathlib.Path, tmp_path: pathlib.Path, dataset: Dataset,
    make_small_layout: MakeLayout, key_file: pathlib.Path,
) -> None:  # fmt: skip
    """Two keys, so other batch sizes: the manifests differ in the commitment alone."""
    layout = make_small_layout(8)
    write_batches(dataset=dataset, layout=layout, out=tmp_path / "o", key_file=key_file)
    one = read_manifest(finished).to_json()
    other = read_manifest(tmp_path / "o").to_json()
    assert one.pop("batches_id") != other.pop("batches_id")
    assert one == other
