"""No record is written that no reader of protocol buffers can take."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import encode_batch
from pipelines.core.batches.manifest import (
    DTYPES,
    MOST_RECORD_BYTES,
    Column,
    record_bytes,
)
from pipelines.inputs.parquet_blocks import Block, Dataset
from pipelines.job.sizing import make_layout

IMAGE = Column(name="image", dtype="float32", shape=(224, 224, 3))


def dataset(*columns: Column, num_rows: int = 1_000_000) -> Dataset:
    block = Block(
        path="a", label="a#0", row_group=0, num_rows=num_rows, first_row=0, ordinal=0
    )
    nothing: Any = {"description": {}, "files": {}, "footers": {}}
    return Dataset(columns=columns, blocks=(block,), **nothing)


def plan(batch_size: int, **changes: object) -> DpSgdPlan:
    sizes = {"num_examples": 1_000_000, "num_steps": 10, **changes}
    batch = {"expected_batch_size": batch_size, "truncated_batch_size": batch_size}
    return DpSgdPlan(**{"sampler": "truncated-poisson", **batch, **sizes})  # type: ignore[arg-type]


@given(
    columns=st.lists(
        st.builds(
            Column,
            name=st.text(min_size=1, max_size=200).filter(
                lambda name: name not in ("weight", "step", "part")
            ),
            dtype=st.sampled_from(DTYPES),
            shape=st.lists(st.integers(1, 5), max_size=3),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda column: column.name,
    ),
    size=st.integers(1, 300),
    step=st.integers(0, 2**62),
)
@settings(max_examples=30, deadline=None)
def test_no_record_is_longer_than_its_bound_and_few_bytes_shorter(
    columns: list[Column], size: int, step: int
) -> None:
    arrays = {
        column.name: np.zeros((size, *column.shape), column.numpy_dtype.base)
        for column in columns
    }
    record = encode_batch(arrays, step=step, part=step, physical_batch_size=size)
    bound = record_bytes(columns, size)
    assert 0 <= bound - len(record) < 100 * (len(columns) + 3)


@pytest.mark.parametrize("sampler", ["truncated-poisson", "poisson"])
@pytest.mark.parametrize("batch_size", [1, 100, 8192, 100_000])
@pytest.mark.parametrize(
    "column", [IMAGE, Column(name="x", dtype="int8"), Column(name="x", dtype="float64",
               shape=(1 << 27,))],
    ids=["image", "byte", "gigabyte"],
)  # fmt: skip
def test_the_default_record_goes_by_rows_and_by_bytes(
    column: Column, batch_size: int, sampler: str
) -> None:
    """At most 8192 rows and 64 MiB, but for one row of more; and no more padding than
    the division of a step into equal parts needs."""
    cap = batch_size if sampler == "truncated-poisson" else None
    asked = plan(batch_size, sampler=sampler, truncated_batch_size=cap)
    layout = make_layout(asked, dataset(column))
    rows = layout.physical_batch_size
    size = record_bytes([column], rows)
    assert rows <= 8192
    assert rows == 1 or size <= (64 << 20) + 1000
    largest = cap or batch_size + 4 * int(batch_size**0.5)
    parts = -(-largest // rows)
    assert parts * rows - largest < parts
    if column.dtype == "int8":
        assert parts == -(-largest // 8192), "small rows are as they were"


def test_a_record_that_cannot_be_read_is_refused_with_what_can() -> None:
    with pytest.raises(InputError, match="physical_batch_size=8192") as error:
        make_layout(plan(8192), dataset(IMAGE), 8192)
    assert str(MOST_RECORD_BYTES) in str(error.value)
    remedy = re.search(r"--physical-batch-size (\d+) or less", str(error.value))
    assert remedy, error.value
    most = int(remedy[1])
    assert make_layout(plan(8192), dataset(IMAGE), most).physical_batch_size == most
    with pytest.raises(InputError):
        make_layout(plan(8192), dataset(IMAGE), most + 1)


def test_a_row_that_no_record_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"column vast .*2147483648"):
        Column(name="vast", dtype="float64", shape=(1 << 28,))
    parts = [Column(name=name, dtype="int8", shape=(1 << 30,)) for name in "ab"]
    with pytest.raises(InputError, match="one row"):
        make_layout(plan(10), dataset(*parts))
