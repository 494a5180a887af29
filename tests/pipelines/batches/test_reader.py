"""Guarantees of the reader, the manifest and verify."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pathlib
import re
import shutil
import threading
from collections.abc import Callable

import numpy as np
import pytest

from accounting.validation import InputError
from pipelines.batches import reader
from pipelines.batches.batch_format import PhysicalBatch, decode_batch, encode_batch
from pipelines.batches.manifest import (
    Manifest,
    read_checksums,
    read_manifest,
    write_manifest,
)
from pipelines.batches.reader import read_batches
from pipelines.batches.tfrecord import iterate_records, write_record
from pipelines.batches.verify import verify
from pipelines.files.file_buffer import FileBuffer
from pipelines.files.paths import StrPath

Fault = Callable[[pathlib.Path], None]


def test_every_step_is_read_once_in_order(batches: pathlib.Path) -> None:
    order = [(batch.step, batch.part) for batch in read_batches(batches)]
    assert order == [(step, part) for step in range(40) for part in range(2)]


def test_batches_stay_as_they_are_while_the_next_file_is_read(
    batches: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = threading.Semaphore(0)

    class Counting(FileBuffer):
        def read(self, path: StrPath) -> memoryview:
            data = super().read(path)
            num_read.release()
            return data

    def digest(batch: PhysicalBatch) -> str:
        parts = [*batch.columns.values(), batch.weight]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    expected = [digest(batch) for batch in read_batches(batches)]
    monkeypatch.setattr(reader, "FileBuffer", Counting)
    found, kept = [], []
    starts = {file.first_step for file in read_manifest(batches).files[1:]}
    assert len(starts) > 2
    for batch in read_batches(batches):
        if batch.part == 0 and batch.step in {0, *starts} - {max(starts)}:
            # This file and, while it is used, that after it.
            for _ in range(2 if batch.step == 0 else 1):
                assert num_read.acquire(timeout=600)
        kept.append(batch)
        found.append(digest(batch))
    assert found == expected
    assert [digest(batch) for batch in kept] == expected


@pytest.mark.parametrize("first_step", [0, 1, 17, 39, 40])
def test_a_resumed_reader_starts_where_it_is_told(
    batches: pathlib.Path, first_step: int
) -> None:
    rest = [batch.step for batch in read_batches(batches, first_step=first_step)]
    assert sorted(set(rest)) == list(range(first_step, 40))


@pytest.mark.parametrize("first_step", [-1, 41, 1.0])
def test_a_start_outside_the_plan_is_refused(
    batches: pathlib.Path, first_step: int
) -> None:
    with pytest.raises(InputError, match="first_step"):
        read_batches(batches, first_step=first_step)


def test_manifest_round_trip(batches: pathlib.Path) -> None:
    manifest = read_manifest(batches)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.parts_per_step == 2


def test_the_manifest_holds_public_values_only(batches: pathlib.Path) -> None:
    fields = json.loads((batches / "manifest.json").read_bytes())
    assert set(fields) == {
        "format", "version", "plan", "columns", "physical_batch_size", "batches_id",
        "dataset", "files",
    }  # fmt: skip
    assert {tuple(file) for file in fields["files"]} == {
        ("first_step", "name", "num_steps")
    }
    private = batches / "private"
    assert private.stat().st_mode & 0o077 == 0
    assert (private / "checksums.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"format": "other"},
        {"extra": 1},
        {"files": []},
        {"physical_batch_size": 0},
        {"plan": {}},
        {"columns": [{"name": "x", "dtype": "string", "shape": []}]},
    ],
)
def test_a_manifest_that_is_not_one_is_refused(
    batches: pathlib.Path, change: dict[str, object]
) -> None:
    fields = read_manifest(batches).to_json()
    with pytest.raises(InputError):
        Manifest.from_json({**fields, **change})


def test_batches_of_version_1_are_refused_with_what_to_do(
    batches: pathlib.Path,
) -> None:
    """One key may have made the same choices for another data set: none can tell."""
    path = batches / "manifest.json"
    path.write_text(json.dumps({**read_manifest(batches).to_json(), "version": 1}))
    with pytest.raises(InputError, match=r"version=1 to be 2.*`dpsgd batches`"):
        read_manifest(batches)


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.tfrecord"))


def flip_a_byte(folder: pathlib.Path) -> None:
    path = files_of(folder)[3]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(folder: pathlib.Path) -> None:
    path = files_of(folder)[-1]
    path.write_bytes(path.read_bytes()[:-1])


def remove(folder: pathlib.Path) -> None:
    files_of(folder)[0].unlink()


def duplicate(folder: pathlib.Path) -> None:
    shutil.copy(files_of(folder)[0], files_of(folder)[1])


def swap(folder: pathlib.Path) -> None:
    one, other = files_of(folder)[:2]
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def edit_manifest(folder: pathlib.Path) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    edited = text.replace('"expected_batch_size": 10', '"expected_batch_size": 9')
    path.write_text(edited)


def drop_checksums(folder: pathlib.Path) -> None:
    (folder / "private" / "checksums.json").unlink()


def drop_manifest(folder: pathlib.Path) -> None:
    (folder / "manifest.json").unlink()


def _rewrite(folder: pathlib.Path, edit: Callable[[list[bytes]], list[bytes]]) -> None:
    """Replaces the records of a file, and its checksum, as a faulty writer would."""
    manifest, checksums = read_manifest(folder), read_checksums(folder)
    # Whatever the key: the third file or, if it has no such place, one behind it.
    for path in files_of(folder)[2:]:
        before = list(iterate_records(path.read_bytes()))
        if (records := edit(before)) != before:
            break
    file = io.BytesIO()
    for record in records:
        write_record(file.write, record)
    path.write_bytes(file.getvalue())
    checksums[path.name] = dataclasses.replace(
        checksums[path.name],
        size=len(file.getvalue()),
        sha256=hashlib.sha256(file.getvalue()).hexdigest(),
        num_records=len(records),
        records=(),
    )
    write_manifest(folder, manifest, checksums)


def skip_a_step(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[2:])


def repeat_a_step(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[:2] + records)


def reorder_steps(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[2:] + records[:2])


def drop_a_part(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[:1] + records[2:])


def drop_the_end(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[:-1])


def append_a_step(folder: pathlib.Path) -> None:
    extra = list(iterate_records(files_of(folder)[3].read_bytes()))[:2]
    _rewrite(folder, lambda records: records + extra)


def weigh_padding(folder: pathlib.Path) -> None:
    """A padding row that counts, in well-framed records of the same size."""
    real, more = np.array([1, 0], "<f4").tobytes(), np.array([1, 1], "<f4").tobytes()
    _rewrite(folder, lambda records: [r.replace(real, more) for r in records])


def move_weights(folder: pathlib.Path) -> None:
    """As many real rows as before, but not at the start."""
    real, moved = np.array([1, 0], "<f4").tobytes(), np.array([0, 1], "<f4").tobytes()
    _rewrite(folder, lambda records: [r.replace(real, moved) for r in records])


def fill_padding(folder: pathlib.Path) -> None:
    """Rows of weight 0 that hold something."""

    def edit(record: bytes) -> bytes:
        manifest = read_manifest(folder)
        size = manifest.physical_batch_size
        batch = decode_batch(record, manifest.columns, size)
        columns = {name: values.copy() for name, values in batch.columns.items()}
        columns["id"][batch.weight == 0] = 5
        full = encode_batch(
            columns, step=batch.step, part=batch.part, physical_batch_size=size
        )
        return full.replace(np.ones(size, "<f4").tobytes(), batch.weight.tobytes())

    _rewrite(folder, lambda records: [edit(record) for record in records])


CHANGED = "to be as it was written; it was changed"
IN_ORDER = "in order; found step"
FAULTS: list[tuple[Fault, str]] = [
    (flip_a_byte, CHANGED),
    (truncate, CHANGED),
    (remove, "to be readable: FileNotFoundError"),
    (duplicate, CHANGED),
    (swap, CHANGED),
    (edit_manifest, "it was edited"),
    (drop_checksums, "Without it the batches cannot be verified"),
    (drop_manifest, "run `dpsgd batches` to the end"),
    (skip_a_step, IN_ORDER),
    (repeat_a_step, IN_ORDER),
    (reorder_steps, IN_ORDER),
    (drop_a_part, IN_ORDER),
    (drop_the_end, "to end with step"),
    (append_a_step, IN_ORDER),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_no_fault_passes_the_reader(
    batches: pathlib.Path, fault: Fault, message: str
) -> None:
    fault(batches)
    with pytest.raises(InputError, match=message) as error:
        list(read_batches(batches))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        *FAULTS,
        (weigh_padding, "as many rows as were written"),
        (move_weights, "weight 1, then padding of zeros"),
        (fill_padding, "weight 1, then padding of zeros"),
    ],
)
def test_no_fault_passes_verify(
    batches: pathlib.Path, fault: Fault, message: str
) -> None:
    fault(batches)
    try:
        findings = "\n".join(verify(batches).findings)
    except InputError as error:
        findings = str(error)
    assert re.search(message, findings), findings


def test_verify_finds_every_damaged_file_and_strangers(batches: pathlib.Path) -> None:
    assert verify(batches).findings == ()
    flip_a_byte(batches)
    remove(batches)
    (batches / "batches-999.tfrecord").write_bytes(b"")
    assert len(verify(batches).findings) == 3
