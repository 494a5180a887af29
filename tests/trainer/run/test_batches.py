"""The source of batches yields what was written, or refuses it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.batches.reader import stored
from trainer.core.run.batches import BatchSource


def _positions(folder: Any, **more: Any) -> list[tuple[int, int]]:
    source = BatchSource(stored(folder.path), folder.manifest, **more)
    return [(int(batch["step"]), int(batch["part"])) for batch in source]


def test_batches_come_in_step_order_with_their_rows(small_batches: Any) -> None:
    batches = list(BatchSource(stored(small_batches.path), small_batches.manifest))
    assert [int(batch["step"]) for batch in batches] == list(range(10))
    for batch, rows in zip(batches, small_batches.steps, strict=True):
        real = batch["weight"].numpy() > 0
        assert real.sum() == len(rows)
        for name in rows.dtype.names:
            found = batch["columns"][name].numpy()[real]
            np.testing.assert_array_equal(found, rows[name])


def test_other_batches_in_the_folder_since_are_refused(
    small_batches: Any, batch_folder: Any, rows: Any
) -> None:
    """Seen to fail: a run stated the epsilon of the plan that it was checked with."""
    steps = [rows(16, seed) for seed in range(10)]
    larger = {"expected_batch_size": 16, "batches_id": "1" * 32}
    folder = batch_folder(steps, "larger", **larger)
    small_batches.path.rename(folder.path.with_name("moved"))
    folder.path.rename(small_batches.path)
    for first in (0, 4):
        with pytest.raises(InputError, match="there are others now"):
            _positions(small_batches, first_step=first)


def test_other_rows_under_the_same_id_are_refused(
    small_batches: Any, batch_folder: Any, rows: Any
) -> None:
    """Seen to fail: the statement took the certificate of the former for these."""
    found = stored(small_batches.path).records_id()
    assert len(_positions(small_batches, records=found)) == 10
    folder = batch_folder([rows(8, seed) for seed in range(10)], "remade")
    small_batches.path.rename(folder.path.with_name("moved"))
    folder.path.rename(small_batches.path)
    with pytest.raises(InputError, match="there are others now"):
        _positions(small_batches, records=found)


def test_no_batch_of_a_file_comes_before_its_digest_was_checked(
    small_batches: Any,
) -> None:
    path = small_batches.path / small_batches.manifest.files[1].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    batches = iter(BatchSource(stored(small_batches.path), small_batches.manifest))
    assert [next(batches)["step"] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InputError, match=f"{path.name}.*changed"):
        next(batches)


def test_reading_ends_when_its_reader_leaves(small_batches: Any) -> None:
    # Its own threads: one of an earlier test may end in between.
    before = set(threading.enumerate())
    iterator = iter(BatchSource(stored(small_batches.path), small_batches.manifest))
    next(iterator)
    started = set(threading.enumerate()) - before
    assert started
    iterator.close()  # type: ignore[attr-defined]
    assert not started & set(threading.enumerate())
