"""Sub-keys of a secret key, public names for it, and streams of random numbers.

Formal guarantees of keys:
  - A new key is uniform, as far as the operating system's random numbers are.
  - Sub-keys of one key under different label tuples are independent and uniform, up to
    the PRF assumption on keyed BLAKE2b; no sub-key reveals the key.
  - A commitment reveals nothing about key and labels, under the same assumption.

Formal guarantees of streams, one for each secret key, up to the PRF assumption on
ChaCha20:
  - Words are independent and uniform in [0, 2**64), the same on every machine.
  - A stream does not repeat: its n-th 64 bytes are those of the 64-bit counter n, also
    beyond the 2**32 blocks that RFC 8439's counter allows.
  - Integers are exactly uniform: words that would favour some of them are rejected.

Public: labels, unless a caller says otherwise, and commitments.  Sensitive: keys and
everything drawn.

References:
  Bernstein, ChaCha, a variant of Salsa20 (2008): 20 rounds, a 64-bit counter, and a
    64-bit nonce, which is 0 here since no key is used for two streams.
  RFC 8439: the same function with a 32-bit counter; the first word of its nonce is the
    upper half of the 64-bit counter.

No function here has a default key or seed.
"""

from __future__ import annotations

import hashlib
import json
import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

#: Bytes of a key and of a sub-key.
KEY_BYTES = 32


def new_key() -> bytes:
    """Returns a key of 256 bits from the operating system.  Secret."""
    return secrets.token_bytes(KEY_BYTES)


def derive(key: bytes, *labels: str | int) -> bytes:
    """Returns the 32-byte sub-key of ``key`` for a tuple of labels.

    Args:
      key: Secret, at most 64 bytes.
      *labels: Encoded as JSON, so that ("a", "bc") and ("ab", "c") differ.
    """
    data = json.dumps(labels, separators=(",", ":")).encode("utf-8")
    return hashlib.blake2b(
        data, key=key, digest_size=KEY_BYTES, person=b"dpsgd-v1"
    ).digest()


def commitment(key: bytes, *labels: str | int) -> str:
    """Returns a public 32-digit name for ``key`` that reveals nothing about it.

    Equal names mean equal keys and labels, up to collisions of 128 bits.

    Args:
      key: Secret, at most 64 bytes.
      *labels: As in ``derive``.
    """
    return derive(key, "commitment", *labels)[:16].hex()


_WORD = 1 << 64
_BLOCK_BYTES = 64
#: Number of blocks before the cipher's 32-bit counter would overflow.
_COUNTER_BLOCKS = 1 << 32
#: Encrypting zeros yields the key stream.  This buffer fits in the processor's cache.
_ZEROS = memoryview(bytes(1 << 16))


class Stream:
    """Uniform 64-bit words of ChaCha20 with 20 rounds.  Sensitive."""

    def __init__(self, key: bytes, *, first_block: int = 0) -> None:
        """Starts a stream.

        Args:
          key: Secret, 32 bytes.
          first_block: Number of 8-word blocks to skip.
        """
        self._key = key
        self._next_block = first_block
        self._bytes_left = 0  # until the cipher's counter ends

    def words(self, count: int) -> np.ndarray:
        """Returns the next ``count`` words, uint64: the key stream in little-endian."""
        words = np.empty(count, "<u8")
        buffer, filled = words.view(np.uint8).data, 0
        while filled < len(buffer):
            if not self._bytes_left:
                self._start_cipher()
            size = min(len(buffer) - filled, self._bytes_left, len(_ZEROS))
            self._cipher.update_into(_ZEROS[:size], buffer[filled : filled + size])
            self._bytes_left -= size
            filled += size
        return words.astype(np.uint64, copy=False)

    def _start_cipher(self) -> None:
        """Starts the cipher at the next block; it lasts until its counter ends."""
        counter = self._next_block.to_bytes(8, "little")
        cipher = Cipher(ChaCha20(self._key, counter + bytes(8)), mode=None)
        self._cipher = cipher.encryptor()
        blocks = _COUNTER_BLOCKS - self._next_block % _COUNTER_BLOCKS
        self._next_block += blocks
        self._bytes_left = blocks * _BLOCK_BYTES

    def integers(self, bound: int, count: int) -> np.ndarray:
        """Returns ``count`` exactly uniform integers in [0, bound), int64.

        Args:
          bound: In [1, 2**63].
          count: Number of integers.
        """
        words = self.words(count)
        # Words in the last, incomplete run of ``bound`` would favour small integers.
        limit = np.uint64(_WORD - _WORD % bound - 1)
        while (rejected := words > limit).any():
            words[rejected] = self.words(int(rejected.sum()))
        return (words % np.uint64(bound)).astype(np.int64)
