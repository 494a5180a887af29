"""Makes the batches of a plan again by a direct loop, and compares them: the reference.

    for each range of steps that fits into memory:
        for each block of rows: choose steps; keep the rows of this range, by column
        sort the columns by step and priority
        for each step: truncate, pad, encode, digest

There is no shuffle, no engine and no file: a range is made by reading all rows again.
It is what a reviewer reads instead of the batch job, whose engines, files, crashes and
fast kernels then matter no more.

Formal guarantees, if ``differing_steps`` returns nothing:
  - the records, in their order, are byte for byte those of the reference: every choice
    of ``choices`` is there, in its step, with weight 1, unless the cap truncates it;
    no row is in a step that it did not choose, or twice; the rest is padding of weight
    0; there are the steps of the plan, and no more.
  - they were sampled under the given key, from the given rows, by the given plan.

They assume that:
  - the key was drawn uniformly, is secret, and was not chosen by its batches: nobody
    can see from batches that the best of several keys was kept.
  - a row is an example.  How `dpsgd prepare` chose the rows of users, and made rows of
    a table, is not looked at.
  - SHA-256 has no collisions; ChaCha20 and keyed BLAKE2b are pseudo-random functions.
  - Python, NumPy, Arrow, OpenSSL (through ``cryptography``), google-crc32c, the
    machine, and the modules of this folder are right.

Other guarantees:
  - At most ``memory`` bytes are used, whatever the number of rows, if a few row groups
    and the rows of one step fit.

Public: the manifest.  Sensitive: the key, checksums, and everything made of them.

*The bytes of a record* are from the definition of tf.train.Example.  A record has a
bytes feature for each column, a bytes feature ``weight`` (float32, 1 for a row and 0
for padding), and the integers ``step`` and ``part``; padding is zero bits, after the
rows.  Equal rows, step and part have equal bytes: those that the batch job writes.

References:
  tensorflow/core/example/feature.proto.
  protobuf.dev/programming-guides/encoding: tags, varints, maps as repeated messages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan, fingerprint
from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import write_record
from pipelines.core.batches.manifest import Column, RecordChecksum, row_bytes
from pipelines.core.choices import PlanSampler, make_sampler
from pipelines.core.keys import commitment, derive
from pipelines.core.rows import DataSet, RowGroup
from pipelines.core.threads import in_order

#: The version of the format of batches that this module makes.
FORMAT_VERSION = 2
#: Memory of the process without rows, and bytes of a kept row beside its columns: its
#: step, its priority and its place in the order, while they are sorted.  Measured and
#: rounded up.
_BASE_BYTES, _KEPT_BYTES = 400 << 20, 48
#: Copies of a row group, per thread, while it is read, and bytes of a choice.
_BLOCK_COPIES, _CHOICE_BYTES = 4, 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resampling:
    """The batches of a data set under one key.

    Attributes:
      sampler: Choices of the rows.  Sensitive.
      data: The rows.  Sensitive.
      columns: Columns of the batches.
      record_rows: Rows of a record, real and padding.
    """

    sampler: PlanSampler = dataclasses.field(repr=False)
    data: DataSet = dataclasses.field(repr=False)
    columns: tuple[Column, ...]
    record_rows: int

    def steps(
        self, *, memory: int, num_threads: int, progress: Callable[[int], None]
    ) -> Iterator[tuple[int, list[RecordChecksum]]]:
        """Yields every step in order, with the checksums of its records.  Sensitive.

        Args:
          memory: Bytes to use.
          num_threads: Number of threads, which does not change the result.
          progress: Called with the number of steps done; half of a range counts as its
            blocks are read.

        Raises:
          InputError: too little memory, or rows that cannot be read.
        """
        num_done = 0
        for steps in self.ranges(memory, num_threads):
            with ThreadPoolExecutor(num_threads) as pool:
                keep = functools.partial(self._keep, steps=steps)
                kept = in_order(pool, keep, self.data.blocks, 2 * num_threads)
                edges, columns = self._arranged(kept, steps, progress)
                part = functools.partial(self._checksums, columns)
                made = pool.map(part, steps, edges[:-1], edges[1:])
                for step, checksums in zip(steps, made, strict=True):
                    yield step, checksums
                    num_done += 1
                    progress(num_done + (steps.stop - num_done) // 2)
                del columns, part, made  # before the rows of the next range are read

    def ranges(self, memory: int, num_threads: int) -> list[range]:
        """Returns ranges of steps, of nearly equal sizes, whose rows fit into memory.

        All rows of the input are read once for each range.

        Args:
          memory: Bytes to use.
          num_threads: Number of threads that read.

        Raises:
          InputError: too little memory.
        """
        num_steps = self.sampler.plan.num_steps
        fitting = self.fitting_steps(memory, num_threads)
        if fitting < 1:
            raise InputError(
                f"Expected memory_limit={memory} to suffice for {num_threads} row "
                "groups and one step. Raise --memory-limit."
            )
        size = -(-num_steps // -(-num_steps // fitting))
        starts = range(0, num_steps, size)
        return [range(start, min(start + size, num_steps)) for start in starts]

    def fitting_steps(self, memory: int, num_threads: int) -> int:
        """Returns how many steps fit into memory at a time; none below 1.

        Args:
          memory: Bytes to use.
          num_threads: Number of threads that read.
        """
        plan, row = self.sampler.plan, row_bytes(self.columns)
        choices = _CHOICE_BYTES * (1 + plan.expected_uses)
        of_block = _BLOCK_COPIES * row + math.ceil(choices)
        largest = max(block.num_rows for block in self.data.blocks)
        longest = max(column.num_bytes for column in self.columns)
        of_step = plan.expected_batch_size * (row + longest + _KEPT_BYTES)
        return (memory - _BASE_BYTES - num_threads * largest * of_block) // of_step

    def _keep(self, block: RowGroup, *, steps: range) -> list[np.ndarray]:
        """Returns step, priority and columns of each choice in a range of steps."""
        row, step, priority = self.sampler.choose(block)
        here = np.flatnonzero((step >= steps.start) & (step < steps.stop))
        if not len(here):
            return []
        columns, rows = self.data.read(block, self.columns), row[here]
        return [step[here], priority[here], *(_cells(each)[rows] for each in columns)]

    def _arranged(
        self,
        pieces: Iterable[list[np.ndarray]],
        steps: range,
        progress: Callable[[int], None],
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns where each step begins or ends, and its rows by priority, as columns.

        Args:
          pieces: From ``_keep``, of every block.
          steps: The range of steps.
          progress: As in ``steps``.
        """
        # A bit more than expected: arrays that grow would leave holes in the memory.
        size, most = 0, int(1.02 * len(steps) * self.sampler.plan.expected_batch_size)
        kept = [np.empty(most, np.int64), np.empty(most, np.uint64)]
        for column in self.columns:
            kept.append(_cells(np.empty((most, column.num_bytes), np.uint8)))
        for number, piece in enumerate(pieces, start=1):
            start, size = size, size + (len(piece[0]) if piece else 0)
            for place, more in enumerate(piece):
                if size > len(kept[place]):
                    kept[place] = np.resize(
                        kept[place], (size * 5 // 4, *more.shape[1:])
                    )
                kept[place][start:size] = more
            # About half of the work of a range.
            done = len(steps) * number // (2 * len(self.data.blocks))
            progress(steps.start + done)
        step, priority = kept[0][:size], kept[1][:size]
        del kept[:2]
        order = np.lexsort((priority, step))
        counts = np.bincount(step - steps.start, minlength=len(steps))
        del step, priority
        for place in range(len(kept)):  # one after the other, to hold no second copy
            kept[place] = kept[place][:size][order]
        return np.append(0, np.cumsum(counts)), kept

    def _checksums(
        self, columns: list[np.ndarray], step: int, start: int, end: int
    ) -> list[RecordChecksum]:
        """Returns the checksums of the records of a step.

        Args:
          columns: Columns of rows, by step and priority.
          step: The step.
          start: First row of the step.
          end: The row after its last.
        """
        plan, size = self.sampler.plan, self.record_rows
        if plan.truncated_batch_size is not None:
            end = min(end, start + plan.truncated_batch_size)
        # A cap fixes the number of records: it must not depend on the rows.
        most = plan.largest_batch_size or max(1, end - start)
        return [
            checksum(
                [each[min(first, end) : min(first + size, end)] for each in columns],
                self.columns, step=step, part=part, size=size,
            )
            for part, first in enumerate(range(start, start + most, size))
        ]  # fmt: skip


def _cells(values: np.ndarray) -> np.ndarray:
    """Returns the cells of a column as items, which NumPy gathers fast."""
    width = values.shape[1]
    return values.view(f"V{width}")[:, 0] if width else values


def resampling(manifest: Any, key: bytes, data: DataSet) -> Resampling:
    """Returns the batches that a manifest describes.

    Args:
      manifest: JSON of the manifest.
      key: Secret sampling key, 32 bytes.
      data: The input of the job.

    Raises:
      InputError: the key or the input is not that of the manifest, or another format.
    """
    plan, num_rows = DpSgdPlan.from_json(manifest["plan"]), data.num_rows
    if manifest["version"] != FORMAT_VERSION:
        raise InputError(
            f"Expected batches of format {FORMAT_VERSION}; these have "
            f"{manifest['version']}. Use the release that wrote them."
        )
    if batches_id(manifest, key, data) != manifest["batches_id"]:
        raise InputError(
            "Expected --key-file and --input to be those of the batches; the key, or a "
            "name, size or footer of a file, differs. Give those of `dpsgd batches`."
        )
    # If users are bounded, the plan has a public number of slots, some of them empty.
    if num_rows > plan.num_examples or (
        num_rows < plan.num_examples and "bounded" not in manifest["dataset"]
    ):
        raise InputError(
            f"Expected num_examples={plan.num_examples} of the plan to be that of the "
            "rows of --input. Make the batches again."
        )
    # One key gives independent choices for two data sets.
    own_key = derive(key, "data set", commitment(key, "input", data.digest))
    return Resampling(
        sampler=make_sampler(plan, own_key, data.blocks),
        data=data,
        columns=tuple(Column(**column) for column in manifest["columns"]),
        record_rows=manifest["physical_batch_size"],
    )


def batches_id(manifest: Any, key: bytes, data: DataSet) -> str:
    """Returns the commitment to key, plan, layout and input.

    Args:
      manifest: JSON of the manifest.
      key: Secret sampling key, 32 bytes.
      data: The input of the job.
    """
    layout = {
        each: manifest[each] for each in ("plan", "columns", "physical_batch_size")
    }
    layout["steps_per_group"] = manifest["files"][0]["num_steps"]
    made_of = (str(manifest["version"]), fingerprint(layout), data.digest)
    return commitment(key, "batches", *made_of)


def differing_steps(
    remade: Iterable[tuple[int, list[RecordChecksum]]],
    written: Iterable[RecordChecksum],
) -> list[int]:
    """Returns the steps whose records are not those of the reference, ascending.

    Args:
      remade: From ``Resampling.steps``.
      written: Checksums of all written records, in the order of the files.
    """
    found, differing, last = dict[int, list[RecordChecksum]](), set[int](), 0
    for checksum in written:
        step = checksum.step
        found.setdefault(step, []).append(checksum)
        if step < last:  # out of order
            differing.add(step)
        last = step
    differing.update(
        step for step, checksums in remade if found.pop(step, None) != checksums
    )
    return sorted(differing.union(found))  # what is left is no step of the plan


def checksum(
    values: Sequence[np.ndarray],
    columns: Sequence[Column],
    *,
    step: int,
    part: int,
    size: int,
) -> RecordChecksum:
    """Returns the checksum of the record of some rows.

    Args:
      values: The cells of each column, as little-endian bytes; rows are the first axis.
      columns: The columns.
      step: Step of the rows.
      part: Number of the record within the step.
      size: Rows of the record, real and padding.
    """
    num_rows = len(values[0])
    weight = np.zeros(size, "<f4")
    weight[:num_rows] = 1
    features = {
        "weight": _message(1, _message(1, weight.tobytes())),
        "step": _message(3, _message(1, _varint(step))),
        "part": _message(3, _message(1, _varint(part))),
    }
    for column, cells in zip(columns, values, strict=True):
        data = cells.tobytes() + bytes((size - num_rows) * column.num_bytes)
        features[column.name] = _message(1, _message(1, data))
    entries = [
        _message(1, _message(1, name.encode()) + _message(2, features[name]))
        for name in sorted(features, key=_place)
    ]
    record = _message(1, b"".join(entries))
    return write_record(lambda _: None, record, step=step, part=part)


def _place(name: str) -> bytes:
    """Returns what names are sorted by, as upb (protobuf's library) sorts the job's.

    Names are sorted by their bytes; a name comes after the names that begin with it.
    """
    return name.encode() + b"\xff"  # which is in no UTF-8


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _message(field: int, data: bytes) -> bytes:
    """Returns a field of bytes, of packed integers, or of a message."""
    return b"".join([bytes([field << 3 | 2]), _varint(len(data)), data])
