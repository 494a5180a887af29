"""Batch format, version 2: one TFRecord is one physical batch of fixed-width columns.

A record is a ``tf.train.Example`` with one bytes feature per column, the raw
little-endian buffer of an array of shape ``(physical_batch_size, *column.shape)``; a
bytes feature ``weight`` (float32, 1 for a real row, 0 for padding); and the int64
features ``step`` and ``part``.  Padding rows are all zero bits and stand at the end.  A
reader parses once per batch, never per example.

Records are those of version 1.  Since version 2 the choices derive from the digest of
the input too (``known_input``), so that no key makes the batches of version 1 again.

Formal guarantees:
  - ``decode_batch(encode_batch(batch))`` returns the same bits, NaN payloads included.
  - Equal batches have equal bytes (features are written in the order of their names).
  - Every record is framed with the masked CRC-32C of TFRecord; a flipped bit anywhere
    in a record is an error.
  - ``check_record`` accepts no record that ``decode_batch`` could not read.

Public: column names, types and shapes.  Sensitive: everything else here.

References:
  TFRecord framing: tensorflow/core/lib/io/record_writer.h.
  The largest message: protobuf.dev/programming-guides/proto-limits, 2 GiB.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.validation import InputError, check_choice

#: Bump when a reader of the old version would misread the new one, or when the same
#: key and input would give other batches.
FORMAT_VERSION = 2

DTYPES = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
RESERVED_NAMES = ("weight", "step", "part")

#: Of a serialized message: no reader of protocol buffers takes a longer one.
MOST_RECORD_BYTES = (1 << 31) - 1
#: More than tags and lengths of a feature take (six of at most 6 bytes), and more than
#: the features step and part beside them.
_FEATURE_BYTES, _STEP_BYTES = 40, 80

_LENGTH = struct.Struct("<Q")
_WEIGHT_BYTES = 4
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


class CorruptRecordError(InputError):
    """A batch file does not hold what was written to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """Name, NumPy type and per-example shape of one column.  All public.

    Raises:
      InputError: a type that is not fixed-width numeric, a reserved name, or more bytes
        of one example than a record or NumPy can hold.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice(f"dtype of column {self.name}", self.dtype, DTYPES)
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.name in RESERVED_NAMES:
            raise InputError(
                f"Expected column name={self.name!r} not to be one of "
                f"{', '.join(RESERVED_NAMES)}. Rename the column."
            )
        size = np.dtype(self.dtype).itemsize * math.prod(self.shape)
        if size > MOST_RECORD_BYTES:
            raise InputError(
                f"Expected column {self.name} to hold at most {MOST_RECORD_BYTES} "
                f"bytes in a row; it holds {size}. Split it, or drop it."
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian dtype of one example, a sub-array dtype if it has a shape."""
        scalar = np.dtype(self.dtype).newbyteorder("<")
        return np.dtype((scalar, self.shape)) if self.shape else scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhysicalBatch:
    """One record.  Sensitive.

    Attributes:
      step: The step that this batch belongs to.
      part: Its index among the physical batches of that step, from 0.
      columns: name -> array of shape (physical_batch_size, *column.shape).
      weight: float32 of shape (physical_batch_size,), 1 real, 0 padding.
    """

    step: int
    part: int
    columns: Mapping[str, np.ndarray]
    weight: np.ndarray

    def __repr__(self) -> str:
        # The contents, and how many rows are real, must not reach a log by accident.
        return f"PhysicalBatch(step={self.step}, part={self.part})"


def row_bytes(columns: Sequence[Column]) -> int:
    """Returns the bytes of one row of ``columns``."""
    return sum(column.numpy_dtype.itemsize for column in columns)


def record_bytes(columns: Sequence[Column], physical_batch_size: int) -> int:
    """Returns what no record is longer than, by few bytes.

    Args:
      columns: Of the rows.
      physical_batch_size: Rows of the record, real and padding.
    """
    names = [*(column.name for column in columns), "weight"]
    framing = sum(len(name.encode()) + _FEATURE_BYTES for name in names) + _STEP_BYTES
    return physical_batch_size * (row_bytes(columns) + _WEIGHT_BYTES) + framing


def check_record(columns: Sequence[Column], physical_batch_size: int) -> None:
    """Refuses records that could be written and never be read.

    Args:
      columns: Of the rows.
      physical_batch_size: Rows of the record, real and padding.

    Raises:
      InputError: they are too long.
    """
    size = record_bytes(columns, physical_batch_size)
    if size <= MOST_RECORD_BYTES:
        return
    row = row_bytes(columns) + _WEIGHT_BYTES
    most = (MOST_RECORD_BYTES - record_bytes(columns, 0)) // row
    if most < 1:
        raise InputError(
            f"Expected one row, of {row} bytes, to fit into a record of at most "
            f"{MOST_RECORD_BYTES}. Drop or split columns."
        )
    raise InputError(
        f"Expected physical_batch_size={physical_batch_size} to make records of at "
        f"most {MOST_RECORD_BYTES} bytes, which can be read; at {row} bytes a row they "
        f"have {size}. Make the batches with --physical-batch-size {most} or less."
    )


def as_items(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` as a flat array of opaque items, one per row.

    NumPy gathers such items by copying memory, whatever shape a row has.
    """
    contiguous = np.ascontiguousarray(values)
    size = contiguous.itemsize * int(np.prod(contiguous.shape[1:]))
    return contiguous.reshape(-1).view(f"V{size}")


@functools.cache
def _example_class() -> Any:
    # A private descriptor pool: TensorFlow registers the same messages in the default
    # one, and this module must work with and without it.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto

    def add(message: Any, name: str, number: int, kind: int, **more: Any) -> None:
        message.field.add(name=name, number=number, type=kind, **more)

    repeated, single = field.LABEL_REPEATED, field.LABEL_OPTIONAL
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("Int64List", field.TYPE_INT64),
    ):
        add(file.message_type.add(name=name), "value", 1, kind, label=repeated)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for name, number, kind in (
        ("bytes_list", 1, "BytesList"),
        ("int64_list", 3, "Int64List"),
    ):
        add(
            feature, name, number, field.TYPE_MESSAGE,
            label=single, type_name=f".tensorflow.{kind}", oneof_index=0,
        )  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING, label=single)
    add(
        entry, "value", 2, field.TYPE_MESSAGE,
        label=single, type_name=".tensorflow.Feature",
    )  # fmt: skip
    add(
        features, "feature", 1, field.TYPE_MESSAGE,
        label=repeated, type_name=".tensorflow.Features.FeatureEntry",
    )  # fmt: skip
    add(
        file.message_type.add(name="Example"), "features", 1, field.TYPE_MESSAGE,
        label=single, type_name=".tensorflow.Features",
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("tensorflow.Example")
    return message_factory.GetMessageClass(descriptor)


def encode_batch(
    columns: Mapping[str, np.ndarray], *, step: int, part: int, physical_batch_size: int
) -> bytes:
    """Returns the record of the rows in ``columns``, padded with weight-0 rows.

    Args:
      columns: name -> little-endian array of shape (rows, ...), of at most
        ``physical_batch_size`` rows, the same number in each.  Sensitive.
      step: Step of the batch.
      part: Index of the record within the step.
      physical_batch_size: Rows of the record, real and padding.
    """
    num_rows = {len(values) for values in columns.values()}
    if len(num_rows) != 1 or max(num_rows) > physical_batch_size:
        raise ValueError("Expected columns of one length <= physical_batch_size.")
    (num_real,) = num_rows
    example = _example_class()()
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

    Raises:
      CorruptRecordError: not a record of these columns and this size.
    """
    from google.protobuf.message import DecodeError

    try:
        feature = _example_class().FromString(record).features.feature
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


def _masked_crc(data: bytes | memoryview) -> int:
    import google_crc32c

    crc = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def write_record(write: Callable[[bytes], object], record: bytes) -> None:
    """Hands ``record`` to what writes a file, in TFRecord framing."""
    length = _LENGTH.pack(len(record))
    write(length + _CRC.pack(_masked_crc(length)))
    write(record)
    write(_CRC.pack(_masked_crc(record)))


def iterate_records(data: bytes | memoryview) -> Iterator[bytes]:
    """Yields the records of the contents of one TFRecord file.

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
