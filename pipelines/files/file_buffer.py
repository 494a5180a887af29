"""A buffer that is reused for one file after another."""

from __future__ import annotations

import os

from pipelines.files.paths import StrPath, is_remote
from pipelines.files.storage import drop_from_cache, read_bytes


class FileBuffer:
    """A buffer as large as the largest file so far.

    New memory for each file would cost more than reading it, since the kernel clears
    every page.

    Args:
      cached: Whether the page cache may keep the files.
    """

    def __init__(self, *, cached: bool = True) -> None:
        self._cached = cached
        self._memory = memoryview(bytearray())

    def read(self, path: StrPath) -> memoryview:
        """Returns the contents of a file, valid until the next call.

        Raises:
          OSError: missing, or no access.
        """
        if is_remote(path):
            return memoryview(read_bytes(path))
        with open(path, "rb", buffering=0) as file:
            size, filled = os.fstat(file.fileno()).st_size, 0
            if size > len(self._memory):
                self._memory = memoryview(b"")  # before there are two
                self._memory = memoryview(bytearray(size))
            while part := file.readinto(self._memory[filled:size]):  # may read less
                filled += part
            if not self._cached:
                drop_from_cache(file.fileno())
        return self._memory[:filled]
