"""Sizes of records, groups, memory and disk, before a job starts.

A layout depends only on public values, never on the engine or the machine.

Public: sizes are bounds, or expectations over the sampling.  Sensitive if users are
bounded: the memory that a block needs, which depends on how many rows they have; no
message holds it.
"""

from __future__ import annotations

import math

from accounting.core.plan import DpSgdPlan, check_epochs
from accounting.core.validation import InputError, check_int
from pipelines.core.batches.manifest import record_bytes, row_bytes
from pipelines.core.choices import bucket_bits, check_assigned
from pipelines.core.threads import num_cores
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.packing import OVERHEAD_BYTES, Layout
from pipelines.job.spill import file_bytes

#: Maximum rows and bytes of a record by default: a small step is one record, and
#: readers hold no large record.
DEFAULT_PHYSICAL_BATCH_SIZE = 8192
_DEFAULT_RECORD_BYTES = 64 << 20
#: Approximate bytes of a group.  There are enough groups to keep a few workers busy,
#: and few enough that a block's pieces are not tiny.
_GROUP_BYTES = 32 << 20
_LEAST_GROUPS = 16
_MOST_GROUPS = 4096
#: Memory of the local runner: without data; per byte of a thread's block or group
#: (read, gathered, encoded, hashed); per participation of a block.  Measured and
#: rounded up.
_BASE_BYTES = 512 << 20
_COPIES = 6
_PARTICIPATION_BYTES = 96
#: Memory of a worker per byte of a file of the spill: read, gathered, written.
_FILE_COPIES = 3
#: Bytes per bucket of ranks, and per kept rank, of a search for a shuffle's order.
_BUCKET_BYTES, _RANK_BYTES = 48, 96
DEFAULT_MEMORY_LIMIT = 4 << 30


def make_layout(
    plan: DpSgdPlan, dataset: Dataset, physical_batch_size: int | None = None
) -> Layout:
    """Returns the layout of a job.

    Args:
      plan: How batches are sampled.
      dataset: From ``list_blocks``.
      physical_batch_size: Rows per record; None for the fewest records per step.

    Raises:
      InputError: a size below 1, records that are too long to be read, or a sampler
        without a registered assignment of rows to steps.
    """
    check_assigned(plan)
    check_epochs(plan)
    largest = _usual_batch_size(plan)
    if physical_batch_size is None:
        fitting = _DEFAULT_RECORD_BYTES // (row_bytes(dataset.columns) or 1)
        most = max(1, min(DEFAULT_PHYSICAL_BATCH_SIZE, fitting))
        # The fewest records per step, of equal size.
        physical_batch_size = -(-largest // -(-largest // most))
    check_int("physical_batch_size", physical_batch_size, at_least=1)
    step_bytes = largest * row_bytes(dataset.columns)
    least = -(-plan.num_steps // _MOST_GROUPS)
    steps = min(_GROUP_BYTES // step_bytes, plan.num_steps // _LEAST_GROUPS)
    return Layout(
        plan=plan,
        columns=dataset.columns,
        physical_batch_size=physical_batch_size,
        steps_per_group=max(1, least, steps),
    )


def _usual_batch_size(plan: DpSgdPlan) -> int:
    """Returns the cap of a step or, without one, a bound that it rarely exceeds."""
    if plan.largest_batch_size is not None:
        return plan.largest_batch_size
    return plan.expected_batch_size + 4 * math.isqrt(plan.expected_batch_size)


def expected_cost(layout: Layout) -> dict[str, float]:
    """Returns what a job is expected to cost, over the sampling.  Public.

    Returns:
      Padding rows per example; bytes between map and reduce, in files until the job
      ends; and bytes of the columns and weights of all records.
    """
    plan, size = layout.plan, layout.physical_batch_size
    row = row_bytes(layout.columns)
    sampled = plan.num_steps * plan.expected_batch_size
    rows = -(-_usual_batch_size(plan) // size) * size
    return {
        "expected_padding": round(rows / plan.expected_batch_size - 1, 4),
        "shuffle_bytes": sampled * (row + OVERHEAD_BYTES),
        "output_bytes": plan.num_steps * rows * (row + 4),
    }


def worker_bytes(layout: Layout, dataset: Dataset, *, is_shared: bool = False) -> int:
    """Returns the memory in bytes that a Python worker of an engine needs.

    It holds one block, one file of the spill, or one unit of steps at a time, whatever
    the size of the data.

    Args:
      layout: Layout of the job.
      dataset: Input of the job.
      is_shared: Whether several blocks share a file of the spill.
    """
    file = _FILE_COPIES * file_bytes(layout) if is_shared else 0
    work = max(file, _work_bytes(layout, dataset))
    return _BASE_BYTES + shuffle_bytes(layout.plan) + work


def shuffle_bytes(plan: DpSgdPlan) -> int:
    """Returns the memory for the order of a shuffle, and for the search for it."""
    if not plan.num_shuffles:
        return 0
    buckets = 1 << bucket_bits(plan)
    kept = plan.steps_per_epoch * (plan.num_examples // buckets + 1)
    starts = 32 * plan.num_shuffles * plan.steps_per_epoch
    return 2 * starts + _BUCKET_BYTES * buckets + _RANK_BYTES * kept


def _work_bytes(layout: Layout, dataset: Dataset) -> int:
    """Returns the bytes for the block or range of steps that one thread works on."""
    largest_block = max(block.num_rows for block in dataset.blocks)
    participations = layout.plan.expected_uses
    row = _COPIES * row_bytes(layout.columns) + _PARTICIPATION_BYTES * participations
    # Padding can make a record longer than the rows of a unit.
    record = record_bytes(layout.columns, layout.physical_batch_size)
    largest = _COPIES * max(layout.step_bytes * layout.steps_per_unit, record)
    return max(math.ceil(largest_block * row), largest)


def local_threads(layout: Layout, dataset: Dataset, memory_limit: int) -> int:
    """Returns how many threads of the local runner fit into memory.

    Args:
      layout: Layout of the job.
      dataset: Input of the job.
      memory_limit: Memory in bytes.

    Raises:
      InputError: there is not even room for one.
    """
    each = _work_bytes(layout, dataset)
    shared = _BASE_BYTES + shuffle_bytes(layout.plan)
    if memory_limit < shared + each:
        least = "to suffice for" if dataset.bounded else f">= {shared + each} bytes for"
        raise InputError(
            f"Expected memory_limit={memory_limit} {least} one block or one range of "
            "steps. Raise --memory-limit, lower --batch-size, or prepare the input "
            "with smaller --row-group-rows."
        )
    return min(num_cores(), (memory_limit - shared) // each)
