"""Batch format, version 2: one TFRecord is one physical batch of fixed-width columns.

A record is a ``tf.train.Example`` with one bytes feature per column, the raw
little-endian buffer of an array of shape ``(physical_batch_size, *column.shape)``; a
bytes feature ``weight`` (float32, 1 for a real row, 0 for padding); and the int64
features ``step`` and ``part``.  Padding rows are zero bits, after the real rows.

Version 2 has the records of version 1.  Its samples also derive from the digest of the
input (``known_input``), so that no key reproduces the batches of version 1.

Formal guarantees:
  - ``decode_batch(encode_batch(batch))`` returns the same bits, NaN payloads included.
  - Equal batches have equal bytes (features are written in the order of their names).
  - Records are framed by ``tfrecord``: a flipped bit anywhere is an error.

Public: column names, types and shapes.  Sensitive: everything else here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from pipelines.core.batches.columns import Column
from pipelines.core.batches.tf_example import Example
from pipelines.core.batches.tfrecord import CorruptRecordError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhysicalBatch:
    """One record.  Sensitive.

    Attributes:
      step: Step of the batch, from 0.
      part: Index among the physical batches of the step, from 0.
      columns: Name -> array of shape (physical_batch_size, *column.shape).
      weight: float32 of shape (physical_batch_size,), 1 real, 0 padding.
    """

    step: int
    part: int
    columns: Mapping[str, np.ndarray]
    weight: np.ndarray

    def __repr__(self) -> str:
        # The contents, and how many rows are real, must not reach a log by accident.
        return f"PhysicalBatch(step={self.step}, part={self.part})"


def encode_batch(
    columns: Mapping[str, np.ndarray], *, step: int, part: int, physical_batch_size: int
) -> bytes:
    """Returns the record of the rows in ``columns``, padded with weight-0 rows.

    Args:
      columns: Name -> little-endian array of shape (rows, ...), with the same number
        of rows in each, at most ``physical_batch_size``.  Sensitive.
      step: Step of the batch.
      part: Index of the record within the step.
      physical_batch_size: Number of rows of the record, real and padding.

    Raises:
      ValueError: columns of different lengths, or too many rows.
    """
    num_rows = {len(values) for values in columns.values()}
    if len(num_rows) != 1 or max(num_rows) > physical_batch_size:
        raise ValueError("Expected columns of one length <= physical_batch_size.")
    (num_real,) = num_rows
    example = Example()
    feature = example.features.feature
    padding = physical_batch_size - num_real
    for name, values in columns.items():
        row = values.itemsize * int(np.prod(values.shape[1:]))
        feature[name].bytes_list.value.append(values.tobytes() + bytes(padding * row))
    weight = np.zeros(physical_batch_size, "<f4")
    weight[:num_real] = 1
    feature["weight"].bytes_list.value.append(weight.tobytes())
    feature["step"].int64_list.value.append(step)
    feature["part"].int64_list.value.append(part)
    return example.SerializeToString(deterministic=True)


def _buffer(feature: Any, name: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
    values: Any = feature[name].bytes_list.value if name in feature else ()
    value = values[0] if len(values) == 1 else None  # each access makes a copy
    if value is None or len(value) != count * dtype.itemsize:
        raise CorruptRecordError(
            f"Expected column {name} to hold {count} values of {dtype.base}."
        )
    # A sub-array dtype cannot be read from a buffer: read scalars, then shape.
    return np.frombuffer(value, dtype.base).reshape((count, *dtype.shape))


def _integer(feature: Any, name: str) -> int:
    values: Any = feature[name].int64_list.value if name in feature else ()
    if len(values) != 1 or values[0] < 0:
        raise CorruptRecordError(f"Expected one value of {name}.")
    return values[0]


def decode_batch(
    record: bytes, columns: Sequence[Column], physical_batch_size: int
) -> PhysicalBatch:
    """Returns the batch in ``record``; arrays share its memory and are read-only.

    Args:
      record: Bytes from ``encode_batch``.
      columns: Columns of the record.
      physical_batch_size: As in ``encode_batch``.

    Raises:
      CorruptRecordError: not a record of these columns and this size.
    """
    try:
        feature = Example.FromString(record).features.feature
    except DecodeError:
        raise CorruptRecordError("Expected a tf.train.Example.") from None
    return PhysicalBatch(
        step=_integer(feature, "step"),
        part=_integer(feature, "part"),
        columns={
            column.name: _buffer(
                feature, column.name, column.numpy_dtype, physical_batch_size
            )
            for column in columns
        },
        weight=_buffer(feature, "weight", np.dtype("<f4"), physical_batch_size),
    )
