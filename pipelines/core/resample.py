"""Makes the batches of a plan again by a direct loop, and compares them: the reference.

    for each range of steps that fits into memory:
        for each block of rows: choose steps; keep the rows of this range
        for each step: sort by priority, truncate, pad, encode, digest

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
  - a row is an example.  How `dpsgd bound` chose the rows of users, and how `dpsgd
    prepare` made rows of a table, is not looked at.
  - SHA-256 has no collisions; ChaCha20 and keyed BLAKE2b are pseudo-random functions.
  - Python, NumPy, Arrow, OpenSSL (through ``cryptography``), google-crc32c, the
    machine, and the modules of this folder are right.

Other guarantees:
  - At most ``memory`` bytes are used, whatever the number of rows, if a few row groups
    and the rows of one step fit.

Public: the manifest.  Sensitive: the key, checksums, and everything made of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan, fingerprint
from accounting.core.validation import InputError
from pipelines.core import records
from pipelines.core.batches.columns import Column, row_bytes
from pipelines.core.batches.record_checksums import RecordChecksum
from pipelines.core.choices import Sampler, make_sampler
from pipelines.core.keys import commitment, derive
from pipelines.core.rows import Block, DataSet

#: The version of the format of batches that this module makes.
FORMAT_VERSION = 2
#: Memory of the process without rows, and bytes of a kept row beside twice its columns:
#: its step, its priority, its place in the order, twice.  Measured and rounded up.
_BASE_BYTES, _KEPT_BYTES = 400 << 20, 64
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

    sampler: Sampler = dataclasses.field(repr=False)
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
        blocks, num_done = self.data.blocks, 0
        for steps in self.ranges(memory, num_threads):
            with ThreadPoolExecutor(num_threads) as pool:
                kept = []
                for piece in pool.map(self._keep, blocks, [steps] * len(blocks)):
                    kept.append(piece)
                    # About half of the work of a range.
                    progress(num_done + len(steps) * len(kept) // (2 * len(blocks)))
                made = pool.map(self._checksums, *self._arranged(kept, steps))
                for step, checksums in zip(steps, made, strict=True):
                    yield step, checksums
                    num_done += 1
                    progress(num_done + (steps.stop - num_done) // 2)

    def ranges(self, memory: int, num_threads: int) -> list[range]:
        """Returns ranges of steps, of nearly equal sizes, whose rows fit into memory.

        All rows are read for each.

        Args:
          memory: Bytes to use.
          num_threads: Number of threads that read.

        Raises:
          InputError: too little memory.
        """
        plan = self.sampler.plan
        row = row_bytes(self.columns)
        times_chosen = plan.num_steps * plan.sampling_probability
        of_block = _BLOCK_COPIES * row + math.ceil(_CHOICE_BYTES * (1 + times_chosen))
        largest = max(block.num_rows for block in self.data.blocks)
        of_step = plan.expected_batch_size * (2 * row + _KEPT_BYTES)
        fitting = (memory - _BASE_BYTES - num_threads * largest * of_block) // of_step
        if fitting < 1:
            raise InputError(
                f"Expected memory_limit={memory} to suffice for {num_threads} row "
                "groups and one step. Raise --memory-limit."
            )
        size = -(-plan.num_steps // -(-plan.num_steps // fitting))
        starts = range(0, plan.num_steps, size)
        return [range(start, min(start + size, plan.num_steps)) for start in starts]

    def _keep(self, block: Block, steps: range) -> _Kept:
        """Returns the step, priority and bytes of each choice in a range of steps."""
        row, step, priority = self.sampler.choose(block)
        here = np.flatnonzero((step >= steps.start) & (step < steps.stop))
        if not len(here):
            nothing = np.empty((0, row_bytes(self.columns)), "u1")
            return step[here], priority[here], nothing
        columns = self.data.read(block, self.columns)
        rows = [np.take(values, row[here], axis=0) for values in columns]
        return step[here], priority[here], np.concatenate(rows, axis=1)

    def _arranged(self, kept: list[_Kept], steps: range) -> Iterator[Iterable[Any]]:
        """Yields the arguments of ``_checksums``: an item of each for every step."""
        step, priority, rows = map(np.concatenate, zip(*kept, strict=True))
        kept.clear()
        order = np.lexsort((priority, step))
        edges = np.searchsorted(step[order], [*steps, steps.stop])
        yield steps
        yield itertools.repeat(rows)
        yield (order[start:end] for start, end in itertools.pairwise(edges))

    def _checksums(
        self, step: int, rows: np.ndarray, chosen: np.ndarray
    ) -> list[RecordChecksum]:
        """Returns the checksums of the records of a step.

        Args:
          step: The step.
          rows: Bytes of rows.
          chosen: Which of them chose the step, by priority.
        """
        plan, size = self.sampler.plan, self.record_rows
        chosen = chosen[: plan.truncated_batch_size]
        # A cap fixes the number of records: it must not depend on the rows.
        most = plan.largest_batch_size or max(1, len(chosen))
        return [
            records.checksum(
                rows[chosen[start : start + size]], self.columns,
                step=step, part=start // size, size=size,
            )
            for start in range(0, most, size)
        ]  # fmt: skip


#: Parallel arrays: step, priority, bytes of the row.
_Kept = tuple[np.ndarray, np.ndarray, np.ndarray]


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
    # Of bounded users the plan has a public number of slots, of which some are empty.
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
    """Returns the commitment to key, plan, layout and input; as for `resampling`."""
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
