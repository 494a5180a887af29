"""Batches in a store are those here, in few bytes, also where the store fails."""

from __future__ import annotations

import contextlib
import pathlib
import threading

import pytest

from accounting.core.validation import InputError
from pipelines.batches import folder as of_folder
from pipelines.batches.folder import read_batches, read_checksums, read_manifest
from pipelines.core.batches import reader
from pipelines.core.batches.reader import ALL, Share
from pipelines.files import storage
from tests.conftest import S3Requests
from tests.pipelines.batches.test_reader import files_of, held

SHARES = [ALL, Share(1, 2)]


@pytest.fixture
def stored(batches: pathlib.Path, s3_folder: str) -> str:
    """The batches, with a key that no reader needs, in S3."""
    (batches / "private" / "sampling.key").write_text("secret")
    for path in batches.rglob("*.*"):
        storage.copy_to_store(path, f"{s3_folder}/{path.relative_to(batches)}")
    return s3_folder


def bytes_asked(requests: S3Requests) -> dict[tuple[str, int], int]:
    """(object, first byte) -> bytes of each range, none of them asked for twice."""
    found = {}
    for _, one in requests.asked:
        if "Range" in one:
            first, last = map(int, one["Range"].removeprefix("bytes=").split("-"))
            assert (one["Key"], first) not in found
            found[one["Key"], first] = last + 1 - first
    return found


@pytest.mark.parametrize("longest", [1, 1 << 20])
def test_workers_ask_for_each_byte_once_and_for_their_own_alone(
    batches: pathlib.Path,
    stored: str,
    s3_requests: S3Requests,
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", longest)
    all_bytes = sum(path.stat().st_size for path in files_of(batches))
    records = sum(len(sums.records) for sums in read_checksums(batches).files.values())
    for share in SHARES:
        s3_requests.asked.clear()
        wanted = list(map(held, read_batches(batches, share=share)))
        assert list(map(held, read_batches(stored, share=share))) == wanted
        asked = bytes_asked(s3_requests)
        assert sum(asked.values()) == pytest.approx(all_bytes / share.count, rel=1e-3)
        files = len(files_of(batches))
        together = longest > 1 and share == ALL  # neighbours are one range
        assert len(asked) == (files if together else records / share.count)
        names = {given["Key"].split("/", 1)[1] for _, given in s3_requests.asked}
        assert names == {
            "manifest.json", "private/checksums.json",
            *(path.name for path in files_of(batches)),
        }  # fmt: skip
        operations = {operation for operation, _ in s3_requests.asked}
        assert operations == {"GetObject", "HeadObject"}  # of whole files the size, too


def test_a_later_start_reads_no_earlier_step(
    batches: pathlib.Path, stored: str, s3_requests: S3Requests
) -> None:
    wanted = list(map(held, read_batches(batches, first_step=17)))
    assert list(map(held, read_batches(stored, first_step=17))) == wanted
    files = read_checksums(batches).files.values()
    later = [r.size for sums in files for r in sums.records if r.step >= 17]
    assert sum(bytes_asked(s3_requests).values()) == sum(later)


def test_a_store_that_goes_on_failing_ends_in_one_line_with_the_remedy(
    stored: str, s3_requests: S3Requests
) -> None:
    s3_requests.busy(1 << 30, ".tfrecord")
    with pytest.raises(InputError) as error:
        list(read_batches(stored))
    text = str(error.value)
    assert text.startswith(f"Expected batch file {stored}/batches-")
    assert "the store answered 503" in text
    assert "same command again: a run goes on from its last checkpoint" in text
    assert "\n" not in text


def test_a_changed_missing_or_short_object_is_refused_before_its_batches(
    batches: pathlib.Path, stored: str
) -> None:
    path = files_of(batches)[2]
    data = path.read_bytes()
    first = next(f for f in read_manifest(batches).files if f.name == path.name)
    flipped = bytes([*data[:-9], data[-9] ^ 1, *data[-8:]])
    for body, message in (
        (flipped, "was changed"),
        (data[:-1], "bytes are missing"),
        (None, "no such object"),
    ):
        if body is None:
            storage.delete(f"{stored}/{path.name}")
        else:
            storage.write_atomically(f"{stored}/{path.name}", body)
        found = []
        with pytest.raises(InputError, match=message):
            found.extend(batch.step for batch in read_batches(stored))
        assert max(found) < first.first_step


def test_what_is_read_ahead_is_bounded(
    batches: pathlib.Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(path.stat().st_size for path in files_of(batches))
    monkeypatch.setattr(reader, "RANGE_BYTES", largest)
    monkeypatch.setattr(of_folder, "_AHEAD_BYTES", 3 * largest)
    read, began = storage.read_range, threading.Semaphore(0)

    def counting(path: str, start: int, size: int) -> bytes:
        began.release()
        return read(path, start, size)

    monkeypatch.setattr(storage, "read_range", counting)
    with contextlib.closing(read_batches(stored)) as found:  # type: ignore[type-var]
        next(found)
        for _ in range(3):
            assert began.acquire(timeout=60)
        assert not began.acquire(blocking=False)
    assert len(files_of(batches)) > 4
