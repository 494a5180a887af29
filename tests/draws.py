"""What a test draws at random in its process depends on the test alone.

A test of keys, noise or error rates that passes once passes on every day, in any order
of the tests and beside any others.  Sampling keys, noise keys and the coins of an audit
are those of a fixed stream; so are Python's and NumPy's generators that got no seed.

Names of temporary files, 8 bytes, stay what they are: threads draw them in any order,
and another process must not draw the same.  TensorFlow, and processes that a test
starts, are as without this module.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

#: The fewest bytes of a secret, which is the identifier of a run.
_SECRET_BYTES = 16

_stream = random.Random()


@contextlib.contextmanager
def drawn_by(name: str) -> Iterator[None]:
    """Starts the stream of a test or of a fixture, and then goes back to that before.

    Args:
      name: Whose stream it is.
    """
    before = _stream.getstate()
    _stream.seed(name)
    random.seed(name)
    np.random.seed(_stream.getrandbits(32))
    try:
        yield
    finally:
        _stream.setstate(before)


def replace_sources() -> None:
    """Lets this process draw from the stream: to be called once."""
    token_bytes, default_rng = secrets.token_bytes, np.random.default_rng

    def drawn_bytes(size: int) -> bytes:
        return _stream.randbytes(size) if size >= _SECRET_BYTES else token_bytes(size)

    def seeded(seed: Any = None) -> np.random.Generator:
        return default_rng(_stream.getrandbits(128) if seed is None else seed)

    # ``secrets.token_hex`` calls the first one too.
    secrets.token_bytes = drawn_bytes  # type: ignore[assignment]
    np.random.default_rng = seeded
