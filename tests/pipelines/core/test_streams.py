"""Guarantees of pipelines.core.keys, against ChaCha20 as its paper has it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipelines.core.keys import Stream
from pipelines.files.key_sources import insecure_key

COUNTER_BLOCKS = 1 << 32

QUARTERS = [
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
]  # fmt: skip


def chacha20(key: bytes, first_block: int, num_blocks: int) -> bytes:
    """Key stream with a 64-bit counter and a 64-bit nonce of 0."""
    counter = np.arange(first_block, first_block + num_blocks, dtype=np.uint64)
    state = np.zeros((16, num_blocks), np.uint32)
    fixed = np.frombuffer(b"expand 32-byte k" + key, "<u4")
    state[:12] = fixed[:, None]
    state[12], state[13] = counter & np.uint64(2**32 - 1), counter >> np.uint64(32)
    x = state.copy()
    for a, b, c, d in 10 * QUARTERS:
        for target, added, mixed, bits in (
            (a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)
        ):  # fmt: skip
            x[target] += x[added]
            x[mixed] ^= x[target]
            x[mixed] = x[mixed] << np.uint32(bits) | x[mixed] >> np.uint32(32 - bits)
    return (x + state).T.astype("<u4").tobytes()


def words_of(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u8").tolist()


def test_the_generator_is_chacha20() -> None:
    """First block of the key stream for a zero key and nonce (RFC 8439, A.1, 1)."""
    words = Stream(bytes(32)).words(8).astype("<u8").tobytes().hex()
    assert words == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert words == chacha20(bytes(32), 0, 1).hex()


@pytest.mark.parametrize(
    "first_block",
    [0, 5, COUNTER_BLOCKS - 2, COUNTER_BLOCKS, 2 * COUNTER_BLOCKS - 1, 2**59 + 3],
)
def test_a_stream_does_not_repeat(first_block: int) -> None:
    """Also across the blocks at which the counter of RFC 8439 ends."""
    key = insecure_key(1)
    stream = Stream(key, first_block=first_block)
    found = [word for count in (3, 13, 0, 16) for word in stream.words(count).tolist()]
    assert found == words_of(chacha20(key, first_block, 4))
    assert len(set(found)) == 32


def test_words_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    """Recipe: SHA-256 of the words of seed 0, as randomgen 2.5.0 drew them.

    They change only with the generator, and then batches that were made before cannot
    be made again: raise FORMAT_VERSION and say so in the changelog.
    """
    golden = "9df58619a47340ddd92a2002237b7f9c846737a3f70dd0ee4e003df3f2ca4e07"
    counts = (1, 0, 7, 8, 9, 8191, 8192, 8193, 30_001)
    stream = Stream(insecure_key(0))
    parts = np.concatenate([stream.words(count) for count in counts])
    assert (parts == Stream(insecure_key(0)).words(sum(counts))).all()
    assert hashlib.sha256(parts.astype("<u8").tobytes()).hexdigest() == golden


class FakeStream(Stream):
    """A stream whose words are given."""

    def __init__(self, words: list[int]) -> None:
        self._words = list(words)

    def words(self, count: int) -> np.ndarray:
        taken, self._words = self._words[:count], self._words[count:]
        return np.array(taken, np.uint64)


def test_integers_reject_the_incomplete_run() -> None:
    # 2**64 = 3 * k + 1: only the largest word is rejected, and redrawn in its place.
    stream = FakeStream([2**64 - 1, 5, 2**64 - 1, 7])
    assert stream.integers(3, 2).tolist() == [7 % 3, 5 % 3]
    assert FakeStream([2**64 - 1]).integers(4, 1).tolist() == [3]
