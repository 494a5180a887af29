"""Fixtures that more than one package needs."""

from __future__ import annotations

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent


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
