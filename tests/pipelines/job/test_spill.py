"""Guarantees of pipelines.job.spill."""

from __future__ import annotations

import pytest

from accounting.core.validation import InputError
from pipelines.files import storage
from pipelines.files.key_sources import read_key_file
from pipelines.inputs.known_input import know_input
from pipelines.job.job_folder import read_checksum
from pipelines.job.poisson_batching import ENGINE, FILES, LOCAL, choose_shuffle
from pipelines.job.spill import Spill, read_slice, spill_path, write_spill
from pipelines.job.steps.map_step import Secrets, SpillBlocksFn
from pipelines.job.steps.reduce_step import WriteSpilledFn
from tests.pipelines.conftest import SmallJobs


@pytest.fixture
def place(here_or_s3: str) -> str:
    """A folder, here or in a store."""
    return here_or_s3


def test_slices_are_those_of_any_store(place: str) -> None:
    pieces = [bytes([group]) * (1000 * group) for group in range(5)]
    path = spill_path(place, 0)
    write_spill(path, [len(piece) for piece in pieces], pieces)
    assert [read_slice(path, group) for group in (4, 0, 2)] == [
        pieces[4], b"", pieces[2],
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError):
        read_slice(spill_path(place, 1), 0)


class _DiedError(Exception):
    """A worker was lost."""


def test_a_file_under_its_final_name_is_complete(place: str) -> None:
    path = spill_path(place, 0)

    def half() -> list[bytes]:
        yield b"abc"
        raise _DiedError

    with pytest.raises(_DiedError):
        write_spill(path, [3, 3], half())
    assert storage.names(place) == set()
    with pytest.raises(ValueError, match="instead of"):
        write_spill(path, [3, 3], [b"abc", b"ab"])
    assert storage.names(place) == set()
    write_spill(path, [3, 3], [b"abc", b"def"])
    assert storage.names(place) == {"block-000000000"}
    assert storage.size(path) == 24 + 6
    assert storage.size(spill_path(place, 1)) is None


def test_no_row_travels_through_the_engine_and_finished_work_is_not_repeated(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, blocks = jobs.layout(), jobs.dataset.blocks
    out, _ = jobs.open()
    (out / "private" / "spill").mkdir()
    spill = Spill(folder=str(out / "private" / "spill"))
    known = know_input(read_key_file(jobs.key_file), jobs.dataset)
    secrets = Secrets(key_file=str(jobs.key_file))
    sample = SpillBlocksFn(layout, secrets, known, spill)
    sample.setup()
    sample.start_bundle()
    write = WriteSpilledFn(layout, str(out), len(blocks), spill)
    write.start_bundle()
    sent = [element for block in blocks for element in sample.process([block])]
    assert sent == [(0, block.ordinal) for block in blocks]
    names = [name for group in (0, 3) for name in write.process(group)]
    assert names == [layout.file(0).name, layout.file(3).name]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    # An engine that lost a worker runs everything again.
    monkeypatch.setattr("pipelines.job.steps.map_step.sample_and_pack", never)
    for block in blocks:
        list(sample.process([block]))
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.job.steps.reduce_step.encode_steps", never)
        list(write.process(0))
        with pytest.raises(InputError, match="AssertionError"):
            list(write.process(1))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    # What is shorter than its checksum says is not finished.
    path = out / layout.file(0).name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert read_checksum(str(out), path.name, len(whole) - 1) is None
    list(write.process(0))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("shuffle", "runner", "chosen"),
    [
        ("auto", LOCAL, FILES),
        ("auto", "FlinkRunner", FILES),
        ("auto", "DataflowRunner", ENGINE),
        ("files", "DataflowRunner", FILES),
        ("engine", "FlinkRunner", ENGINE),
    ],
)
def test_rows_go_through_files_unless_an_engine_is_better_at_it(
    shuffle: str, runner: str, chosen: str
) -> None:
    assert choose_shuffle(shuffle, runner) == chosen
    # The local runner never holds the shuffle in memory.
    with pytest.raises(InputError, match="--shuffle engine"):
        choose_shuffle("engine", LOCAL)
    with pytest.raises(InputError, match="shuffle='disk'"):
        choose_shuffle("disk", LOCAL)
