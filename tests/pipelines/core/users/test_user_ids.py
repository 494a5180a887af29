"""Ids of users as numbers."""

from __future__ import annotations

import datetime
import re

import numpy as np
import pyarrow as pa
import pytest

from accounting.core.validation import InputError
from pipelines.core.batches.columns import Column
from pipelines.core.users.user_ids import check_type, hash_ids
from pipelines.files.key_files import insecure_key
from pipelines.inputs.type_kinds import seems_user_column

KEY = insecure_key(1)
NAMES = [
    "ann",
    "",
    "bob",
    "a much longer name, of more than 8 bytes",
    "ann",
    "a\0",
    "a",
]


def numbers(values: pa.Array | pa.ChunkedArray, key: bytes = KEY) -> list[int]:
    return hash_ids("user", values, key).tolist()


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
    ids=str,
)
def test_equal_ids(kind: pa.DataType) -> None:
    texts = pa.array(NAMES)
    if pa.types.is_dictionary(kind):
        other = texts.dictionary_encode().cast(kind)
    else:
        other = texts.cast(kind)
    found = numbers(texts)
    assert numbers(other) == found
    assert [found.index(number) for number in found] == [0, 1, 2, 3, 0, 5, 6]
    chunks = pa.chunked_array([other.slice(0, 3), other.slice(3)])
    assert numbers(chunks) == found
    assert numbers(chunks.slice(2)) == found[2:]


def test_integers() -> None:
    values = [-(2**31), -1, 0, 1, 2**31 - 1]
    found = numbers(pa.array(values, pa.int32()))
    assert found == numbers(pa.array(values, pa.int64()))
    many = hash_ids("user", pa.array(np.arange(1 << 16)), KEY)
    assert len(np.unique(many)) == 1 << 16
    assert numbers(pa.array([2**64 - 1], pa.uint64()))


def test_texts_fill_the_range_evenly_and_by_the_key() -> None:
    texts = pa.array([f"user-{number}" for number in range(1 << 14)])
    found = hash_ids("user", texts, KEY)
    assert len(np.unique(found)) == 1 << 14
    # The 16 shares of a job: each is Binomial(2**14, 1/16), within 6 deviations.
    counts = np.bincount((found >> np.uint64(60)).astype(int), minlength=16)
    assert abs(counts - 1024).max() < 6 * np.sqrt(1024 * 15 / 16)
    assert (hash_ids("user", texts, insecure_key(2)) != found).all()


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["ann", None]),
        pa.array([1, None]),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["ann", None])),
    ],
    ids=["text", "integer", "dictionary"],
)
def test_no_id_is_missing(values: pa.Array) -> None:
    with pytest.raises(InputError, match="Expected user column user to hold no nulls"):
        numbers(values)


@pytest.mark.parametrize(
    "values",
    [pa.array([1.5]), pa.array([True]), pa.array([[1]]), pa.array([datetime.date.min])],
    ids=lambda values: str(values.type),
)
def test_other_types_are_refused(values: pa.Array) -> None:
    with pytest.raises(InputError, match="to hold integers, text or bytes"):
        check_type("user", values.type)
    with pytest.raises(InputError, match=re.escape(str(values.type))):
        numbers(values)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "seems"),
    [
        ("user_id", "int64", (), True),
        ("User", "uint8", (), True),
        ("patientID", "int32", (), True),
        ("UID", "int64", (), True),
        ("id", "int64", (), False),
        ("user_age", "int64", (), False),
        ("num_users", "int64", (), False),
        ("user", "float32", (), False),
        ("user", "int64", (3,), False),
    ],
)
def test_a_column_seems_to_hold_users_by_its_name_and_type_alone(
    name: str, dtype: str, shape: tuple[int, ...], seems: bool
) -> None:
    columns = [
        Column(name="label", dtype="float32"),
        Column(name=name, dtype=dtype, shape=shape),
    ]
    assert seems_user_column(columns) == (name if seems else None)
