"""Fixtures that more than one package needs, and what keeps chance out of tests."""

from __future__ import annotations

import functools
import gc
import logging
import os
import pathlib
import sys
import threading
import types
from collections.abc import Generator, Iterator
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
    boto3 = pytest.importorskip("boto3", reason="no boto3: pip install '.[aws]'")
    server_module = pytest.importorskip("moto.server", reason="no moto[server]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    address, port = server.get_host_and_port()
    session, lock = boto3.session.Session(), threading.Lock()

    @functools.cache
    def made(attempts: str | None, **asked: Any) -> Any:
        return session.client(**asked)

    def client(**asked: Any) -> Any:
        with lock:
            return made(os.environ.get("AWS_MAX_ATTEMPTS"), **asked)

    with pytest.MonkeyPatch.context() as patch:
        # Beam makes a session and a client for every request, in 0.1 s.
        patch.setattr(
            boto3.session, "Session", lambda: types.SimpleNamespace(client=client)
        )
        patch.setenv("AWS_ENDPOINT_URL", f"http://{address}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()


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
