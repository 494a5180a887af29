"""Guarantees of pipelines.core.batches.batch_format."""

from __future__ import annotations

import hashlib
import io
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from accounting.core.validation import InputError
from pipelines.core.batches import manifest
from pipelines.core.batches.batch_format import (
    CorruptRecordError,
    decode_batch,
    encode_batch,
    iterate_records,
    write_record,
)
from pipelines.core.batches.manifest import Column

COLUMNS = (
    Column(name="label", dtype="int8"),
    Column(name="integers", dtype="float32", shape=(2, 3)),
    Column(name="ids", dtype="uint64", shape=(2,)),
)


ROW = np.dtype([(column.name, column.numpy_dtype) for column in COLUMNS])


def by_column(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: rows[name] for name in rows.dtype.names}


def golden_rows() -> dict[str, np.ndarray]:
    rows = np.zeros(2, ROW)
    rows["label"] = [1, -1]
    rows["integers"] = np.arange(12).reshape(2, 2, 3)
    rows["integers"][1, 0, 0] = np.nan
    rows["ids"] = [[1, 2**64 - 1], [3, 4]]
    return by_column(rows)


def framed(*records: bytes) -> bytes:
    file = io.BytesIO()
    for record in records:
        write_record(file.write, record, step=0, part=0)
    return file.getvalue()


@settings(deadline=None, max_examples=50)
@given(data=st.data(), count=st.integers(0, 5), padding=st.integers(0, 3))
def test_round_trip_keeps_every_bit(
    data: st.DataObject, count: int, padding: int
) -> None:
    raw = data.draw(hnp.arrays(np.uint8, (count, ROW.itemsize)), label="rows")
    rows = raw.view(ROW).reshape(count)
    size = max(1, count + padding)
    record = encode_batch(by_column(rows), step=9, part=2, physical_batch_size=size)
    batch = decode_batch(record, COLUMNS, size)
    assert (batch.step, batch.part) == (9, 2)
    assert batch.weight.tolist() == [1] * count + [0] * (size - count)
    for column in COLUMNS:
        stored = batch.columns[column.name]
        assert stored.shape == (size, *column.shape)
        assert stored[:count].tobytes() == rows[column.name].tobytes()
        assert not stored[count:].any()


def test_golden_bytes() -> None:
    """Recipe: golden_rows() as step 3, part 1, padded to 4 rows, framed once.

    If they change, so that old files read wrongly, raise FORMAT_VERSION.
    """
    record = encode_batch(golden_rows(), step=3, part=1, physical_batch_size=4)
    # The records are those of version 1: version 2 makes other choices.
    assert manifest.FORMAT_VERSION == 2
    assert hashlib.sha256(framed(record)).hexdigest() == GOLDEN_SHA256


GOLDEN_SHA256 = "de6d9cb63e805f1613bac13f65e847effadfbf3cb7f2baf070cec3f56135a856"


def test_tensorflow_reads_the_same(tmp_path: pathlib.Path) -> None:
    """An independent reader of the framing and of the protocol buffer."""
    tf = pytest.importorskip("tensorflow")
    record = encode_batch(golden_rows(), step=3, part=1, physical_batch_size=4)
    path = tmp_path / "x.tfrecord"
    path.write_bytes(framed(record, record))
    raw = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    assert raw == [record, record]
    feature = tf.train.Example.FromString(raw[0]).features.feature
    assert feature["step"].int64_list.value[:] == [3]
    assert feature["part"].int64_list.value[:] == [1]
    weight = tf.io.decode_raw(feature["weight"].bytes_list.value[0], tf.float32)
    assert weight.numpy().tolist() == [1, 1, 0, 0]
    integers = tf.io.decode_raw(feature["integers"].bytes_list.value[0], tf.float32)
    assert integers.numpy().tobytes()[:48] == golden_rows()["integers"].tobytes()


def test_a_flipped_bit_anywhere_is_an_error() -> None:
    record = encode_batch(golden_rows(), step=3, part=1, physical_batch_size=4)
    data = framed(record)
    assert list(iterate_records(data)) == [record]
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError):
            list(iterate_records(bytes(damaged)))


def test_a_file_that_ends_within_a_record_is_an_error() -> None:
    data = framed(b"abc", b"defg")
    ends = [0, len(framed(b"abc")), len(data)]
    for length in range(len(data)):
        if length not in ends:
            with pytest.raises(CorruptRecordError):
                list(iterate_records(data[:length]))


@pytest.mark.parametrize(
    ("columns", "size"),
    [
        (COLUMNS, 5),
        ((*COLUMNS, Column(name="absent", dtype="int8")), 4),
        ((Column(name="label", dtype="int16"),), 4),
    ],
)
def test_another_schema_or_size_is_an_error(
    columns: tuple[Column, ...], size: int
) -> None:
    record = encode_batch(golden_rows(), step=3, part=1, physical_batch_size=4)
    with pytest.raises(CorruptRecordError):
        decode_batch(record, columns, size)


def test_what_is_not_a_record_is_an_error() -> None:
    for data in (b"", b"\xff" * 9, b"not a protocol buffer"):
        with pytest.raises(CorruptRecordError):
            decode_batch(data, COLUMNS, 4)


def test_reserved_names_and_other_types_are_refused() -> None:
    for name in ("weight", "step", "part"):
        with pytest.raises(InputError, match="Rename"):
            Column(name=name, dtype="int8")
    for dtype in ("string", "object", "bool", "complex64", ">i4"):
        with pytest.raises(InputError, match="dtype of column x"):
            Column(name="x", dtype=dtype)


def test_a_batch_does_not_print_its_rows() -> None:
    record = encode_batch(golden_rows(), step=3, part=1, physical_batch_size=4)
    text = repr(decode_batch(record, COLUMNS, 4))
    assert text == "PhysicalBatch(step=3, part=1)"


def test_columns_of_other_lengths_or_too_many_rows_are_refused() -> None:
    rows = golden_rows()
    with pytest.raises(ValueError, match="one length"):
        encode_batch(
            {**rows, "label": rows["label"][:1]}, step=0, part=0, physical_batch_size=4
        )
    with pytest.raises(ValueError, match="one length"):
        encode_batch(rows, step=0, part=0, physical_batch_size=1)
