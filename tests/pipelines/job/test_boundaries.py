"""Guarantees of pipelines.job.boundaries: searched once, sealed, gone on with."""

from __future__ import annotations

import os
import pathlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from accounting.core.plan import DpSgdPlan, steps_per_epoch
from accounting.core.validation import InputError
from pipelines.files.key_sources import insecure_key
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job import progress, sizing
from pipelines.job.boundaries import BoundariesFile, complete
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout, search_threads
from pipelines.sampling import shuffle
from pipelines.sampling.shuffle import find_boundaries, search_bytes

KEY = insecure_key(1)
BLOCKS = [("a", 700), ("b", 0), ("c", 301)]


def plan_of(
    sampler: str = "dynamic-shuffle",
    num_examples: int = 1001,
    batch_size: int = 10,
    epochs: int = 4,
) -> DpSgdPlan:
    steps = steps_per_epoch(num_examples, batch_size)
    return DpSgdPlan(
        sampler=sampler, num_examples=num_examples, num_steps=epochs * steps,
        expected_batch_size=batch_size, num_epochs=epochs,
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: pathlib.Path) -> BoundariesFile:
    return BoundariesFile(path=str(tmp_path / "boundaries"), batches_id="a job")


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that were searched."""
    epochs: list[int] = []
    find = shuffle._Search.find

    def spy(self: shuffle._Search, epoch: int) -> np.ndarray:
        epochs.append(epoch)
        return find(self, epoch)

    monkeypatch.setattr(shuffle._Search, "find", spy)
    return epochs


@pytest.mark.parametrize("sampler", ["dynamic-shuffle", "persistent-shuffle"])
@pytest.mark.parametrize("batch_size", [10, 1001])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_read_is_what_was_found(
    file: BoundariesFile, sampler: str, batch_size: int, num_threads: int
) -> None:
    plan = plan_of(sampler, batch_size=batch_size)
    complete(file, plan, KEY, BLOCKS, num_threads=num_threads)
    expected = find_boundaries(plan, KEY, BLOCKS)
    np.testing.assert_array_equal(file.load(plan, KEY), expected)
    if batch_size == 10:
        assert os.stat(file.path).st_mode & 0o777 == 0o600


def test_a_finished_search_is_not_done_again(
    file: BoundariesFile, searched: list[int]
) -> None:
    plan = plan_of()
    for _ in range(2):
        told = list[int]()
        with progress.listen(lambda kind, amount, told=told: told.append(amount)):
            complete(file, plan, KEY, BLOCKS, num_threads=1)
        assert searched == [0, 1, 2, 3]
        # What was kept is progress too: all of it adds up to what is announced.
        assert sum(told) == shuffle.num_block_passes(plan, len(BLOCKS)) == 2 * 3 * 4


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "an epoch less": lambda data: data[: -16 * 99] if data else data,
    "longer": lambda data: data + b"\0",
    "edited": lambda data: _flip(data, 8),
    "another seal": lambda data: _flip(data, len(data) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_changed_is_neither_read_nor_gone_on_with(
    file: BoundariesFile, searched: list[int], damage: str
) -> None:
    plan = plan_of()
    complete(file, plan, KEY, BLOCKS, num_threads=1)
    path = pathlib.Path(file.path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(InputError, match="as the job wrote it"):
        file.load(plan, KEY)
    searched.clear()
    complete(file, plan, KEY, BLOCKS, num_threads=1)
    assert searched == [0, 1, 2, 3]
    np.testing.assert_array_equal(
        file.load(plan, KEY), find_boundaries(plan, KEY, BLOCKS)
    )


@pytest.mark.parametrize(
    ("key", "batches_id"),
    [(insecure_key(2), "a job"), (KEY, "another plan, layout or data set")],
    ids=["key", "job"],
)
def test_what_another_key_or_job_found_is_not_used(
    file: BoundariesFile, key: bytes, batches_id: str
) -> None:
    plan = plan_of()
    theirs = BoundariesFile(path=file.path, batches_id=batches_id)
    complete(theirs, plan, key, BLOCKS, num_threads=1)
    assert file.stored(plan, KEY) is None


def test_a_job_that_was_killed_does_not_search_again(
    tmp_path: pathlib.Path, dataset: Dataset, searched: list[int]
) -> None:
    layout = make_layout(plan_of(num_examples=100, epochs=3), dataset)
    out = tmp_path / "out"

    def kill_with_first_block(kind: str, amount: int) -> None:
        if kind == progress.BLOCKS:
            raise InputError("killed")

    with (
        progress.listen(kill_with_first_block),
        pytest.raises(InputError, match="killed"),
    ):
        write_batches(dataset=dataset, layout=layout, out=out)
    assert searched == [0, 1, 2]
    write_batches(dataset=dataset, layout=layout, out=out)
    assert searched == [0, 1, 2]
    assert not (out / "private" / "boundaries").exists()


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "num_threads"),
    [(4_000_000, 1000, 1), (4_000_000, 1000, 3), (4_000_000, 100, 2)],
)
def test_a_search_stays_within_the_memory_that_was_counted(
    num_examples: int, batch_size: int, num_threads: int
) -> None:
    plan = plan_of(num_examples=num_examples, batch_size=batch_size, epochs=1)
    block = 100_000
    blocks = [(f"b{i}", block) for i in range(num_examples // block)]
    tracemalloc.start()  # NumPy reports its arrays to it
    found = find_boundaries(plan, KEY, blocks, num_threads=num_threads)
    peak = tracemalloc.get_traced_memory()[1] - found.nbytes
    tracemalloc.stop()
    counted = search_bytes(plan, block, num_threads)
    assert peak <= counted
    # Nor is the user asked for far too much; threads are not all at their peak at once.
    assert counted <= 4 * num_threads * peak


def test_a_limit_that_a_search_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path, dataset: Dataset
) -> None:
    layout = make_layout(plan_of(num_examples=100), dataset)
    with pytest.raises(InputError, match="finding the order of the shuffle") as error:
        search_threads(layout.plan, dataset, sizing._BASE_BYTES)
    least = int(str(error.value).split(">= ")[1].split()[0])
    assert search_threads(layout.plan, dataset, least) == 1
    with pytest.raises(InputError, match=f"memory_limit={least - 1} "):
        write_batches(
            dataset=dataset, layout=layout, out=tmp_path / "o", memory_limit=least - 1
        )
    assert not (tmp_path / "o").exists()
    assert search_threads(plan_of("poisson", 100), dataset, 0) == 1
