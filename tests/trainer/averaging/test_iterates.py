"""Kept iterates and their authenticated files: complete, of this run, or refused."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.averaging.iterates import Iterates
from trainer.core.run import authenticated_arrays

KEY = bytes(range(32))
STEPS = (4, 6, 8)


def _weights(step: int) -> list[np.ndarray]:
    return [np.full((2, 3), step, "f4"), np.array(step / 2, "f4")]


@pytest.fixture
def iterates(tmp_path: pathlib.Path) -> Iterates:
    kept = Iterates(run=tmp_path, run_key=KEY, steps=STEPS)
    for step in STEPS:
        kept.keep(step, _weights(step))
    return kept


def test_iterates_come_back_in_order_bit_for_bit(iterates: Iterates) -> None:
    for step, found in zip(STEPS, iterates, strict=True):
        for left, right in zip(found, _weights(step), strict=True):
            assert left.tobytes() == right.tobytes()
            assert (left.dtype, left.shape) == (right.dtype, right.shape)


def test_numpy_reads_an_iterate_without_the_key(iterates: Iterates) -> None:
    with np.load(iterates.path(6)) as arrays:
        assert sorted(arrays) == ["weight_0", "weight_1"]
        assert arrays["weight_1"] == 3.0


def test_a_replayed_step_writes_the_same_bytes(iterates: Iterates) -> None:
    before = iterates.path(6).read_bytes()
    iterates.keep(6, _weights(6))
    assert iterates.path(6).read_bytes() == before


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pathlib.Path.unlink,
        _flip,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: shutil.copy(path.with_name("step-00000008.npz"), path),
    ],
    ids=["missing", "flipped", "truncated", "empty", "of another step"],
)
def test_a_changed_iterate_is_refused(
    damage: Callable[[pathlib.Path], object], iterates: Iterates
) -> None:
    damage(iterates.path(6))
    with pytest.raises(InputError, match=r"step-00000006\.npz.*missing or was changed"):
        iterates.recover(6)
    with pytest.raises(InputError, match=r"step-00000006\.npz"):
        list(iterates)
    iterates.recover(5)  # what the run has not come to yet is written again


def test_an_iterate_of_another_run_is_refused(iterates: Iterates) -> None:
    other = Iterates(run=iterates.run, run_key=bytes(32), steps=STEPS)
    with pytest.raises(InputError, match=r"step-00000004\.npz"):
        other.recover(8)


def test_leftovers_of_writes_that_were_killed_are_removed(iterates: Iterates) -> None:
    leftover = iterates.path(6).with_name(".step-00000006.npz.0123")
    leftover.write_bytes(b"half")
    iterates.recover(8)
    assert sorted(p.name for p in leftover.parent.iterdir()) == [
        f"step-{step:08d}.npz" for step in STEPS
    ]


def test_a_label_opens_no_file_of_another_label(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file.npz"
    authenticated_arrays.write(path, {"x": np.ones(2)}, key=KEY, label="checkpoint")
    np.testing.assert_array_equal(
        authenticated_arrays.read(path, key=KEY, label="checkpoint")["x"], [1, 1]
    )
    for key, label in ((KEY, "iterate 1"), (bytes(32), "checkpoint")):
        with pytest.raises(authenticated_arrays.DamagedError):
            authenticated_arrays.read(path, key=key, label=label)
