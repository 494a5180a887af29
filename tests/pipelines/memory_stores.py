"""Stores in memory, registered with Beam as every store is, for tests.

memory://   an object store, without folders; an object appears when it is closed
folders://  like Hadoop, with folders, and a rename that replaces nothing
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

from apache_beam.io.filesystem import BeamIOError, FileMetadata, FileSystem

#: (operation, path), called before each; a test raises from it.
Listener = Callable[[str, str], None]


class Unfinished(io.BytesIO):
    def __init__(self, appear: Callable[[bytes], None]) -> None:
        super().__init__()
        self._appear = appear

    def close(self) -> None:
        if not self.closed:
            self._appear(self.getvalue())
        super().close()


class MemoryStore(FileSystem):
    """An object store."""

    objects: dict[str, bytes] = {}  # noqa: RUF012, the store is the class
    listeners: list[Listener] = []  # noqa: RUF012
    lock = threading.Lock()
    SCHEME = "memory"
    DIRS = False

    def __init__(self, pipeline_options: Any) -> None:
        super().__init__(pipeline_options)

    @classmethod
    def scheme(cls) -> str:
        return cls.SCHEME

    def has_dirs(self) -> bool:
        return self.DIRS

    def _tell(self, operation: str, path: str) -> None:
        assert path.startswith(f"{self.SCHEME}://"), path
        for listener in self.listeners:
            listener(operation, path)

    def join(self, basepath: str, *paths: str) -> str:
        return "/".join([basepath, *paths])

    def split(self, path: str) -> tuple[str, str]:
        head, tail = path.rsplit("/", 1)
        return head, tail

    def _url_dirname(self, path: str) -> str:
        return path.rsplit("/", 1)[0]

    def mkdirs(self, path: str) -> None:
        raise AssertionError("an object store has no folders")

    def _list(self, prefix: str) -> Iterator[FileMetadata]:
        with self.lock:
            found = {p: d for p, d in self.objects.items() if p.startswith(prefix)}
        return (FileMetadata(path, len(data), 0) for path, data in found.items())

    def create(self, path: str, *_: Any, **__: Any) -> Any:
        self._tell("create", path)

        def appear(data: bytes) -> None:
            self._tell("appear", path)
            with self.lock:
                self.objects[path] = data

        return Unfinished(appear)

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        self._tell("open", path)
        if path not in self.objects:
            raise BeamIOError("no such object", {path: None})
        return io.BytesIO(self.objects[path])

    def copy(self, sources: list[str], destinations: list[str]) -> None:
        raise NotImplementedError

    def rename(self, sources: list[str], destinations: list[str]) -> None:
        raise AssertionError("a rename in an object store is a copy")

    def exists(self, path: str) -> bool:
        return path in self.objects

    def size(self, path: str) -> int:
        return len(self.objects[path])

    def last_updated(self, path: str) -> float:
        return 0.0

    def checksum(self, path: str) -> str:
        raise NotImplementedError

    def metadata(self, path: str) -> FileMetadata:
        return FileMetadata(path, self.size(path), 0)

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            self._tell("delete", path)
            with self.lock:
                del self.objects[path]


class FolderStore(MemoryStore):
    """A file system with folders whose rename replaces nothing."""

    objects: dict[str, bytes] = {}  # noqa: RUF012
    folders: set[str] = set()  # noqa: RUF012
    listeners: list[Listener] = []  # noqa: RUF012
    SCHEME = "folders"
    DIRS = True

    def mkdirs(self, path: str) -> None:
        if path in self.folders:
            raise BeamIOError("exists")
        scheme, rest = path.split("://")
        parts = rest.split("/")
        for end in range(1, len(parts) + 1):
            self.folders.add(f"{scheme}://{'/'.join(parts[:end])}")

    def exists(self, path: str) -> bool:
        return path in self.objects or path in self.folders

    def _list(self, folder: str) -> Iterator[FileMetadata]:
        folder = folder.rstrip("/")
        if folder not in self.folders:
            raise BeamIOError("no such folder", {folder: None})
        for path in sorted(self.folders | set(self.objects)):
            if path.rpartition("/")[0] == folder:
                yield FileMetadata(path, len(self.objects.get(path, b"")), 0)

    def create(self, path: str, *arguments: Any, **options: Any) -> Any:
        if path.rpartition("/")[0] not in self.folders:
            self.mkdirs(path.rpartition("/")[0])
        return super().create(path, *arguments, **options)

    def rename(self, sources: list[str], destinations: list[str]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            self._tell("rename", destination)
            if destination in self.objects:
                raise BeamIOError("exists", {destination: None})
            with self.lock:
                self.objects[destination] = self.objects.pop(source)

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            self._tell("delete", path)
            assert self.exists(path), path
            with self.lock:
                for known in [*self.objects]:
                    if known == path or known.startswith(f"{path}/"):
                        del self.objects[known]
                for folder in [*self.folders]:
                    if folder == path or folder.startswith(f"{path}/"):
                        self.folders.discard(folder)


STORES: dict[str, type[MemoryStore]] = {"memory": MemoryStore, "folders": FolderStore}
