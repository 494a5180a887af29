"""Streams of uniform numbers from a cryptographic generator, one per secret key.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20:
  - words are independent and uniform in [0, 2**64), the same on every machine;
  - integers are exactly uniform: what would favour some of them is rejected.

Sensitive: keys and everything that is drawn.
"""

from __future__ import annotations

import numpy as np

_WORD = 1 << 64


class Stream:
    """Uniform 64-bit words of ChaCha20 with 20 rounds.  Sensitive."""

    def __init__(self, key: bytes) -> None:
        from randomgen import ChaCha

        self._generator = ChaCha(key=int.from_bytes(key, "little"), rounds=20)

    def words(self, count: int) -> np.ndarray:
        """Returns the next ``count`` words, uint64."""
        return self._generator.random_raw(count)

    def integers(self, bound: int, count: int) -> np.ndarray:
        """Returns ``count`` exactly uniform integers in [0, bound), int64."""
        words = self.words(count)
        # The last, incomplete run of ``bound`` words would favour small integers.
        limit = np.uint64(_WORD - _WORD % bound - 1)
        while (rejected := words > limit).any():
            words[rejected] = self.words(int(rejected.sum()))
        return (words % np.uint64(bound)).astype(np.int64)
