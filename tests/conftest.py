"""Fixtures that more than one package needs, and what keeps chance out of tests."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import draws

ROOT = pathlib.Path(__file__).parent.parent

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
