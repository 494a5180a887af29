"""Guarantees of pipelines.core.resample."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipelines.core.batches.batch_format import encode_batch, write_record
from pipelines.core.batches.manifest import RecordChecksum
from pipelines.core.resample import checksum, differing_steps
from pipelines.core.rows import Column

#: Names around those of weight, step and part, with equal beginnings, or not ASCII.
COLUMNS = (
    Column(name="zeile", dtype="int64", shape=()),
    Column(name="a", dtype="float32", shape=(3, 2)),
    Column(name="part1", dtype="uint8", shape=()),
    Column(name="par", dtype="uint8", shape=()),
    Column(name="größe", dtype="float16", shape=(200,)),
)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("step", [0, 127, 128, 300_000])
def test_equal_rows_have_the_bytes_of_the_batch_job(count: int, step: int) -> None:
    rng = np.random.default_rng(count)
    values = {
        column.name: rng.integers(0, 100, (count, *column.shape)).astype(column.dtype)
        for column in COLUMNS
    }
    written = bytearray()
    record = encode_batch(values, step=step, part=count, physical_batch_size=7)
    write_record(written.extend, record, step=step, part=count)
    flat = [
        np.ascontiguousarray(values[column.name])
        .view(np.uint8)
        .reshape(count, column.num_bytes)
        for column in COLUMNS
    ]
    found = checksum(flat, COLUMNS, step=step, part=count, size=7)
    digest = hashlib.sha256(written).hexdigest()
    assert str(found) == f"{step} {count} {len(written)} {digest}"


def test_records_of_two_steps_in_another_order_differ() -> None:
    """A reader takes steps in the order of the files."""
    first, second = (
        RecordChecksum(step=step, part=0, size=16, sha256=f"{step:064x}")
        for step in (0, 1)
    )
    remade = [(0, [first]), (1, [second])]
    assert differing_steps(remade, [first, second]) == []
    assert differing_steps(remade, [second, first]) == [0]
