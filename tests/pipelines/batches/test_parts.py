"""Guarantees of the reader of one worker's parts."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable

import pytest

from accounting.validation import InputError
from pipelines.batches import parts, record_checksums
from pipelines.batches.batch_format import PhysicalBatch
from pipelines.batches.manifest import (
    FileChecksum,
    read_checksums,
    read_manifest,
    write_manifest,
)
from pipelines.batches.parts import has_record_checksums, read_parts
from pipelines.batches.reader import read_batches
from pipelines.batches.share import Share
from pipelines.batches.verify import verify
from pipelines.files.paths import StrPath
from tests.pipelines.batches.test_reader import CHANGED, FAULTS, Fault, files_of
from tests.trainer.conftest import make_rows, write_batches


def held(batch: PhysicalBatch) -> tuple[object, ...]:
    values = [*batch.columns.values(), batch.weight]
    return batch.step, batch.part, *(value.tobytes() for value in values)


def change(folder: pathlib.Path, edit: Callable[[FileChecksum], FileChecksum]) -> None:
    """Edits the checksum of the third file, as a faulty writer would."""
    checksums = read_checksums(folder)
    name = files_of(folder)[2].name
    checksums[name] = edit(checksums[name])
    write_manifest(folder, read_manifest(folder), checksums)


def without_records(folder: pathlib.Path) -> None:
    checksums = {
        name: dataclasses.replace(
            sums,
            records=(),
            sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        )
        for name, sums in read_checksums(folder).items()
    }
    write_manifest(folder, read_manifest(folder), checksums)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("first_step", [0, 17, 40])
@pytest.mark.parametrize("old", [False, True])
def test_every_batch_is_one_workers_in_step_order(
    batches: pathlib.Path, count: int, first_step: int, old: bool
) -> None:
    if old:
        without_records(batches)
    assert has_record_checksums(batches) != old
    wanted = list(map(held, read_batches(batches, first_step=first_step)))
    for rank in range(count):
        share = Share(rank, count)
        found = list(map(held, read_parts(batches, share, first_step=first_step)))
        assert found == [h for h in wanted if h[1] % count == rank]


def test_a_worker_reads_its_share_of_the_bytes(
    batches: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0
    range_reader = parts.range_reader

    def counting(folder: StrPath) -> Callable[[str, int, int], bytes]:
        read = range_reader(folder)

        def counted(path: str, start: int, size: int) -> bytes:
            nonlocal num_read
            num_read += size
            return read(path, start, size)

        return counted

    monkeypatch.setattr(parts, "range_reader", counting)
    all_bytes = sum(path.stat().st_size for path in files_of(batches))
    for rank in range(2):
        num_read = 0
        list(read_parts(batches, Share(rank, 2)))
        assert abs(num_read - all_bytes / 2) < all_bytes / 1000


@pytest.mark.parametrize(("fault", "message"), FAULTS)
@pytest.mark.parametrize("old", [False, True])
def test_no_fault_passes_all_workers(
    batches: pathlib.Path, fault: Fault, message: str, old: bool
) -> None:
    if old:
        without_records(batches)
    fault(batches)
    errors = []
    for rank in range(2):
        try:
            list(read_parts(batches, Share(rank, 2)))
        except InputError as error:
            errors.append(str(error))
    assert errors
    assert any(message in error for error in errors)
    assert not any("\n" in error for error in errors)


def flip_in(folder: pathlib.Path, at: int) -> None:
    path = files_of(folder)[2]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_found_by_the_worker_whose_it_is(
    batches: pathlib.Path,
) -> None:
    checksum = read_checksums(batches)[files_of(batches)[2].name]
    first, second = map(record_checksums.parse, checksum.records[:2])
    for at in (0, 11, first.size // 2, first.size - 1):
        flip_in(batches, at)
        with pytest.raises(InputError, match=CHANGED):
            list(read_parts(batches, Share(first.part % 2, 2)))
        list(read_parts(batches, Share(second.part % 2, 2)))
        flip_in(batches, at)


def reversed_records(sums: FileChecksum) -> FileChecksum:
    return dataclasses.replace(sums, records=sums.records[::-1])


def fewer(sums: FileChecksum) -> FileChecksum:
    """The last record is taken for a part of the one before it."""
    one, other = map(record_checksums.parse, sums.records[-2:])
    joined = dataclasses.replace(one, size=one.size + other.size)
    return dataclasses.replace(sums, records=(*sums.records[:-2], str(joined)))


def larger(sums: FileChecksum) -> FileChecksum:
    step, part, size, rest = sums.records[0].split()
    return dataclasses.replace(
        sums, records=(f"{step} {part} {int(size) + 1} {rest}", *sums.records[1:])
    )


def other_digest(sums: FileChecksum) -> FileChecksum:
    head, _, digest = sums.records[0].rpartition(" ")
    swapped = digest[1:] + digest[:1]
    return dataclasses.replace(sums, records=(f"{head} {swapped}", *sums.records[1:]))


def no_text(sums: FileChecksum) -> FileChecksum:
    return dataclasses.replace(sums, records=("", *sums.records[1:]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (reversed_records, "in order; found step"),
        (fewer, "to end with step"),
        (larger, "checksums of the records"),
        (other_digest, CHANGED),
        (no_text, "checksums of the records"),
    ],
)
def test_checksums_that_are_not_of_the_records_are_refused(
    batches: pathlib.Path, edit: Callable[[FileChecksum], FileChecksum], message: str
) -> None:
    change(batches, edit)
    with pytest.raises(InputError, match=message):
        list(read_parts(batches, Share(0, 2)))
    [finding] = verify(batches).findings
    assert files_of(batches)[2].name in finding


def test_records_of_other_steps_than_their_checksums_say_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    """Of an untruncated plan, where another number of parts is possible."""
    steps = [make_rows(size) for size in (9, 3)]
    folder = write_batches(
        tmp_path / "o", steps, physical_batch_size=4, truncated_batch_size=None
    ).path
    checksums = read_checksums(folder)
    [(name, sums)] = checksums.items()
    labels = ["0 0", "0 1", "1 0", "1 1"]  # truly 0 0, 0 1, 0 2, 1 0
    records = [
        f"{label} {text.split(' ', 2)[2]}"
        for label, text in zip(labels, sums.records, strict=True)
    ]
    checksums[name] = dataclasses.replace(sums, records=tuple(records))
    write_manifest(folder, read_manifest(folder), checksums)
    with pytest.raises(InputError, match="checksums of the records"):
        list(read_parts(folder, Share(0, 1)))
    [finding] = verify(folder).findings
    assert "checksums of the records" in finding


def test_a_record_checksum_round_trips() -> None:
    found = record_checksums.RecordChecksum(step=3, part=1, size=9, sha256="a" * 64)
    assert record_checksums.parse(str(found)) == found
    for text in ("", "1 2 3", f"-1 2 3 {'a' * 64}", f"1 2 3 {'g' * 64}"):
        with pytest.raises(ValueError, match="step, part, size"):
            record_checksums.parse(text)
