"""Guarantees of storage, and the whole job in stores that are not this disk.

The stores are those of ``memory_stores``, and s3://, Beam's own, against the server of
the moto package in this process.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import io
import os
import pathlib
import stat
import subprocess
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.utils import retry

from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.batches.reader import read_batches
from pipelines.batches.verify import verify
from pipelines.files import folders, storage, stores
from pipelines.files import key_files as keys
from pipelines.files.paths import StrPath
from pipelines.job import job_folder, poisson_batching
from tests.pipelines.conftest import Command, SmallJobs, contents, new_place
from tests.pipelines.memory_stores import STORES, Listener, Unfinished

ENGINE = PipelineOptions(["--runner=BundleBasedDirectRunner"])


@pytest.fixture(params=[*STORES, "s3"])
def place(request: pytest.FixtureRequest) -> str:
    """A new folder in a store, not made yet."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}/o"
    return new_place(request.param)


@pytest.fixture(autouse=True)
def _options_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSystems, "_pipeline_options", None)


@pytest.fixture
def listen() -> Iterator[Callable[[Listener], None]]:
    """Adds a listener to both stores in memory until the test ends."""
    yield lambda listener: [s.listeners.append(listener) for s in STORES.values()]
    for store in STORES.values():
        store.listeners.clear()


def upload(source: pathlib.Path, place: str) -> str:
    """Copies the files of a folder into a store."""
    storage.make_folder(place)
    for path in source.iterdir():
        storage.write_atomically(f"{place}/{path.name}", path.read_bytes())
    return place


# The small door.


def test_slices_of_a_store_ask_for_no_byte_beside_them(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beam's own reader would ask for 16 MiB."""
    from apache_beam.io.aws.s3io import S3Downloader

    asked: list[tuple[int, int]] = []
    get_range = S3Downloader.get_range

    def recording(self: Any, start: int, end: int) -> bytes:
        asked.append((start, end))
        return get_range(self, start, end)

    monkeypatch.setattr(S3Downloader, "get_range", recording)
    path, data = f"{s3_bucket}/{uuid.uuid4().hex}/a", os.urandom(1 << 20)
    storage.write_atomically(path, data)
    with storage.slices(path) as read:
        assert read(70_000, 900) == data[70_000:70_900]
        assert read(8, 16) == data[8:24]
        with pytest.raises(OSError, match="24 bytes are missing"):
            read(len(data) - 8, 32)
    assert asked[:2] == [(70_000, 70_900), (8, 24)]


def test_what_is_written_is_read_listed_and_deleted(place: str) -> None:
    assert storage.names(place) == set()
    assert storage.sizes(place) == {}
    assert not storage.exists(f"{place}/a")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{place}/a")
    for folder in (place, f"{place}/private"):
        storage.make_folder(folder)
        storage.make_folder(folder)
    # More than the 5 MiB at which Beam uploads a part, and less than two of them.
    large = os.urandom(6 << 20)
    for name, data in {"a": b"one", "b": large, "private/c": b"three"}.items():
        storage.write_atomically(f"{place}/{name}", data)
    storage.write_atomically(f"{place}/a", b"another")
    assert storage.read_bytes(f"{place}/a") == b"another"
    with storage.open_file(f"{place}/b") as file:
        file.seek(5 << 20)
        assert file.read(9) == large[5 << 20 :][:9]
    assert storage.names(place) == {"a", "b", "private"}
    assert storage.sizes(place).items() >= {"a": 7, "b": len(large)}.items()
    every = {("a",), ("b",), ("private", "c")}
    assert set(storage.walk(place, lambda names: True)) == every
    assert set(storage.walk(f"{place}/", lambda names: True)) == every
    assert storage.is_folder(place)
    assert not storage.is_folder(f"{place}/a")
    storage.delete(f"{place}/a")
    storage.delete(f"{place}/a")
    storage.delete_folder(f"{place}/private")
    storage.delete_folder(f"{place}/private")
    assert storage.names(place) == {"b"}


def test_a_file_is_created_once(place: str, tmp_path: pathlib.Path) -> None:
    for folder in (place, f"{tmp_path}/here"):
        storage.make_folder(folder)
        path = f"{folder}/a"
        assert storage.create(path, b"first")
        assert not storage.create(path, b"second")
        assert storage.read_bytes(path) == b"first"
        assert storage.names(folder) == {"a"}


@pytest.mark.parametrize("scheme", ["here", "s3"])
def test_one_of_several_at_once_creates_a_file(
    scheme: str,
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen to fail by one that is written where none was found before."""
    place = f"{tmp_path}/here"
    if scheme == "s3":
        place = f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}"
    storage.make_folder(place)
    contents = [b"%d" % number for number in range(8)]
    barrier = threading.Barrier(len(contents), timeout=20)
    write = storage.write_atomically

    def all_write(*given: Any, **more: Any) -> None:
        write(*given, **more)
        barrier.wait()

    monkeypatch.setattr(storage, "write_atomically", all_write)
    with ThreadPoolExecutor(len(contents)) as threads:
        created = list(
            threads.map(lambda data: storage.create(f"{place}/a", data), contents)
        )
    assert created.count(True) == 1
    assert storage.read_bytes(f"{place}/a") == contents[created.index(True)]


def test_a_write_to_s3_that_fails_never_appears_and_removes_nothing(
    s3_bucket: str,
) -> None:
    """Closing an unfinished file would publish what was written so far."""
    boto3 = pytest.importorskip("boto3")
    folder = f"{uuid.uuid4().hex}"
    path = f"{s3_bucket}/{folder}/a"
    uploads = functools.partial(
        boto3.client("s3").list_multipart_uploads, Bucket="bucket", Prefix=f"{folder}/"
    )
    storage.write_atomically(path, b"whole, by another worker")
    with contextlib.suppress(ZeroDivisionError), storage.new_file(path) as write:
        write(bytes(stores._PART_BYTES))  # a part is uploaded
        assert len(uploads()["Uploads"]) == 1
        raise ZeroDivisionError
    gc.collect()
    assert storage.read_bytes(path) == b"whole, by another worker"
    assert "Uploads" not in uploads()
    # A worker that was killed aborts nothing: the end of the job does.
    boto3.client("s3").create_multipart_upload(Bucket="bucket", Key=f"{folder}/b")
    assert storage.names(f"{s3_bucket}/{folder}") == {"a"}
    storage.delete_folder(f"{s3_bucket}/{folder}")
    assert "Uploads" not in uploads()


def test_an_upload_that_cannot_be_aborted_is_not_completed(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.client import BaseClient

    call = BaseClient._make_api_call

    def refuse(self: Any, operation: str, arguments: Any) -> Any:
        if operation == "AbortMultipartUpload":
            raise PermissionError
        return call(self, operation, arguments)

    path = f"{s3_bucket}/{uuid.uuid4().hex}/a"
    storage.write_atomically(path, b"whole, by another worker")
    monkeypatch.setattr(BaseClient, "_make_api_call", refuse)
    with contextlib.suppress(ZeroDivisionError), storage.new_file(path) as write:
        write(bytes(stores._PART_BYTES))  # a part is uploaded
        raise ZeroDivisionError
    assert storage.read_bytes(path) == b"whole, by another worker"


def test_ranges_of_s3_are_one_request_each_and_bytes_that_lack_are_an_error(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.client import BaseClient

    path, data = f"{s3_bucket}/{uuid.uuid4().hex}/a", os.urandom(100_000)
    storage.write_atomically(path, data)
    read = storage.range_reader(s3_bucket)
    asked: list[tuple[str, str]] = []
    call = BaseClient._make_api_call

    def recording(self: Any, operation: str, given: dict[str, str]) -> Any:
        asked.append((operation, given["Range"]))
        return call(self, operation, given)

    monkeypatch.setattr(BaseClient, "_make_api_call", recording)
    assert read(path, 70_000, 900) == data[70_000:70_900]
    assert read(path, 8, 16) == data[8:24]
    assert asked == [("GetObject", "bytes=70000-70899"), ("GetObject", "bytes=8-23")]
    with pytest.raises(OSError, match="bytes are missing"):
        read(path, len(data) - 8, 32)
    for absent in ((path, len(data), 1), (f"{path}bc", 0, 1)):
        with pytest.raises(OSError, match="the store answered"):
            read(*absent)
    assert len(asked) == 5  # what the store refuses is not asked for again


def test_ranges_of_google_cloud_storage_are_one_request_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Down to Google's library, whose name for a range's last byte is ``end``."""
    asked: list[dict[str, Any]] = []

    class Blob:
        def __init__(self, *names: str) -> None:
            self.names = names

        def blob(self, name: str) -> Blob:
            return Blob(*self.names, name)

        def download_as_bytes(self, **given: Any) -> bytes:
            asked.append({"names": self.names, **given})
            return bytes(range(100))[given["start"] : given["end"] + 1]

    client = types.SimpleNamespace(bucket=Blob)
    gcs_io = types.SimpleNamespace(client=client)
    files = types.SimpleNamespace(scheme=lambda: "gs", _gcsIO=lambda: gcs_io)
    monkeypatch.setattr(stores, "file_system", lambda _: files)
    read = storage.range_reader("gs://bucket/o")
    assert read("gs://bucket/o/a", 7, 3) == bytes([7, 8, 9])
    assert asked == [
        {"names": ("bucket", "o/a"), "start": 7, "end": 9, "raw_download": True}
    ]


@pytest.mark.parametrize("scheme", STORES)
@pytest.mark.parametrize("operation", ["create", "write", "appear", "rename"])
def test_a_write_that_fails_leaves_nothing_under_the_final_name(
    scheme: str,
    operation: str,
    listen: Callable[[Listener], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"{scheme}://host/{uuid.uuid4().hex}"
    storage.make_folder(place)
    if operation == "rename" and scheme == "memory":
        pytest.skip("an object store renames nothing")

    def fail(name: str, path: str) -> None:
        if name == operation and path.startswith(place):
            raise ValueError("quotes a credential")

    def write(self: Unfinished, data: bytes) -> int:
        io.BytesIO.write(self, data[: len(data) // 2])
        raise ValueError("quotes a credential")

    listen(fail)
    if operation == "write":
        monkeypatch.setattr(Unfinished, "write", write)
    with pytest.raises(OSError, match="ValueError") as error:
        storage.write_atomically(f"{place}/a", b"whole")
    assert "credential" not in str(error.value)
    assert "a" not in storage.sizes(place)


def test_a_copy_in_a_store_is_the_file(place: str, tmp_path: pathlib.Path) -> None:
    data = os.urandom(stores._PART_BYTES + 1)
    (tmp_path / "a").write_bytes(data)
    storage.make_folder(place)
    for _ in range(2):  # the second replaces the first
        storage.copy_to_store(tmp_path / "a", f"{place}/a")
        assert storage.read_bytes(f"{place}/a") == data
    assert storage.names(place) == {"a"}


def test_a_copy_is_tried_again_unless_the_store_refuses(
    memory_place: str,
    listen: Callable[[Listener], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RefusedError(Exception):
        code = 403

    waits: list[float] = []
    monkeypatch.setattr(retry.Clock, "sleep", lambda self, seconds: waits.append(1))
    failures = [ConnectionError(), ConnectionError()]

    def fail(name: str, path: str) -> None:
        if name == "create" and failures:
            raise failures.pop()

    listen(fail)
    (tmp_path / "a").write_bytes(b"whole")
    storage.make_folder(memory_place)
    storage.copy_to_store(tmp_path / "a", f"{memory_place}/a")
    assert storage.read_bytes(f"{memory_place}/a") == b"whole"
    assert len(waits) == 2
    failures[:] = [RefusedError(), RefusedError()]
    with pytest.raises(PermissionError, match="RefusedError 403"):
        storage.copy_to_store(tmp_path / "a", f"{memory_place}/a")
    assert (len(failures), len(waits)) == (1, 2)


def test_a_file_of_this_machine_is_flushed_renamed_and_private_if_asked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, n=name, r=real: (done.append(n), r(*a))[1]
        )
    storage.write_atomically(tmp_path / "a", b"x", mode=0o600)
    assert done == ["fsync", "replace"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="Linux alone has it")
def test_an_error_of_this_machine_is_told_as_the_system_tells_it() -> None:
    with pytest.raises(OSError, match="Input/output error"):
        storage.read_bytes("/proc/self/mem")  # its first page is nobody's


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux alone has it")
def test_what_is_not_read_again_leaves_memory_once_it_is_on_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(("fsync",)))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *a: done.append(a))
    with storage.new_file(tmp_path / "a", cached=False) as write:
        write(b"x")
    assert done == [("fsync",), (0, 0, os.POSIX_FADV_DONTNEED)]
    done.clear()
    with storage.new_file(tmp_path / "a") as write:
        write(b"x")
    with storage.new_file(tmp_path / "a", cached=False, flush=False) as write:
        write(b"x")
    assert done == [("fsync",)]


def test_a_scheme_whose_client_is_missing_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match=r"apache-beam\[gcp\]|bucket"):
        folders.check_folder("gs://nowhere", "--out")
    with pytest.raises(InputError, match="see Beam's list"):
        folders.check_folder("nosuch://bucket/o", "--out")
    with pytest.raises(InputError, match="without any of"):
        folders.check_folder("memory://bucket/o*", "--out")


# The job.


def test_commands_write_verify_and_read_the_same_bytes_in_a_store_as_here(
    place: str,
    tmp_path: pathlib.Path,
    input_folder: pathlib.Path,
    key_file: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    source, here = upload(input_folder, f"{place}-input"), tmp_path / "o"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    options = ["--key-file", key_file, "--batch-size=50", "--epochs=1"]
    options += ["--physical-batch-size=16"]
    for where, out in ((input_folder, here), (source, place)):
        ran = command("batches", "--input", where, "--out", out, *options)
        assert ran.code == 0, ran.printed
    assert contents(place) == contents(here)
    assert len(contents(place)) == read_manifest(place).plan.num_steps + 2
    assert not list(tmp_path.glob("dpsgd-spill-*"))
    assert command("verify", place).code == 0
    steps = [batch.step for batch in read_batches(place)]
    assert steps == [batch.step for batch in read_batches(here)]
    ran = command("batches", "--input", source, "--out", place, *options)
    assert (ran.code, "finished batches" in ran.printed) == (2, True), ran.printed
    # Damage is found.
    name = read_manifest(place).files[1].name
    data = bytearray(storage.read_bytes(f"{place}/{name}"))
    data[len(data) // 2] ^= 1
    storage.write_atomically(f"{place}/{name}", bytes(data))
    storage.write_atomically(f"{place}/batches-stray.tfrecord", b"stray")
    ran = command("verify", place)
    assert ran.code == 2
    found = [line for line in ran.printed.splitlines() if line.startswith("found:")]
    assert len(found) == 2, ran.printed
    assert name in found[0]
    assert "batches-stray" in found[1]
    with pytest.raises(InputError, match=name):
        list(read_batches(place))


@pytest.mark.parametrize(
    ("sampler", "shuffle"),
    [("truncated-poisson", "files"), ("dynamic-shuffle", "engine")],
)
def test_engines_write_the_same_bytes_in_a_store(
    sampler: str, shuffle: str, jobs: SmallJobs
) -> None:
    """Rows and boundaries travel as on a cluster: through engine and store alone."""
    layout, place = jobs.layout(4, sampler=sampler), new_place("memory")
    jobs.write(place, layout, shuffle=shuffle, options=ENGINE)
    assert contents(place) == contents(jobs.write("o", layout))


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", STORES)
def test_a_job_that_failed_anywhere_is_finished_without_repeating_finished_work(
    scheme: str, jobs: SmallJobs, listen: Callable[[Listener], None]
) -> None:
    scratch = jobs.folder / "scratch"
    out = whole = new_place(scheme)
    operations, left = 0, 1 << 30
    made: dict[str, list[str]] = {}

    def count(operation: str, path: str) -> None:
        nonlocal operations, left
        if not path.startswith(out):
            return  # the garbage collector closes what an earlier failure left open
        operations, left = operations + 1, left - 1
        if left < 0:
            raise ConnectionError("the network is gone")
        if operation in ("appear", "rename") and path.endswith(".tfrecord"):
            folder, name = path.split("/o/")
            made.setdefault(folder, []).append(name)

    listen(count)
    jobs.write(whole, scratch=scratch)
    total, undisturbed = operations, contents(whole)
    assert total > 4 * jobs.layout().num_groups
    for allowed in {*range(8), *range(8, total, 31), *range(total - 6, total)}:
        out, left = new_place(scheme), allowed
        with pytest.raises(InputError, match=r"where it stopped|readable"):
            jobs.write(out, scratch=scratch)
        left = 1 << 30
        if storage.exists(f"{out}/manifest.json") and not storage.exists(
            f"{out}/private/job.json"
        ):
            continue  # it failed after the end
        jobs.write(out, scratch=scratch)
        assert contents(out) == undisturbed, f"failure at {allowed} of {total}"
        names = made[out.removesuffix("/o")]
        # At most the files that were complete and not yet marked so are made again.
        assert len(names) - len(set(names)) <= os.cpu_count(), f"{allowed}: {names}"
    assert not os.listdir(scratch)


@pytest.mark.parametrize(
    ("sampler", "store"),
    zip(["truncated-poisson", "dynamic-shuffle"], STORES, strict=True),
)
def test_of_two_jobs_in_one_place_of_a_store_the_one_that_began_last_finishes(
    sampler: str, store: str, jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the second tidied away what the workers of the first read."""
    layout, place = jobs.layout(sampler=sampler), new_place(store)

    def write(machine: str) -> None:
        jobs.write(place, layout, scratch=jobs.folder / machine)

    run, began = poisson_batching._run_pipeline, 0

    def second_begins_in_the_first(*arguments: Any) -> None:
        nonlocal began
        began += 1
        if began == 1:
            write("second")
        run(*arguments)

    monkeypatch.setattr(poisson_batching, "_run_pipeline", second_begins_in_the_first)
    with pytest.raises(InputError, match="no other job to write"):
        write("first")
    assert began == 2
    assert verify(place).findings == ()
    others = storage.names(f"{place}/private") - {"checksums.json"}
    assert others <= {"files"}, "the first leaves nothing but marks of its files"


def test_another_job_and_other_contents_are_refused_in_a_store(
    memory_place: str, jobs: SmallJobs
) -> None:
    with pytest.raises(InputError, match="--key-file"):
        jobs.write(memory_place, key_file=None)
    storage.delete_folder(memory_place)
    layout, other = jobs.layout(), jobs.folder / "other"
    job_folder.open_job(memory_place, layout, jobs.dataset, jobs.key_file)
    key = keys.create_key_file(other).hex()
    with pytest.raises(InputError, match="same sampling key") as error:
        job_folder.open_job(memory_place, layout, jobs.dataset, other)
    assert key not in str(error.value)
    storage.delete_folder(memory_place)
    storage.make_folder(memory_place)
    storage.write_atomically(f"{memory_place}/notes.txt", b"mine")
    with pytest.raises(InputError, match="empty or new folder"):
        job_folder.check_out(memory_place)


def test_a_folder_for_the_shuffle_is_one_users_and_one_jobs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"

    def refused(path: pathlib.Path, message: str) -> None:
        with (
            pytest.raises(InputError, match=message),
            poisson_batching._local_shuffle(str(path), 1),
        ):
            pass

    (tmp_path / "target").mkdir()
    link.symlink_to(tmp_path / "target")
    refused(link, "of this user")
    with poisson_batching._local_shuffle(str(mine), 1) as spill:
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert pathlib.Path(spill.folder).parent == mine
        refused(mine, "no other job")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refused(mine, "of this user")


def test_the_shuffle_is_gone_before_the_job_counts_as_finished(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, delete = jobs.folder / "scratch", storage.delete_folder

    def killed(path: StrPath) -> None:
        if str(path).startswith(str(scratch)):
            raise KeyboardInterrupt
        delete(path)

    monkeypatch.setattr(storage, "delete_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        jobs.write(scratch=scratch)
    assert len(os.listdir(scratch)) == 1
    monkeypatch.setattr(storage, "delete_folder", delete)
    out = jobs.write(scratch=scratch)  # the same command cleans up
    assert not os.listdir(scratch)
    assert verify(out).findings == ()


def test_rows_of_another_user_are_not_taken_for_those_of_the_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, out = str(tmp_path / "scratch"), str(tmp_path / "o")
    folder = poisson_batching._spill_folder(out, place, "public")
    assert poisson_batching._spill_folder(out, place, "public") == folder
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match="of this user"):
        poisson_batching._spill_folder(out, place, "public")


# Keys.


def test_a_key_in_a_store_is_read_and_never_made_there(memory_place: str) -> None:
    storage.make_folder(memory_place)
    location = f"{memory_place}/sampling.key"
    with pytest.raises(InputError, match="readable"):
        keys.read_or_create_key_file(location)
    assert not storage.exists(location)
    storage.write_atomically(location, b"5a" * 32 + b"\n")
    assert keys.read_or_create_key_file(location) == b"\x5a" * 32


def test_a_managed_secret_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Beam's own client of Google's Secret Manager, down to Google's library."""
    asked: list[Any] = []

    class Client:
        def access_secret_version(self, request: dict[str, str]) -> Any:
            asked.append(request)
            if request["name"].endswith("/2"):
                raise PermissionError("quotes a token")
            return type("R", (), {"payload": type("P", (), {"data": b"5a" * 32})})

    module = type(sys)("google.cloud.secretmanager")
    module.SecretManagerServiceClient = Client  # type: ignore[attr-defined]
    cloud = type(sys)("google.cloud")
    cloud.secretmanager = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google.cloud", cloud)
    monkeypatch.setitem(sys.modules, "google.cloud.secretmanager", module)
    name = "projects/p/secrets/sampling-key/versions/1"
    assert keys.read_key_file(f"secretmanager://{name}") == b"\x5a" * 32
    assert asked == [{"name": name}]
    with pytest.raises(InputError, match="readable") as error:
        keys.read_key_file(f"secretmanager://{name[:-1]}2")
    assert "token" not in str(error.value)


# Workers touch no path but through the door.

WORKER_MODULES = (
    "job/transforms", "job/steps/map_step", "job/steps/reduce_step",
    "job/steps/bundles", "job/packing", "job/spill", "inputs/parquet_blocks",
    "inputs/known_input", "sampling/samplers", "sampling/shuffle",
    "core/streams",
    "core/batches/batch_format", "core/batches/tf_example", "core/batches/tfrecord",
)  # fmt: skip
_FORBIDDEN = {"open", "pathlib", "write_bytes", "write_text", "makedirs", "rename"}


def doors(source: str) -> set[str]:
    """Names in ``source`` that open, make or move files without ``storage``."""
    tree = ast.parse(source)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return used & _FORBIDDEN


@pytest.mark.parametrize("module", WORKER_MODULES)
def test_worker_code_opens_no_path_itself(root: pathlib.Path, module: str) -> None:
    source = (root / "pipelines" / f"{module}.py").read_text()
    assert doors(source) == set()
    assert doors(source + "\nimport pathlib\nopen('x').write_text('y')\n") == {
        "pathlib", "open", "write_text",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "bucket", "environment", "why"),
    [
        ("--input", "bucket", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Connection"),
        ("--out", "bucket", {"AWS_ACCESS_KEY_ID": ""}, "NoCredentials"),
        ("--out", "missing", {}, "404"),
    ],
)
def test_a_bucket_that_does_not_answer_is_said_soon(
    s3_bucket: str,
    tmp_path: pathlib.Path,
    option: str,
    bucket: str,
    environment: dict[str, str],
    why: str,
) -> None:
    """Beam asked again for more than 400 s, in silence."""
    del s3_bucket  # its address is in the environment
    pq.write_table(pa.table({"x": [1.0] * 100}), tmp_path / "t.parquet")
    paths = {"--input": tmp_path / "t.parquet", "--out": tmp_path / "out"}
    paths |= {option: f"s3://{bucket}/name", "--key-file": tmp_path / "key"}
    given = [str(word) for path in paths.items() for word in path]
    call = [*given, "--batch-size", "10", "--num-steps", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "dpsgd", "batches", *call],
        env=os.environ | {"AWS_EC2_METADATA_DISABLED": "true"} | environment,
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert f"s3://{bucket}" in ran.stderr
    assert why in ran.stderr
    assert "ake room" not in ran.stderr
