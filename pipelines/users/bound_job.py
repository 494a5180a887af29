"""At most k rows of each user, of data of any size: a Map-Reduce job on ids alone.

    OUT.unfinished/job.json          digest of input, settings and key
    OUT.unfinished/private.key       the key, unless the user named one
    OUT.unfinished/ids/block-*       map: users, priorities and places of rows, by part
    OUT.unfinished/kept/block-*      reduce: the kept rows of each run
    OUT.unfinished/rows/block-*      kept rows by part, if users are sampled
    OUT.unfinished/data/part-*       the kept rows of each run, or the users of each
                                     part; becomes OUT

A run is a few consecutive row groups, and a part is a share of the users.  Only 20
bytes of a row travel from map to reduce; the rows themselves are read once more, and
written in their order, or by user (``user_records``).  Each step is a list of
independent tasks, one per file, for threads of this machine or workers of an engine.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20:
  - at most k: no user has more than ``max_examples_per_user`` rows in ``out``, in
    whatever files and row groups they were.
  - uniform choice: of a user with more, each set of that many rows is equally likely.
  - pure function: which rows are kept depends only on the key, the input and the
    settings; files are the same bytes on every engine, with any number of workers and
    any memory limit.
  - the id is gone: ``out`` holds every column but the users' ids, in the same order.
  - nothing is told: no message, summary or public field depends on the number of users,
    or on how many rows any of them has; but more kept rows than ``num_examples`` are
    refused, without their number.
  - a file appears complete or not at all.  The same command resumes a killed one; one
    with another input, setting or key is refused.
  - bounded memory: a task holds a run or a part, the smaller the wider their rows are;
    a user's rows within a run are bounded before they travel, so that one user with
    very many rows does not fill a part.

Public: settings, names and types of columns.  Sensitive: rows, ids, the key, and
everything in ``OUT.unfinished``.

References:
  Charles et al. (2024), arXiv:2407.07737, on bounding contributions of users.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER
from accounting.core.validation import InputError, check_int
from pipelines.core.users.bounded import UserBound
from pipelines.core.users.keep_least import draw_priorities, keep_least
from pipelines.core.users.user_ids import hash_ids
from pipelines.files.key_files import read_key_file
from pipelines.inputs.known_input import KnownInput
from pipelines.inputs.parquet_blocks import Block, read_table
from pipelines.job.spill import read_slice, spill_path, write_spill
from pipelines.tables.cells.cells import Cells, plain_errors
from pipelines.tables.cells.ids import ids_of
from pipelines.tables.prepared_files import new_table

#: A row between map and reduce; ``row`` is its index in its run.
ENTRY = np.dtype([("user", "<u8"), ("priority", "<u8"), ("row", "<u4")])
#: A kept row between reduce and writing.
KEPT_ROW = np.dtype([("user", "<u8"), ("row", "<u4")])

#: Folders below that of the unfinished job.
IDS, KEPT, ROWS_OF_PARTS, DATA = FOLDERS = ("ids", "kept", "rows", "data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundSettings(UserBound):
    """A bound to apply.  All public.

    Raises:
      InputError: as for `UserBound`, or more rows per user than any proof covers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_users:
            check_int(
                "max_examples_per_user",
                self.max_examples_per_user,
                at_most=MOST_EXAMPLES_PER_USER,
                remedy="No epsilon is proven for more sampled rows of a user. Keep "
                "fewer, or sample users: --sample users.",
            )


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive blocks that one task reads, and whose rows fill one file.

    Attributes:
      number: Index of the run.
      blocks: Its blocks, in order.
    """

    number: int
    blocks: tuple[Block, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows in its blocks."""
        return sum(block.num_rows for block in self.blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundJob:
    """The description of a job that workers get.  Public.

    Attributes:
      settings: Which rows are kept.
      blocks: Blocks of the input.
      known: Keyed digests of the input.
      names: Columns that are kept.
      arrow_schema: Schema of the output files, in Arrow's format: a pickled schema
        forgets which elements of lists may be null.
      run_rows: Maximum number of rows in a run, unless one row group has more.
      num_parts: Number of parts.
      work: Folder of the unfinished job.
      key_file: File of the key, which every worker reads.
    """

    settings: BoundSettings
    blocks: tuple[Block, ...]
    known: KnownInput
    names: tuple[str, ...]
    arrow_schema: bytes
    run_rows: int
    num_parts: int
    work: str
    key_file: str

    @property
    def schema(self) -> pa.Schema:
        """Schema of the output files, with the note that users are bounded."""
        return pa.ipc.read_schema(pa.py_buffer(self.arrow_schema))

    @property
    def runs(self) -> list[Run]:
        """The runs of the input."""
        runs: list[list[Block]] = []
        room = 0
        for block in self.blocks:
            if not runs or block.num_rows > room:
                runs.append([])
                room = max(self.run_rows, block.num_rows)
            runs[-1].append(block)
            room -= block.num_rows
        return [Run(number, tuple(blocks)) for number, blocks in enumerate(runs)]

    def _key(self) -> bytes:
        """Returns the key of all choices for this input.  Secret."""
        return self.known.data_set_key(read_key_file(self.key_file))

    def _read(self, block: Block, names: Sequence[str], key: bytes) -> pa.Table:
        """Returns columns of a block.  Sensitive."""
        return read_table(block, names, functools.partial(self.known.is_listed, key))

    def folder(self, name: str) -> pathlib.Path:
        """Returns the folder of a kind of file."""
        return pathlib.Path(self.work, name)

    def ids_path(self, run: Run) -> str:
        """Returns the file of ``list_ids``."""
        return spill_path(self.folder(IDS), run.number)

    def kept_path(self, part: int) -> str:
        """Returns the file of ``choose``."""
        return spill_path(self.folder(KEPT), part)

    def output(self, number: int) -> pathlib.Path:
        """Returns the output file of a run or, if users are sampled, of a part."""
        return self.folder(DATA) / f"part-{number:05d}.parquet"

    def run_output(self, run: Run) -> pathlib.Path:
        """Returns the output file of a run."""
        return self.output(run.number)

    def list_ids(self, run: Run) -> None:
        """Writes users, priorities and places of the rows of a run, by part."""
        key = self._key()
        entries = np.concatenate([self._entries(block, key) for block in run.blocks])
        entries["row"] = np.arange(len(entries))
        most = self.settings.max_examples_per_user
        entries = entries[keep_least(entries["user"], entries["priority"], most)]
        parts = part_of(entries["user"], self.num_parts)
        counts = np.bincount(parts, minlength=self.num_parts)
        by_part = entries[np.argsort(parts, kind="stable")]
        write_pieces(self.ids_path(run), by_part, counts)

    def _entries(self, block: Block, key: bytes) -> np.ndarray:
        name = self.settings.user_column
        column = self._read(block, [name], key).column(0)
        entries = np.zeros(block.num_rows, ENTRY)
        entries["user"] = numbers_of_users(name, column, key)
        entries["priority"] = draw_priorities(key, block.label, block.num_rows)
        return entries

    def choose(self, part: int) -> None:
        """Writes which rows of a part's users are kept, by run."""
        pieces = [
            np.frombuffer(read_slice(self.ids_path(run), part), ENTRY)
            for run in self.runs
        ]
        entries = np.concatenate(pieces)
        most = self.settings.max_examples_per_user
        kept = keep_least(entries["user"], entries["priority"], most)
        edges = np.cumsum([0, *map(len, pieces)])
        counts = np.diff(np.cumsum([0, *kept])[edges])
        found = np.empty(kept.sum(), KEPT_ROW)
        found["user"], found["row"] = entries["user"][kept], entries["row"][kept]
        write_pieces(self.kept_path(part), found, counts)

    def num_kept(self) -> int:
        """Returns the number of kept rows.  Sensitive."""
        head = (len(self.runs) + 1) * 8  # see ``spill``
        sizes = (os.path.getsize(self.kept_path(i)) for i in range(self.num_parts))
        return sum((size - head) // KEPT_ROW.itemsize for size in sizes)

    def kept(self, part: int, run: Run) -> np.ndarray:
        """Returns the kept rows of a part's users in a run.  Sensitive.

        Args:
          part: Number of the part.
          run: The run.

        Returns:
          Array of dtype ``KEPT_ROW``.
        """
        return np.frombuffer(read_slice(self.kept_path(part), run.number), KEPT_ROW)

    def write(self, run: Run) -> None:
        """Writes the kept rows of a run, without ids."""
        kept = [self.kept(part, run) for part in range(self.num_parts)]
        with new_table(self.run_output(run), self.schema) as writer:
            for rows in self.kept_rows(run, np.concatenate(kept)):
                writer.write_table(rows, row_group_size=len(rows))

    def kept_rows(self, run: Run, kept: np.ndarray) -> Iterator[pa.Table]:
        """Yields the kept rows of each block, in their order.  Sensitive.

        Args:
          run: The run.
          kept: Its kept rows, from ``kept`` for all parts.
        """
        keep = np.zeros(run.num_rows, bool)
        keep[kept["row"]] = True
        first, key = 0, self._key()
        for block in run.blocks:
            rows = self._read(block, self.names, key)
            mask = keep[first : first + block.num_rows]
            first += block.num_rows
            if mask.any():
                found = rows.filter(pa.array(mask))
                yield found.replace_schema_metadata(self.schema.metadata)


def numbers_of_users(name: str, column: pa.ChunkedArray, key: bytes) -> np.ndarray:
    """Returns the number of each row's user, uint64 of shape (rows,).

    Args:
      name: Name of the column.
      column: Ids, of a type that `prepare` takes.
      key: Secret key of the data set, 32 bytes.

    Raises:
      InputError: an id is missing, or is no id.
    """
    faults: list[tuple[np.ndarray, str]] = []
    found = [np.zeros(0, np.uint64)]
    for chunk in column.chunks:
        with plain_errors(name, "ids as integers or texts"):
            texts = ids_of(Cells(name, chunk, ("",), faults))
        if faults:
            raise InputError(
                f"Expected every user to have an id; one of column {faults[0][1]}. "
                "Give each such row an id of its own, or drop it."
            )
        found.append(hash_ids(texts, key))
    return np.concatenate(found)


def part_of(users: np.ndarray, num_parts: int) -> np.ndarray:
    """Returns the part of each user, int64 in [0, num_parts).

    Args:
      users: Numbers of users, uint64.
      num_parts: Number of parts.
    """
    high = users >> np.uint64(32)
    return ((high * np.uint64(num_parts)) >> np.uint64(32)).astype(np.int64)


def write_pieces(path: str, entries: np.ndarray, counts: np.ndarray) -> None:
    """Writes a file whose slices ``read_slice`` reads.

    Args:
      path: Path of the file.
      entries: Entries in the order of the slices.
      counts: Number of entries in each slice.
    """
    edges = np.cumsum([0, *counts])
    pieces = (entries[start:end].tobytes() for start, end in itertools.pairwise(edges))
    write_spill(path, (counts * entries.itemsize).tolist(), pieces)
