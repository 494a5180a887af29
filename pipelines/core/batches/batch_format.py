"""Batch format, version 2: one TFRecord is one physical batch of fixed-width columns.

A record is a ``tf.train.Example`` with one bytes feature per column, the raw
little-endian buffer of an array of shape ``(physical_batch_size, *column.shape)``; a
bytes feature ``weight`` (float32, 1 for a real row, 0 for padding); and the int64
features ``step`` and ``part``.  Padding rows are zero bits, after the real rows.

Version 2 has the records of version 1.  Its samples also derive from the digest of the
input (``KnownInput``), so that no key reproduces the batches of version 1.

`decode_batch` returns the bits that `encode_batch` was given, NaN payloads included.
Equal batches have equal bytes, since features are written in the order of their names.
Records are framed with their lengths and checksums, as in TFRecord: `iterate_records`
yields the records that were written, in order, and raises for a flipped bit anywhere
and for a file that ends within a record.

The message ``tf.train.Example`` has a descriptor pool of its own, since TensorFlow
registers the same message in the default pool, and one process may hold both.

Public: column names, types and shapes.  Sensitive: everything else here.

References:
  tensorflow/core/lib/io/record_writer.h; example/example.proto and feature.proto.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
)
from google.protobuf.message import DecodeError

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column, RecordChecksum


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
      CorruptRecordError: the bytes are no record of these columns and this size.
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


_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


class CorruptRecordError(InputError):
    """A batch file does not hold what was written to it."""


def _masked_crc(data: bytes | memoryview) -> int:
    crc = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def write_record(
    write: Callable[[bytes], object], record: bytes, *, step: int, part: int
) -> RecordChecksum:
    """Writes a record in TFRecord framing, and returns its checksum.

    Args:
      write: Appends bytes to a file; called several times.
      record: Contents of the record.
      step: Step of the record.
      part: Index of the record within the step.
    """
    length, digest = _LENGTH.pack(len(record)), hashlib.sha256()
    head, end = length + _CRC.pack(_masked_crc(length)), _CRC.pack(_masked_crc(record))
    for piece in (head, record, end):
        write(piece)
        digest.update(piece)
    size = len(head) + len(record) + len(end)
    return RecordChecksum(step=step, part=part, size=size, sha256=digest.hexdigest())


def iterate_records(data: bytes | memoryview) -> Iterator[bytes]:
    """Yields the records in the contents of a TFRecord file.

    Raises:
      CorruptRecordError: a checksum does not match, or the file ends within a record.
    """
    view, position = memoryview(data), 0
    while position < len(view):
        header = bytes(view[position : position + 12])
        if len(header) < 12 or _CRC.unpack(header[8:])[0] != _masked_crc(header[:8]):
            raise CorruptRecordError(f"Expected a record at byte {position}.")
        start = position + 12
        end = start + _LENGTH.unpack(header[:8])[0]
        record, crc = bytes(view[start:end]), bytes(view[end : end + 4])
        if len(crc) < 4 or _CRC.unpack(crc)[0] != _masked_crc(record):
            raise CorruptRecordError(f"Expected an intact record at byte {position}.")
        yield record
        position = end + 4


_FILE = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Int64List"
  field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL
          type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE label: LABEL_OPTIONAL
          type_name: ".tensorflow.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
          type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE label: LABEL_OPTIONAL
            type_name: ".tensorflow.Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL
          type_name: ".tensorflow.Features" } }
"""

_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_FILE, descriptor_pb2.FileDescriptorProto()))

#: The class of the message.
Example = message_factory.GetMessageClass(
    _pool.FindMessageTypeByName("tensorflow.Example")
)
