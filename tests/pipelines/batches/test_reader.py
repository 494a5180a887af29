"""Guarantees of the reader, the manifest and verify."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.batches.folder import (
    read_batches,
    read_checksums,
    read_manifest,
    write_manifest,
)
from pipelines.batches.verify import verify
from pipelines.core.batches.batch_format import (
    PhysicalBatch,
    decode_batch,
    encode_batch,
    iterate_records,
    write_record,
)
from pipelines.core.batches.manifest import Manifest, RecordChecksum
from pipelines.core.batches.reader import ALL, Share
from tests.trainer.conftest import SEAL_KEY, make_rows, write_batches

Fault = Callable[[pathlib.Path], None]
Records = tuple[RecordChecksum, ...]


SHARES = [Share(0, 1), Share(0, 2), Share(1, 2), Share(2, 3)]


def held(batch: PhysicalBatch) -> tuple[object, ...]:
    values = [*batch.columns.values(), batch.weight]
    return batch.step, batch.part, *(value.tobytes() for value in values)


def test_every_batch_is_one_workers_in_step_order(batches: pathlib.Path) -> None:
    whole = list(map(held, read_batches(batches)))
    assert [h[:2] for h in whole] == [(s, part) for s in range(40) for part in range(2)]
    for share in SHARES:
        for first_step in (0, 1, 17, 39, 40):
            found = map(held, read_batches(batches, first_step=first_step, share=share))
            assert list(found) == [
                h for h in whole if h[0] >= first_step and share.has(h[1])
            ]


@pytest.mark.parametrize("first_step", [-1, 41, 1.0])
def test_a_start_outside_the_plan_is_refused(
    batches: pathlib.Path, first_step: int
) -> None:
    with pytest.raises(InputError, match="first_step"):
        read_batches(batches, first_step=first_step)


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
    manifest = read_manifest(folder)
    # Whatever the key: the third file or, if it has no such place, one behind it.
    for path in files_of(folder)[2:]:
        before = list(iterate_records(path.read_bytes()))
        if (records := edit(before)) != before:
            break
    file, sums = io.BytesIO(), list[RecordChecksum]()
    for record in records:
        batch = decode_batch(record, manifest.columns, manifest.physical_batch_size)
        named = {"step": batch.step, "part": batch.part}
        sums.append(write_record(file.write, record, **named))
    path.write_bytes(file.getvalue())
    change(folder, path.name, tuple(sums))


def change(
    folder: pathlib.Path, name: str, records: tuple[RecordChecksum, ...]
) -> None:
    """Edits the checksums of a file, as a faulty writer would."""
    files = dict(read_checksums(folder).files)
    files[name] = dataclasses.replace(files[name], records=records)
    write_manifest(folder, read_manifest(folder), files, seal_key=SEAL_KEY)


def skip_a_step(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[2:])


def drop_a_part(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[:1] + records[2:])


def drop_the_end(folder: pathlib.Path) -> None:
    _rewrite(folder, lambda records: records[:-1])


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
    (drop_a_part, IN_ORDER),
    (drop_the_end, "to end with step"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_no_fault_passes_the_readers(
    batches: pathlib.Path, fault: Fault, message: str
) -> None:
    fault(batches)
    for shares in ([ALL], [Share(0, 2), Share(1, 2)]):
        errors = []
        for share in shares:
            try:
                list(read_batches(batches, share=share))
            except InputError as error:
                errors.append(str(error))
        assert any(message in error for error in errors)
        assert not any("\n" in error for error in errors)


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


def flip_in(folder: pathlib.Path, at: int) -> None:
    path = files_of(folder)[2]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_found_by_the_worker_whose_it_is(
    batches: pathlib.Path,
) -> None:
    checksum = read_checksums(batches).files[files_of(batches)[2].name]
    first, second = checksum.records[:2]
    for at in (0, 11, first.size // 2, first.size - 1):
        flip_in(batches, at)
        with pytest.raises(InputError, match=CHANGED):
            list(read_batches(batches, share=Share(first.part % 2, 2)))
        list(read_batches(batches, share=Share(second.part % 2, 2)))
        flip_in(batches, at)


def fewer(records: Records) -> Records:
    """The last record is taken for a part of the one before it."""
    *before, one, other = records
    return (*before, dataclasses.replace(one, size=one.size + other.size))


def larger(records: Records) -> Records:
    return dataclasses.replace(records[0], size=records[0].size + 1), *records[1:]


def other_digest(records: Records) -> Records:
    digest = records[0].sha256[1:] + records[0].sha256[:1]
    return dataclasses.replace(records[0], sha256=digest), *records[1:]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda records: records[::-1], "in order; found step"),
        (fewer, "to end with step"),
        (larger, CHANGED),
        (other_digest, CHANGED),
    ],
)
def test_checksums_that_are_not_of_the_records_are_refused(
    batches: pathlib.Path, edit: Callable[[Records], Records], message: str
) -> None:
    name = files_of(batches)[2].name
    change(batches, name, edit(read_checksums(batches).files[name].records))
    with pytest.raises(InputError, match=message):
        list(read_batches(batches, share=Share(0, 2)))
    [finding] = verify(batches).findings
    assert name in finding


def test_records_of_other_steps_than_their_checksums_say_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    """Of an untruncated plan, where another number of parts is possible."""
    steps = [make_rows(size) for size in (9, 3)]
    folder = write_batches(
        tmp_path / "o", steps, physical_batch_size=4, truncated_batch_size=None
    ).path
    [(name, sums)] = read_checksums(folder).files.items()
    labels = [(0, 0), (0, 1), (1, 0), (1, 1)]  # truly 0 0, 0 1, 0 2, 1 0
    change(
        folder,
        name,
        tuple(
            dataclasses.replace(record, step=step, part=part)
            for (step, part), record in zip(labels, sums.records, strict=True)
        ),
    )
    with pytest.raises(InputError, match="checksums of the records"):
        list(read_batches(folder))
    [finding] = verify(folder).findings
    assert "checksums of the records" in finding


@pytest.mark.parametrize("damage", [{"records": [""]}, {"size": 7}, {"records": 7}, "",
                                    "5", "g" * 64, "5" * 62])  # fmt: skip
def test_malformed_checksums_are_refused_in_one_line(
    batches: pathlib.Path, damage: Any
) -> None:
    """Seen: without a whole key, anybody who knows the records makes the seal."""
    path = batches / "private" / "checksums.json"
    fields = json.loads(path.read_bytes())
    if isinstance(damage, str):
        fields["seal_key"] = damage
    else:
        next(iter(fields["files"].values())).update(damage)
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError, match="to hold checksums") as error:
        read_batches(batches)
    assert "\n" not in str(error.value)
