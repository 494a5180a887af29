"""Ids of users as 64-bit numbers, by a keyed hash that is the same on every engine.

Formal guarantees, for ids of one column:
  - equal ids: they have equal numbers, in whatever file, block or encoding of the
    column's type they come, and so do equal texts and equal integers of any width.
  - integers: different ones never share a number.
  - texts: a user shares a number with one of m others with probability of nearly
    m * 2**-64, over the secret key.  The two then count as one user: fewer of their
    rows are kept, and what hides one hides them as a pair.
  - no id is missing: a null could be one user or many, and is refused, as are
    floating-point numbers, which compare in surprising ways.

Sensitive: ids, and the numbers, which reveal who has many rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError
from pipelines.core.keys import derive
from pipelines.core.users.hashing import AFTER, hash_fields, mix, words_of


def check_type(name: str, kind: pa.DataType) -> None:
    """Checks that the values of a column can be ids.

    Args:
      name: Name of the column.
      kind: Type of the column.

    Raises:
      InputError: neither integers nor text nor bytes.
    """
    if _hasher(kind) is None:
        raise InputError(
            f"Expected user column {name} of type {kind} to hold integers, text or "
            "bytes. Cast it, for example by `table.astype({'NAME': str})` in pandas."
        )


def hash_ids(name: str, column: pa.Array | pa.ChunkedArray, key: bytes) -> np.ndarray:
    """Returns the number of each row's user, uint64 of shape (rows,).

    Args:
      name: Name of the column.
      column: Values of the column.
      key: Secret, 32 bytes.

    Raises:
      InputError: a null, or a type that ``check_type`` refuses.
    """
    check_type(name, column.type)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if any(map(_has_nulls, chunks)):
        raise InputError(
            f"Expected user column {name} to hold no nulls: a row without a user is "
            "nobody's. Give each such row an id of its own, or drop it."
        )
    found = [_hash(chunk, key) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.uint64), *found])


def _has_nulls(values: pa.Array) -> bool:
    words = values.dictionary if pa.types.is_dictionary(values.type) else values
    return bool(values.null_count or words.null_count)


def is_text(kind: pa.DataType) -> bool:
    """Whether cells are texts or bytes of any length."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
    )


_Hasher = Callable[[pa.Array, bytes], np.ndarray]


def _hasher(kind: pa.DataType) -> _Hasher | None:
    types = pa.types
    if types.is_dictionary(kind):
        return _hash_dictionary if _hasher(kind.value_type) else None
    if types.is_integer(kind):
        return _hash_integers
    fixed = types.is_fixed_size_binary(kind) and not types.is_decimal(kind)
    return _hash_bytes if is_text(kind) or fixed else None


def _hash(values: pa.Array, key: bytes) -> np.ndarray:
    hasher = _hasher(values.type)
    assert hasher is not None  # by check_type
    return hasher(values, key)


def _hash_dictionary(values: pa.DictionaryArray, key: bytes) -> np.ndarray:
    return _hash(values.dictionary, key)[values.indices.to_numpy()]


def _hash_integers(values: pa.Array, key: bytes) -> np.ndarray:
    signed = values if values.type == pa.uint64() else values.cast(pa.int64())
    first, second = _salts(key, "integers")
    return mix(mix(signed.to_numpy().astype(np.uint64) ^ first) ^ second)


def _hash_bytes(values: pa.Array, key: bytes) -> np.ndarray:
    values = values.cast(pa.large_binary())
    start, size = values.offset, len(values)
    _, offsets, data = values.buffers()
    edges = np.frombuffer(offsets, np.int64)[start : start + size + 1]
    text = b"" if data is None else data[: int(edges[-1])].to_pybytes()
    first, second = _salts(key, "text")
    return mix(
        hash_fields(words_of(text + AFTER), edges[:-1], edges[1:], first) ^ second
    )


def _salts(key: bytes, kind: str) -> tuple[np.uint64, np.uint64]:
    first, second = np.frombuffer(derive(key, "user ids", kind)[:16], "<u8")
    return first, second
