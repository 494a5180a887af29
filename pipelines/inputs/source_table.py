"""Which table rows are from: the files that `dpsgd prepare` read, and the part.

A table that is prepared again, with another schema or elsewhere, is the same table, so
that what was released of its rows counts for both.

The sources of prepared rows are the files that were read, and those of other rows are
their own files.  If files were moved or written into a prepared folder, the sources are
both, and the rows have no division.  Two inputs with one source file in common have a
digest in common.  Preparations of the same files with equal ``division`` put a row into
the same part: ``division`` commits to the order of the files, the split, how the cells
that decide it are read, the size of each part and, where malformed rows are left out of
a split by place, how every column is read.

A source that was packed, converted or edited is another one.  Of text of more than
1 MiB, size and samples are compared, not every byte.

Public: names of parts.  Sensitive: digests, against which guesses could be checked.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.core.users import BOUNDED
from pipelines.files import storage
from pipelines.files.storage import absolute, is_remote, join, read_json

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes and number of the samples of a text.
_SAMPLE_BYTES, _NUM_SAMPLES = 1 << 16, 16
_PARQUET_END = b"PAR1"
SOURCES, READ, FOOTERS = "sources", "read", "footers"
#: The record that `dpsgd prepare` writes beside the folders of its splits.
PREPARED_NAME = "_prepared.json"


@contextlib.contextmanager
def open_listed(path: str) -> Iterator[IO[bytes] | pa.NativeFile]:
    """Yields an open file of an input.

    Raises:
      InputError: the file cannot be opened, or is found to be damaged within the
        context.
    """
    import pyarrow as pa  # `dpsgd fit --help` needs none

    try:
        # A file of Arrow's avoids a copy.
        opened = storage.open_file(path) if is_remote(path) else pa.OSFile(path)
        with opened as file:
            yield file
    except (pa.ArrowException, OSError) as error:  # whose text may quote a row
        raise InputError(
            f"Expected input file {path} to be readable and intact, and to hold no "
            f"nulls: {type(error).__name__}."
        ) from None


def footer_digest_of(file: IO[bytes] | pa.NativeFile, path: str) -> str:
    """Returns what `footer_digest` does, of an open file.

    Args:
      file: The file.
      path: Path of the file, for messages.
    """
    file.seek(0, 2)
    size = file.tell()
    file.seek(max(0, size - 8))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little") + 8
    if tail[4:] != b"PAR1" or length > size:
        raise InputError(
            f"Expected {path} to be a Parquet file. `dpsgd prepare` makes it from text."
        )
    file.seek(size - length)
    digest = hashlib.sha256(size.to_bytes(8, "little") + file.read(length)).hexdigest()
    file.seek(0)
    return digest


def footer_digest(path: str) -> str:
    """Returns the SHA-256 over a file's size and footer.  Sensitive.

    The footer holds the number of rows and the place, size and range of every column.

    Raises:
      InputError: ``path`` is not a readable Parquet file.
    """
    with open_listed(path) as file:
        return footer_digest_of(file, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTable:
    """The table that rows are from.

    Attributes:
      sources: Digests of the files that it was read from, in order; empty if unknown.
      division: Commitment to which row is in which part; empty if not prepared.
      part: Name of the part, such as train; empty if not prepared.
    """

    sources: tuple[str, ...]
    division: str = ""
    part: str = ""

    def is_apart(self, sources: Iterable[str]) -> bool:
        """Whether no source file is among others."""
        return set(self.sources).isdisjoint(sources)

    def check_apart(self, other: SourceTable, option: str) -> None:
        """Refuses rows of this table that are not known to be of another part.

        Args:
          other: Table of the rows.
          option: Flag that gave them, for messages.

        Raises:
          InputError: the tables have a source file in common, and the same part, or
            parts that were divided otherwise.
        """
        if not (self.is_apart(other.sources) or self.is_held_out(other)):
            raise InputError(
                f"Expected {option} to hold no training examples; its rows are of the "
                "same table. Give another part of the same preparation."
            )

    def is_held_out(self, other: SourceTable) -> bool:
        """Whether rows of another one are of this table, but of another part."""
        of_this_part = dataclasses.replace(other, part=self.part)
        return self.is_same(of_this_part) and other.part not in ("", self.part)

    def is_same(self, other: SourceTable) -> bool:
        """Whether rows of another one are rows of this one, in the same parts."""
        known = bool(other.sources) and set(other.sources) <= set(self.sources)
        parts = (self.division, self.part), (other.division, other.part)
        return known and parts[0] == parts[1]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SourceTable:
        """Returns the table whose fields these are; an unknown one without fields."""
        return cls(**{**fields, "sources": tuple(fields.get("sources", ()))})


def read_from(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns what a record of prepared rows says of the files that were read.

    Args:
      paths: Files of this machine.

    Returns:
      ``SOURCES``: digests of source files, which tell them from others; of files that
      `dpsgd prepare` wrote, those of the files that it read.  ``READ``: a digest of
      each file.  Sensitive.
    """
    sources, read = list[str](), list[str]()
    known: dict[str, tuple[dict[str, str], list[str]]] = {}
    for path in paths:
        folder, _, name = os.path.realpath(path).rpartition("/")
        if folder not in known:
            known[folder] = as_written(folder)
            sources += known[folder][1]
        read.append(_source_digest(path))
        footers, before = known[folder]
        if not before or footers.get(name) != read[-1]:
            sources.append(read[-1])
    return {SOURCES: sources, READ: read}


def _source_digest(path: str) -> str:
    with storage.open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_PARQUET_END)))
        if file.read() == _PARQUET_END:
            return footer_digest(path)
        total = hashlib.sha256(f"dpsgd source {size} ".encode())
        last = max(0, size - _SAMPLE_BYTES)
        for place in range(_NUM_SAMPLES):
            file.seek(last * place // (_NUM_SAMPLES - 1))
            total.update(file.read(_SAMPLE_BYTES))
        return total.hexdigest()


def table_of(listing: Any) -> SourceTable:
    """Returns the table that the rows of an input are from.

    Args:
      listing: A `parquet_blocks.Dataset`, which this module cannot import.
    """
    parts = {absolute(block.path).rpartition("/")[0] for block in listing.blocks}
    if len(parts) == 1:
        folder = parts.pop()
        above, _, part = folder.rpartition("/")
        if found := _prepared(above, part, listing):
            return found
    return SourceTable(sources=tuple(listing.footers.values()))


def footers_of(folder: pathlib.Path, names: Iterable[str]) -> dict[str, str]:
    """Returns name -> `footer_digest` of files in a folder.  Sensitive.

    Args:
      folder: The folder.
      names: Names of the files in it.
    """
    return {name: footer_digest(str(folder / name)) for name in names}


def as_written(folder: str) -> tuple[dict[str, str], list[str]]:
    """Returns name -> `footer_digest` of files as they were written, and the sources.

    Args:
      folder: A part of what `dpsgd prepare` wrote; of others nothing is known.
    """
    above, _, part = folder.rpartition("/")
    path = join(above, PREPARED_NAME)
    if storage.exists(path):
        found = read_json(path)
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # edited
            footers = found[FOOTERS].items()
            own = {name.removeprefix(f"{part}/"): each for name, each in footers}
            return own, list(found.get("settings", {}).get(SOURCES, ()))
    return {}, []


def _prepared(folder: str, part: str, listing: Any) -> SourceTable | None:
    """Returns the table of a part of prepared data; None if its record is not there."""
    path = join(folder, PREPARED_NAME)
    if not storage.exists(path):
        return None
    try:
        record = read_json(path)
        settings, dataset = record["settings"], record["dataset"]
        sources = settings.get(SOURCES, ())
        sizes: collections.Counter[str] = collections.Counter()
        for name, file in record["files"].items():
            sizes[name.partition("/")[0]] += file["num_rows"]
        written = record[FOOTERS].items()
    except (InputError, KeyError, TypeError, AttributeError):
        return SourceTable(sources=())  # its owner alone may read it
    footers = listing.footers.items()
    found = {f"{part}/{os.path.basename(name)}": each for name, each in footers}
    if not found.items() <= written:  # such as files of another part
        return SourceTable(sources=(*sources, *listing.footers.values()))
    has_users = "max_examples_per_user" in settings or BOUNDED in dataset
    division = {
        "order": settings.get(READ, sources),
        "split": _split(dataset, settings.get("on_bad_row") == "skip"),
        "rows": None if has_users else dict(sizes),
    }
    return SourceTable(
        sources=tuple(sources), division=fingerprint(division)[:32], part=part
    )


def _split(dataset: Mapping[str, Any], skips: bool) -> Any:
    """Returns all by which a row has its part: the split, and how its cell is read.

    Args:
      dataset: Description of the rows.
      skips: Whether malformed rows are left out.  Which ones moves all rows after
        them, in a split by shares of all, and depends on how each column is read.
    """
    schema = dataset.get("schema", {})
    split = schema.get("split", {})
    kind = schema.get("columns", {}).get(split.get("column"), {})
    times = [kind.get(name) for name in ("format", "zone")]
    by_count = skips and split.get("by") == "fraction"
    others = [schema["columns"]] if by_count and "columns" in schema else []
    return [split, times, schema.get("input"), dataset.get("cells"), *others]
