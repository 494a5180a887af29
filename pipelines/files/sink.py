"""A file for libraries that write to one, which counts and hashes what they write."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any


class Sink(io.RawIOBase):
    """Passes all bytes to a function, in order.

    Args:
      write: Takes all of the bytes that it is given.

    Attributes:
      size: Number of bytes so far.
    """

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._write, self._digest = write, hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far, as hex digits."""
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        """Writes all of ``data``."""
        self._write(data)
        self._digest.update(data)
        self.size += len(data)
        return len(data)
