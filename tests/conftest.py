"""Fixtures that more than one package needs, and what keeps chance out of tests."""

from __future__ import annotations

import contextvars
import functools
import gc
import logging
import os
import pathlib
import sys
import threading
import types
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from accounting.core import accountant
from tests import draws
from tests.warm_processes import warm_python

ROOT = pathlib.Path(__file__).parent.parent

# Collecting the tests makes hundreds of thousands of objects, and frees next to none.
gc.disable()

# No test cuts the power: what was written need not wait for the disk, which may be
# busy with what was installed.  A closed file is an error as before.
os.fsync = os.fstat  # type: ignore[assignment]

# A shared machine may be slow, or pause: that is no failure, and examples are the same
# wherever the tests run.
settings.register_profile(
    "dpsgd",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dpsgd")

draws.replace_sources()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported stays: no collection looks through it, as each of Keras' does.

    Clearing Keras' session collects, for a second each time, once for every training.
    """
    gc.freeze()
    gc.set_threshold(30_000)  # a trace makes as many objects in a moment
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """A fixture of a module or session draws the same whichever test asks first."""
    with draws.drawn_by(f"{request.node.nodeid} {fixturedef.argname}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test draws the same on every day and in any order."""
    with draws.drawn_by(item.nodeid):
        return (yield)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="module")
def warm_starts() -> Iterator[None]:
    """What these tests start by ``sys.executable`` has the libraries imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", os.fspath(warm_python()))
        yield


@pytest.fixture(scope="module")
def answers_once() -> Iterator[None]:
    """The accountant answers an equal question once: an answer takes up to seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("epsilon", "delta", "noise_multiplier"):
            asked = functools.lru_cache(None, typed=True)(getattr(accountant, name))
            patch.setattr(accountant, name, asked)
        yield


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """A bucket of an S3 server in this process."""
    pytest.importorskip("s3fs", reason="no s3fs: pip install '.[aws]'")
    boto3 = pytest.importorskip("boto3", reason="no boto3: pip install '.[dev]'")
    server_module = pytest.importorskip("moto.server", reason="no moto[server]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    address, port = server.get_host_and_port()
    from moto.s3.responses import S3Response

    put, lock = S3Response.put_object, threading.Lock()

    def put_alone(self: Any) -> Any:
        with lock:  # a store looks and puts at once, moto one after the other
            return put(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_alone)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{address}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def s3_folder(s3_bucket: str) -> str:
    """A new folder in a store."""
    return f"{s3_bucket}/{uuid.uuid4().hex}"


@pytest.fixture(params=["here", "s3"])
def here_or_s3(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A new folder, here or in a store."""
    if request.param == "s3":
        return request.getfixturevalue("s3_folder")
    (tmp_path / "here").mkdir()
    return str(tmp_path / "here")


class S3Requests:
    """What this process asks of S3.

    Attributes:
      asked: Operation, such as GetObject, and arguments of each request.
      fail: Called with both before each attempt; may call ``refuse``.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fail: Callable[[str, dict[str, Any]], None] = lambda *_: None

    def busy(self, times: int, words: str = "") -> None:
        """S3 answers 503 so often to requests for an object whose key holds words."""

        def fail(operation: str, given: dict[str, Any]) -> None:
            nonlocal times
            if words in given.get("Key", "") and times > 0:
                times -= 1
                self.refuse(503, operation)

        self.fail = fail

    @staticmethod
    def refuse(status: int, operation: str) -> None:
        """Lets S3 answer a request with an error."""
        raise _RefusedError(status, operation)


class _RefusedError(Exception):
    """S3 is to answer with a status."""


@pytest.fixture
def s3_requests(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> S3Requests:
    """See ``S3Requests``; a request that fails is repeated at once."""
    import botocore.retries.standard as retries

    client = pytest.importorskip("aiobotocore.client").AioBaseClient
    session = pytest.importorskip("aiobotocore.httpsession").AIOHTTPSession
    answer = pytest.importorskip("aiobotocore.awsrequest").AioAWSResponse
    call, send = client._make_api_call, session.send
    requests, lock = S3Requests(), threading.Lock()
    asked: contextvars.ContextVar[Any] = contextvars.ContextVar("asked")

    async def recording(self: Any, operation: str, given: dict[str, Any]) -> Any:
        with lock:
            requests.asked.append((operation, given))
        asked.set((operation, given))
        return await call(self, operation, given)

    async def failing(self: Any, request: Any) -> Any:
        try:
            with lock:
                requests.fail(*asked.get())
        except _RefusedError as error:
            status = error.args[0]
            text = f"<Error><Code>{status}</Code><Message>quotes a credential</Message>"
            raw = types.SimpleNamespace(read=lambda: _given(f"{text}</Error>".encode()))
            return answer(request.url, status, {}, raw)
        return await send(self, request)

    monkeypatch.setattr(client, "_make_api_call", recording)
    monkeypatch.setattr(session, "send", failing)
    backoff = retries.ExponentialBackoff
    monkeypatch.setattr(backoff, "delay_amount", lambda *_: 0)
    return requests


async def _given(value: bytes) -> bytes:
    return value


@pytest.fixture(scope="session")
def criteo_sample() -> pathlib.Path:
    """Real rows of the Criteo data set; skips where they are absent."""
    default = ROOT.parent / "shared" / "data" / "criteo_sample.txt"
    path = pathlib.Path(os.environ.get("DPSGD_CRITEO_SAMPLE", default))
    if not path.is_file():
        pytest.skip(
            f"no Criteo sample at {path}; set DPSGD_CRITEO_SAMPLE to a file of rows "
            "in the original format"
        )
    return path
