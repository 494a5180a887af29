"""A place to write to, for libraries that want a file, that knows what was written."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any


class Sink(io.RawIOBase):
    """Hands all bytes to a function, in order.

    Args:
      write: Takes bytes, all of them.

    Attributes:
      size: Bytes so far.
    """

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._write, self._digest = write, hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        """Of all bytes so far, as hex digits."""
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
