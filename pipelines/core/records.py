"""The bytes of a record, from the definition of tf.train.Example.

A record has a bytes feature for each column, a bytes feature ``weight`` (float32, 1 for
a row and 0 for padding), and the integers ``step`` and ``part``; padding is zero bits,
after the rows.

Formal guarantees:
  - Equal rows, step and part have equal bytes: those that the batch job writes.

Sensitive: all of it.

References:
  tensorflow/core/example/feature.proto.
  protobuf.dev/programming-guides/encoding: tags, varints, maps as repeated messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from pipelines.core.batches.columns import Column
from pipelines.core.batches.record_checksums import RecordChecksum
from pipelines.core.batches.tfrecord import write_record


def checksum(
    values: Sequence[np.ndarray],
    columns: Sequence[Column],
    *,
    step: int,
    part: int,
    size: int,
) -> RecordChecksum:
    """Returns the checksum of the record of some rows.

    Args:
      values: The cells of each column, as little-endian bytes; rows are the first axis.
      columns: The columns.
      step: Step of the rows.
      part: Number of the record within the step.
      size: Rows of the record, real and padding.
    """
    num_rows = len(values[0])
    weight = np.zeros(size, "<f4")
    weight[:num_rows] = 1
    features = {
        "weight": _message(1, _message(1, weight.tobytes())),
        "step": _message(3, _message(1, _varint(step))),
        "part": _message(3, _message(1, _varint(part))),
    }
    for column, cells in zip(columns, values, strict=True):
        data = cells.tobytes() + bytes((size - num_rows) * column.num_bytes)
        features[column.name] = _message(1, _message(1, data))
    entries = [
        _message(1, _message(1, name.encode()) + _message(2, features[name]))
        for name in sorted(features, key=_place)
    ]
    record = _message(1, b"".join(entries))
    framed = list[bytes]()
    write_record(framed.append, record)
    digest = hashlib.sha256()
    for piece in framed:
        digest.update(piece)
    size = sum(map(len, framed))
    return RecordChecksum(step=step, part=part, size=size, sha256=digest.hexdigest())


def _place(name: str) -> bytes:
    """Returns what names are sorted by, as upb (protobuf's library) sorts the job's.

    By their bytes; a name comes after those that begin with it.
    """
    return name.encode() + b"\xff"  # which is in no UTF-8


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _message(field: int, data: bytes) -> bytes:
    """Returns a field of bytes, of packed integers, or of a message."""
    return b"".join([bytes([field << 3 | 2]), _varint(len(data)), data])
