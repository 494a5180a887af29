"""Batches in a store are those here, in few bytes, also where the store fails."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from apache_beam.utils import retry

from accounting.core.validation import InputError
from pipelines.batches import reader
from pipelines.batches.folder import read_checksums, read_manifest
from pipelines.batches.reader import read_batches
from pipelines.core.batches import ranges
from pipelines.core.batches.share import ALL, Share
from tests.pipelines.batches.test_reader import files_of, held

SHARES = [ALL, Share(1, 2)]


@pytest.fixture
def stored(batches: pathlib.Path, s3_bucket: str) -> str:
    """The batches, with a key that no reader needs, in S3."""
    (batches / "private" / "sampling.key").write_text("secret")
    return upload(batches, s3_bucket)


def upload(folder: pathlib.Path, bucket: str) -> str:
    boto3 = pytest.importorskip("boto3")
    client, prefix = boto3.client("s3"), uuid.uuid4().hex
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder)}"
            client.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    return f"{bucket}/{prefix}"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What S3 is asked of its objects, in any thread: operation and arguments."""
    client = pytest.importorskip("botocore.client").BaseClient
    asked: list[dict[str, Any]] = []
    call = client._make_api_call

    def recording(self: Any, operation: str, given: dict[str, Any]) -> Any:
        if "Key" in given:
            asked.append({"operation": operation, **given})
        return call(self, operation, given)

    monkeypatch.setattr(client, "_make_api_call", recording)
    return asked


def bytes_asked(requests: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """(object, first byte) -> bytes of each range, none of them asked for twice."""
    found = {}
    for one in requests:
        if "Range" in one:
            first, last = map(int, one["Range"].removeprefix("bytes=").split("-"))
            assert (one["Key"], first) not in found
            found[one["Key"], first] = last + 1 - first
    return found


@pytest.mark.parametrize("longest", [1, 1 << 20])
def test_workers_ask_for_each_byte_once_and_for_their_own_alone(
    batches: pathlib.Path,
    stored: str,
    requests: list[dict[str, Any]],
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", longest)
    all_bytes = sum(path.stat().st_size for path in files_of(batches))
    records = sum(len(sums.records) for sums in read_checksums(batches).files.values())
    for share in SHARES:
        requests.clear()
        wanted = list(map(held, read_batches(batches, share=share)))
        assert list(map(held, read_batches(stored, share=share))) == wanted
        asked = bytes_asked(requests)
        assert sum(asked.values()) == pytest.approx(all_bytes / share.count, rel=1e-3)
        files = len(files_of(batches))
        together = longest > 1 and share == ALL  # neighbours are one range
        assert len(asked) == (files if together else records / share.count)
        names = {one["Key"].split("/", 1)[1] for one in requests}
        assert names == {
            "manifest.json", "private/checksums.json",
            *(path.name for path in files_of(batches)),
        }  # fmt: skip
        assert {one["operation"] for one in requests} == {"GetObject"}


def test_a_later_start_reads_no_earlier_step(
    batches: pathlib.Path, stored: str, requests: list[dict[str, Any]]
) -> None:
    wanted = list(map(held, read_batches(batches, first_step=17)))
    assert list(map(held, read_batches(stored, first_step=17))) == wanted
    files = read_checksums(batches).files.values()
    later = [r.size for sums in files for r in sums.records if r.step >= 17]
    assert sum(bytes_asked(requests).values()) == sum(later)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """``failing(times)``: the store answers 503 so often to each range of batches.

    Returns the ranges that were asked for; nobody waits.
    """
    session = pytest.importorskip("botocore.httpsession").URLLib3Session
    response = pytest.importorskip("botocore.awsrequest").AWSResponse
    send = session.send

    class Empty:
        def stream(self, **_: Any) -> Iterator[bytes]:
            return iter(())

    def fail(times: int) -> list[str]:
        asked: list[str] = []
        lock = threading.Lock()

        def failing_send(self: Any, request: Any) -> Any:
            with lock:
                if ".tfrecord" in request.url:
                    asked.append(f"{request.url} {request.headers['Range']}")
                    if asked.count(asked[-1]) <= times:
                        return response(request.url, 503, {}, Empty())
            return send(self, request)

        monkeypatch.setattr(session, "send", failing_send)
        return asked

    monkeypatch.setattr(retry.Clock, "sleep", lambda self, seconds: None)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of the client itself
    return fail


def test_a_store_that_fails_for_a_while_is_asked_again(
    batches: pathlib.Path, stored: str, failing: Callable[[int], list[str]]
) -> None:
    wanted = list(map(held, read_batches(batches)))
    failing(6)
    assert list(map(held, read_batches(stored))) == wanted


def test_a_store_that_goes_on_failing_ends_in_one_line_with_the_remedy(
    stored: str, failing: Callable[[int], list[str]]
) -> None:
    asked = failing(1 << 30)
    with pytest.raises(InputError) as error:
        list(read_batches(stored))
    text = str(error.value)
    assert text.startswith(f"Expected batch file {stored}/batches-")
    assert "the store answered ClientError 503" in text
    assert "same command again: a run goes on from its last checkpoint" in text
    assert "\n" not in text
    assert max(map(asked.count, {*asked})) == 7


def test_a_changed_missing_or_short_object_is_refused_before_its_batches(
    batches: pathlib.Path, stored: str
) -> None:
    boto3 = pytest.importorskip("boto3")
    path, prefix = files_of(batches)[2], stored.rsplit("/", 1)[1]
    key, data = f"{prefix}/{path.name}", path.read_bytes()
    first = next(f for f in read_manifest(batches).files if f.name == path.name)
    flipped = bytes([*data[:-9], data[-9] ^ 1, *data[-8:]])
    for body, message in (
        (flipped, "was changed"),
        (data[:-1], "bytes are missing"),
        (None, "NoSuchKey"),
    ):
        client = boto3.client("s3")
        if body is None:
            client.delete_object(Bucket="bucket", Key=key)
        else:
            client.put_object(Bucket="bucket", Key=key, Body=body)
        found = []
        with pytest.raises(InputError, match=message):
            found.extend(batch.step for batch in read_batches(stored))
        assert max(found) < first.first_step


def test_what_is_read_ahead_is_bounded(
    batches: pathlib.Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(path.stat().st_size for path in files_of(batches))
    monkeypatch.setattr(ranges, "RANGE_BYTES", largest)
    monkeypatch.setattr(reader, "RANGE_BYTES", largest)
    monkeypatch.setattr(reader, "_AHEAD_BYTES", 3 * largest)
    read, began = reader.range_reader(stored), threading.Semaphore(0)

    def counting(path: str, start: int, size: int) -> bytes:
        began.release()
        return read(path, start, size)

    monkeypatch.setattr(reader, "range_reader", lambda _: counting)
    with contextlib.closing(read_batches(stored)) as found:  # type: ignore[type-var]
        next(found)
        for _ in range(3):
            assert began.acquire(timeout=60)
        assert not began.acquire(blocking=False)
    assert len(files_of(batches)) > 4
