"""At most k rows of each user, as a Beam transform of a user's pipeline.

    rows -> count equal ones -> the k least priorities of each -> the k least of a user

`dpsgd bound` derives priorities from the places of rows.  Rows of a pipeline have none:
here a priority derives from the row and from the index of its copy.  Rows travel as
pickled bytes; a step holds at most k rows of a user.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20:
  - at most k: no user has more than ``max_examples_per_user`` rows left; one with fewer
    keeps them all.
  - uniform choice: of a user with more, each set of that many rows is equally likely,
    equal rows counted one by one.
  - any order: which rows are left depends only on the key and the rows, not on their
    order, the engine or its workers.
  - the id is gone, and no message tells of users or rows.
  - No key is part of the pipeline: it names the place where workers read the key.

An engine counts the elements of each step, and its dashboards show the counts of users
and kept rows.  With `dpsgd bound`, whose elements are tasks, they do not.

Public: settings.  Sensitive: rows, ids, the key, and the counts of an engine.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from accounting.validation import InputError
from pipelines.batches.manifest import DATASET_METADATA_KEY
from pipelines.core.keys import commitment, derive
from pipelines.core.streams import Stream
from pipelines.files.paths import StrPath, absolute
from pipelines.inputs.bounded import BOUNDED, KEY_LABEL, Bounded
from pipelines.inputs.parquet_blocks import description_of
from pipelines.sampling.keys import read_key_file, read_or_create_key_file
from pipelines.users.bound_job import BoundSettings

#: Number of copies of a row whose priorities are drawn at a time.
_COPIES = 1 << 16
#: Big-endian, before the row: bytes are ordered as the numbers are.
_PRIORITY_BYTES = 8


class BoundUsers(beam.PTransform):
    """Keeps at most k rows of each user of a bounded PCollection, chosen at random.

    Input: a PCollection of dicts, from names of columns to picklable values.  Output:
    dicts without the id.  Write them to Parquet with the result of ``schema``: batches,
    runs and privacy statements then know that users are bounded.

    Args:
      user_column: Column of the ids: integers, text or bytes, none missing.
      max_examples_per_user: k, the maximum number of rows kept per user.
      num_examples: Public upper bound on the kept rows, by which the sampling rate is
        computed.  `dpsgd batches` refuses files with more rows.
      key_file: File of the key that chooses rows, mode 0600, at the same path on every
        worker; made if missing.  Use no other key's file, such as that of batches.

    Raises:
      InputError: a number below 1, or a key file that is refused.

    Example:
      >>> with beam.Pipeline() as pipeline:  # doctest: +SKIP
      ...     users = BoundUsers(user_column="user", max_examples_per_user=5,
      ...                        num_examples=10**6, key_file="choices.key")
      ...     rows = pipeline | beam.io.ReadFromAvro("visits.avro") | users
      ...     _ = rows | beam.io.WriteToParquet("bounded/part", users.schema(columns),
      ...                                       file_name_suffix=".parquet")
    """

    def __init__(
        self,
        *,
        user_column: str,
        max_examples_per_user: int,
        num_examples: int,
        key_file: StrPath,
    ) -> None:
        super().__init__()
        self._settings = BoundSettings(
            user_column=user_column,
            max_examples_per_user=max_examples_per_user,
            num_examples=num_examples,
        )
        self._key_file = absolute(key_file)
        self._keeps_ids = False
        key = read_or_create_key_file(self._key_file)
        self._commitment = commitment(key, KEY_LABEL)

    @property
    def note(self) -> Bounded:
        """The note that files of the kept rows may carry."""
        return Bounded(**dataclasses.asdict(self._settings), key=self._commitment)

    def schema(self, columns: pa.Schema) -> pa.Schema:
        """Returns the schema of Parquet files with the note that users are bounded.

        Args:
          columns: Columns of the kept rows.

        Raises:
          InputError: the column of the ids is among them.
        """
        if self._settings.user_column in columns.names:
            raise InputError(
                f"Expected no column {self._settings.user_column} among those of the "
                "rows that are left: it held the ids of users. Leave it out."
            )
        told = {**description_of(columns, "columns"), BOUNDED: self.note.to_json()}
        return columns.with_metadata({DATASET_METADATA_KEY: json.dumps(told).encode()})

    def with_ids(self) -> BoundUsers:
        """Returns the transform that keeps the ids, for ``PrepareRows``."""
        found = copy.copy(self)
        found._keeps_ids = True
        return found

    def expand(self, rows: beam.PCollection) -> beam.PCollection:
        """Counts equal rows, and keeps those of the least priorities.

        Raises:
          InputError: an unbounded PCollection, in which a user always may have more.
        """
        if not rows.is_bounded:
            raise InputError(
                "Expected rows of a batch pipeline: in a stream a user always may have "
                "more. Read what the stream wrote."
            )
        most, column = self._settings.max_examples_per_user, self._settings.user_column
        least = beam.combiners.Top.SmallestPerKey(most)
        choose = _Prioritize(column, most, self._key_file)
        left_out = None if self._keeps_ids else column
        return (
            rows
            | "Pack" >> beam.Map(_packed).with_output_types(bytes)
            | "CountEqual" >> beam.combiners.Count.PerElement()  # (row, count)
            | "Prioritize" >> beam.ParDo(choose)  # (user, priority and row)
            | "KeepLeast" >> least  # (user, [priority and row])
            | "Unpack" >> beam.FlatMap(_rows, left_out).with_output_types(dict)
        )


class _Packer(pickle.Pickler):
    """Pickles equal rows to equal bytes, even if values are shared objects."""

    fast = True


def _packed(row: Mapping[str, Any]) -> bytes:
    """Returns a row as bytes, which do not depend on the order of its columns."""
    if not isinstance(row, Mapping):
        raise InputError(
            f"Expected rows to be dicts, not {type(row).__name__}. Convert them before "
            "BoundUsers, for example by `beam.Map(lambda row: row._asdict())`."
        )
    data = io.BytesIO()
    _Packer(data, protocol=4).dump(sorted(row.items()))
    return data.getvalue()


def _rows(
    kept: tuple[bytes, list[bytes]], left_out: str | None
) -> Iterator[dict[str, Any]]:
    for data in kept[1]:
        row = pickle.loads(data[_PRIORITY_BYTES:])  # from _packed
        yield {name: value for name, value in row if name != left_out}


@beam.typehints.with_input_types(tuple[bytes, int])
@beam.typehints.with_output_types(tuple[bytes, bytes])
class _Prioritize(beam.DoFn):
    """(row, number of copies) -> (user, priority and row) for its least priorities."""

    def __init__(self, column: str, most: int, key_file: str) -> None:
        self._column, self._most, self._key_file = column, most, key_file

    def setup(self) -> None:
        self._key = read_key_file(self._key_file)

    def process(self, counted: tuple[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
        data, count = counted
        row = dict(pickle.loads(data))  # from _packed
        if self._column not in row:
            raise InputError(
                f"Expected rows with user_column={self._column!r}; one has "
                f"{', '.join(map(str, row))}. Name the column of the ids."
            )
        user = derive(self._key, "user ids", *_id(self._column, row[self._column]))
        name = hashlib.sha256(data).hexdigest()
        stream = Stream(derive(self._key, "copies of a row", name))
        for priority in _least(stream, count, self._most):
            yield user, int(priority).to_bytes(_PRIORITY_BYTES, "big") + data


def _least(stream: Stream, count: int, most: int) -> np.ndarray:
    """Returns the least ``most`` of the next ``count`` words."""
    found = np.zeros(0, np.uint64)
    for first in range(0, count, _COPIES):
        more = stream.words(min(_COPIES, count - first))
        found = np.sort(np.concatenate([found, more]))[:most]
    return found


def _id(column: str, value: Any) -> tuple[str, str]:
    """Returns the kind of an id and its text, equal for equal ids."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return "integers", str(int(value))
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return "text", value.hex()
    raise InputError(
        f"Expected user_column={column!r} to hold integers, text or bytes, not "
        f"{type(value).__name__}. Give a row without a user an id of its own, or drop "
        "it, before BoundUsers."
    )
