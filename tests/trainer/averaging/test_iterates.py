"""Kept iterates: complete, or refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.averaging.iterates import Iterates

STEPS = (4, 6, 8)


def _weights(step: int) -> list[np.ndarray]:
    return [np.full((2, 3), step, "f4"), np.array(step / 2, "f4")]


@pytest.fixture
def iterates(tmp_path: pathlib.Path) -> Iterates:
    kept = Iterates(run=tmp_path, steps=STEPS)
    for step in STEPS:
        kept.keep(step, _weights(step))
    return kept


def test_iterates_come_back_in_order_bit_for_bit(iterates: Iterates) -> None:
    for step, found in zip(STEPS, iterates, strict=True):
        for left, right in zip(found, _weights(step), strict=True):
            assert left.tobytes() == right.tobytes()
            assert (left.dtype, left.shape) == (right.dtype, right.shape)


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pathlib.Path.unlink,
        _flip,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
    ],
    ids=["missing", "flipped", "truncated", "empty"],
)
def test_a_damaged_iterate_is_refused(
    damage: Callable[[pathlib.Path], object], iterates: Iterates
) -> None:
    damage(iterates.path(6))
    with pytest.raises(InputError, match=r"step-00000006\.npz.*missing or damaged"):
        list(iterates)
