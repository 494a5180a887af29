"""What ``synthetic`` guarantees."""

from __future__ import annotations

import pathlib

import pytest

from pipelines.tables.synthetic import SynthOptions, write_synth


def write(out: pathlib.Path, num_rows: int, seed: int = 0) -> bytes:
    return write_synth(out, SynthOptions(num_rows=num_rows, seed=seed)).read_bytes()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The text of 40,000 rows, which are of three blocks."""
    return write(tmp_path_factory.mktemp("synth") / "raw", 40_000)


def test_the_same_seed_gives_the_same_rows_and_another_others(
    tmp_path: pathlib.Path,
) -> None:
    first = write(tmp_path / "a", 500, seed=3)
    assert write(tmp_path / "b", 500, seed=3) == first
    other = write(tmp_path / "c", 500, seed=4)
    assert not set(other.splitlines()) & set(first.splitlines())


def test_more_rows_extend_fewer(raw: bytes, tmp_path: pathlib.Path) -> None:
    assert raw.startswith(write(tmp_path / "few", 20_000))


def test_rows_of_different_blocks_differ(raw: bytes) -> None:
    lines = raw.splitlines()
    assert len(set(lines)) == len(lines) == 40_000
