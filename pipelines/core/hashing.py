"""Strings to buckets and ids to numbers, by a hash that no machine or release changes.

    h = salt ^ len(s) * 0x9E3779B97F4A7C15, then h = mix(h ^ word) for each
    little-endian 64-bit word of the bytes s, the last one zero-padded; an empty s is
    one zero word
    bucket = 1 + ((h >> 32) * (buckets - 1) >> 32)

``mix`` is the finaliser of splitmix64.  Two strings of the same length of at most 8
bytes never share a hash; two others do with probability 2**-64.

Formal guarantees:
  - A bucket is a function of the bytes, the salt and the number of buckets alone.
  - Buckets lie in [1, buckets): 0 is left for what is missing.
  - ``hash_ids``: equal texts of ids have equal numbers, in whatever file or block they
    come.  A user shares a number with one of m others with probability of nearly m *
    2**-64, over the secret key.  The two then count as one user: fewer of their rows
    are kept, and what hides one hides them as a pair.

Public: salts and numbers of buckets.  Sensitive: strings, ids, hashes, and the numbers
of users, which reveal who has many rows.

References:
  Steele, Lea and Flood (2014), "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

from pipelines.core.keys import derive

#: Change it when a string may get another bucket.
HASH_NAME = "dpsgd-mix64-v1"

#: Up to eight bytes after the text are read as part of a word.
AFTER = b"\0\0\0\0\0\0\0\0"

GOLDEN = 0x9E3779B97F4A7C15
#: Words whose lowest n bytes are ones.
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def mix(state: np.ndarray) -> np.ndarray:
    """Returns the splitmix64 finaliser of uint64 values, a bijection."""
    state = state ^ (state >> np.uint64(30))
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def words_of(data: bytes) -> np.ndarray:
    """Returns the little-endian word that starts at each byte, a view of ``data``."""
    return np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))


def _first_bytes(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the words with all but their first ``lengths`` bytes zeroed."""
    return words & _LOW_BYTES[np.minimum(lengths, 8)]


def hash_fields(
    words: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    salts: np.ndarray | np.uint64,
) -> np.ndarray:
    """Returns a 64-bit hash of each field.

    Args:
      words: ``words_of`` a text that ends in ``AFTER``.
      starts: int64 offsets of the fields, of any shape.
      ends: Offsets after the fields, of the same shape.
      salts: uint64, of a shape that broadcasts to theirs.
    """
    lengths = ends - starts
    states = lengths.astype(np.uint64)
    states *= np.uint64(GOLDEN)
    states ^= salts
    states ^= _first_bytes(words[starts], lengths)
    states = mix(states)
    flat, starts, lengths = states.reshape(-1), starts.reshape(-1), lengths.reshape(-1)
    longer, offset = np.flatnonzero(lengths > 8), 8
    while longer.size:
        rest = lengths[longer] - offset
        flat[longer] = mix(
            flat[longer] ^ _first_bytes(words[starts[longer] + offset], rest)
        )
        longer, offset = longer[rest > 8], offset + 8
    return states


@functools.cache
def salt_of(name: str) -> np.uint64:
    """Returns the salt of the hash of a column or split."""
    return np.uint64(hash_texts(pa.array([name]), np.uint64(0))[0])


def hash_texts(texts: pa.Array, salt: np.uint64) -> np.ndarray:
    """Returns uint64 hashes; null has the hash of the empty text.

    Args:
      texts: Texts.
      salt: From ``salt_of``.
    """
    if not len(texts):
        return np.empty(0, np.uint64)
    if texts.type != pa.large_string():
        texts = texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    first, count = texts.offset, len(texts)
    at = np.frombuffer(offsets, np.int64)[first : first + count + 1]
    text = b"" if data is None else memoryview(data)[at[0] : at[-1]]
    at = at - at[0]
    return hash_fields(words_of(b"".join((text, AFTER))), at[:-1], at[1:], salt)


def buckets_of(hashes: np.ndarray, num_buckets: np.ndarray | int) -> np.ndarray:
    """Returns uint64 buckets in [1, ``num_buckets``).

    Args:
      hashes: uint64.
      num_buckets: At least 2, of a shape that broadcasts to that of ``hashes``.
    """
    buckets = hashes >> np.uint64(32)
    buckets *= np.asarray(num_buckets, np.uint64) - np.uint64(1)
    buckets >>= np.uint64(32)
    buckets += np.uint64(1)
    return buckets


def hash_ids(texts: pa.LargeStringArray, key: bytes) -> np.ndarray:
    """Returns the number of each row's user, uint64 of shape (rows,).

    Args:
      texts: One text for each id, without nulls.
      key: Secret, 32 bytes.
    """
    first, second = np.frombuffer(derive(key, "user ids", "text")[:16], "<u8")
    return mix(hash_texts(texts, first) ^ second)
