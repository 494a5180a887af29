"""Guarantees of storage: here, and in S3, the server of the moto package."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import stat
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.files import outputs, storage, stores
from tests.conftest import S3Requests


@pytest.fixture
def place(here_or_s3: str) -> str:
    """A new folder, here or in a store."""
    return here_or_s3


def test_what_is_written_is_read_listed_and_deleted(place: str) -> None:
    assert storage.names(place) == set()
    assert storage.sizes(f"{place}/none") == {}
    assert not storage.exists(f"{place}/a")
    assert storage.size(f"{place}/a") is None
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{place}/a")
    storage.make_folder(f"{place}/private")
    large = os.urandom(2 * stores._PART_BYTES + 7)
    for name, data in {"a": b"one", "empty": b"", "private/c": b"three"}.items():
        storage.write_atomically(f"{place}/{name}", data)
    with storage.new_file(f"{place}/b") as write:
        for start in range(0, len(large), 1 << 20):
            write(large[start : start + (1 << 20)])
    storage.write_atomically(f"{place}/a", b"another")
    assert storage.read_bytes(f"{place}/a") == b"another"
    assert storage.read_bytes(f"{place}/empty") == b""
    with storage.open_file(f"{place}/b") as file:
        assert file.seek(-9, os.SEEK_END) == len(large) - 9
        assert file.read() == large[-9:]
        file.seek(5 << 20)
        assert file.read(3 << 20) == large[5 << 20 : 8 << 20]
    assert storage.names(place) == {"a", "b", "empty", "private"}
    assert storage.sizes(place) == {"a": 7, "b": len(large), "empty": 0}
    every = {"a", "b", "empty", "private/c"}
    for folder in (place, f"{place}/"):
        assert set(storage.walk(folder)) == every
        assert storage.is_folder(folder)
    assert not storage.is_folder(f"{place}/a")
    for _ in range(2):
        storage.delete(f"{place}/a")
        storage.delete_folder(f"{place}/private")
    assert storage.names(place) == {"b", "empty"}


def test_of_several_at_once_one_creates_a_file(place: str) -> None:
    assert storage.create(f"{place}/b", memoryview(b"first"))
    assert not storage.create(f"{place}/b", b"second")
    assert storage.read_bytes(f"{place}/b") == b"first"
    barrier = threading.Barrier(4, timeout=20)

    def create(data: bytes) -> bool:
        barrier.wait()
        return storage.create(path, data)

    for number in range(8):
        path = f"{place}/{number}"
        with ThreadPoolExecutor(4) as threads:
            created = list(threads.map(create, [b"0", b"1", b"2", b"3"]))
        assert created.count(True) == 1
        assert storage.read_bytes(path) == b"%d" % created.index(True)


@pytest.mark.parametrize("size", [9, stores._PART_BYTES + 1])
def test_a_write_that_fails_never_appears_and_replaces_nothing(
    place: str, size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    storage.write_atomically(f"{place}/a", b"whole, by another worker")
    with contextlib.suppress(ZeroDivisionError), storage.new_file(f"{place}/a") as put:
        put(bytes(size))
        raise ZeroDivisionError
    gc.collect()
    assert storage.read_bytes(f"{place}/a") == b"whole, by another worker"
    assert storage.names(place) == {"a"}
    if place.startswith("s3"):
        bucket = pytest.importorskip("boto3").client("s3")
        assert "Uploads" not in bucket.list_multipart_uploads(Bucket="bucket")
    assert not capfd.readouterr().err


def test_a_range_is_exact_and_of_a_store_one_request(
    place: str, s3_requests: S3Requests
) -> None:
    path, data = f"{place}/a", os.urandom(100_000)
    storage.write_atomically(path, data)
    s3_requests.asked.clear()
    assert storage.read_range(path, 70_000, 900) == data[70_000:70_900]
    assert storage.read_range(path, 8, 16) == data[8:24]
    assert storage.read_range(path, 8, 0) == b""
    if place.startswith("s3"):
        ranges = ["bytes=70000-70899", "bytes=8-23"]
        found = [(name, given["Range"]) for name, given in s3_requests.asked]
        assert found == [("GetObject", each) for each in ranges]
    with pytest.raises(OSError, match="24 bytes are missing"):
        storage.read_range(path, len(data) - 8, 32)
    for absent in ((path, len(data), 1), (f"{path}bc", 0, 1)):
        with pytest.raises(OSError):  # noqa: PT011, each in words of its own
            storage.read_range(*absent)


def test_a_busy_store_is_asked_again_and_one_that_refuses_is_not(
    s3_bucket: str, s3_requests: S3Requests, tmp_path: pathlib.Path
) -> None:
    folder = f"{s3_bucket}/{uuid.uuid4().hex}"
    storage.write_atomically(f"{folder}/a", b"whole")
    (tmp_path / "a").write_bytes(b"whole")
    for operation in (
        lambda: storage.read_bytes(f"{folder}/a") == b"whole",
        lambda: storage.read_range(f"{folder}/a", 1, 2) == b"ho",
        lambda: storage.create(f"{folder}/{uuid.uuid4().hex}", b"x"),
        lambda: storage.copy_to_store(tmp_path / "a", f"{folder}/b") is None,
        lambda: storage.size(f"{folder}/a") == 5,
    ):
        s3_requests.busy(4)
        assert operation()

    for status, attempts in ((403, 1), (503, stores._ATTEMPTS)):
        asked: list[str] = []

        def fail(
            operation: str, _: Any, status: int = status, asked: list[str] = asked
        ) -> None:
            asked.append(operation)
            s3_requests.refuse(status, operation)

        s3_requests.fail = fail
        with pytest.raises(OSError, match=f"the store answered.*{status}") as error:
            storage.read_bytes(f"{folder}/a")
        assert error.value.filename == f"{folder}/a"
        assert "credential" not in str(error.value)
        assert len(asked) == attempts


def test_a_child_that_is_forked_reads_too(s3_bucket: str) -> None:
    path = f"{s3_bucket}/{uuid.uuid4().hex}"
    storage.write_atomically(path, b"whole")
    child = os.fork()
    if not child:
        os._exit(storage.read_bytes(path) != b"whole")
    assert os.waitpid(child, 0)[1] == 0
    assert storage.read_bytes(path) == b"whole"


def test_a_file_of_this_machine_is_flushed_renamed_and_private_if_asked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    for name in ("fsync", "replace", "posix_fadvise"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, n=name, r=real: (done.append(n), r(*a))[1]
        )
    storage.write_atomically(tmp_path / "a", b"x", mode=0o600)
    assert done == ["fsync", "replace"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a"]
    for flush, calls in ((True, ["fsync", "posix_fadvise"]), (False, [])):
        done.clear()
        with storage.new_file(tmp_path / "a", cached=False, flush=flush) as write:
            write(b"x")
        assert done == [*calls, "replace"]


def test_what_cannot_be_a_folder_in_a_store_is_refused_with_the_remedy(
    s3_bucket: str,
) -> None:
    for path, why in {
        "gs://nowhere/o": "pip install gcsfs|gs://nowhere/o to be a folder",
        "hdfs://host/o": "to be s3:// or gs://",
        f"{s3_bucket}/o*": "without any of",
        s3_bucket: "a folder in a bucket",
        "s3://missing/o": "NoSuchBucket.*Check its bucket",
    }.items():
        with pytest.raises(InputError, match=why) as error:
            outputs.check_folder(path, "--out")
        assert "\n" not in str(error.value)
    outputs.check_folder(f"{s3_bucket}/{uuid.uuid4().hex}", "--out")
