"""Which embedding tables get lazy noise (see ``lazy_noise``).

Formal guarantees:
  - ``choose`` takes a table only under these conditions: plain SGD without momentum,
    decay or clipping, and no constraint of any weight; the rows of a step are known
    before any weight is read; and between two flushes only steps read the table.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from trainer.core.tf_compat import keras
from trainer.gradients.paths import ONE_PASS
from trainer.gradients.proof import TableReads, table_reads
from trainer.methods import hooks
from trainer.model.trainable_model import TrainableModel
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings

#: Unless asked for, a table is lazy only with this many rows per row that a step reads.
_ROWS_PER_READ = 2

#: Values that steps draw between two flushes, per value that a flush draws.
_DRAWS_PER_FLUSH_DRAW = 16


def is_plain_sgd(optimizer: Any) -> bool:
    """Whether a step subtracts the learning rate times the gradient and no more."""
    return type(optimizer) is keras.optimizers.SGD and not (
        optimizer.momentum
        or optimizer.weight_decay
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
        or optimizer.loss_scale_factor
    )


def _obstacle(
    reads: TableReads | None,
    optimizer: Any,
    settings: TrainSettings,
    model: TrainableModel,
) -> str | None:
    """Returns why no table of this run can have lazy noise; None if one can."""
    if settings.lazy_obstacle is not None:
        return settings.lazy_obstacle
    if not is_plain_sgd(optimizer):
        return "the optimizer is not plain SGD"
    if reads is None:
        return "the model has no Embedding whose rows are known before it is read"
    if model.prepare is not None:
        return "an augmentation may change which rows an example reads"
    # Of any weight: its function may read a table, of which rows lack noise.
    if any(one.constraint is not None for one in model.optimized):
        return "the model has a constraint, which may read or change other rows"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which tables of a run get lazy noise.  Public.

    Attributes:
      reads: The tables with lazy noise, and the rows that a step reads; None if all
        noise is dense.
      flush_every: Steps that cost many times a flush; 0 without lazy tables.
      message: Line for the user, or empty.
    """

    reads: TableReads | None = None
    flush_every: int = 0
    message: str = ""


def choose(
    model: TrainableModel,
    optimizer: Any,
    settings: TrainSettings,
    *,
    manifest: Manifest,
) -> Choice:
    """Returns which tables of a run get lazy noise.

    Args:
      model: A model that ``check_model`` accepted.
      optimizer: Optimizer of the run.
      settings: Settings of the run; ``embedding_noise`` is what the user asked for.
      manifest: Manifest of the batches.

    Raises:
      InputError: ``settings`` ask for lazy noise where it is not exact.
    """
    if settings.method == NON_PRIVATE or settings.embedding_noise == DENSE_NOISE:
        return Choice()
    # Traces the model; the trace is cached.
    known = table_reads(model)
    fast = hooks.choose_path(model, settings) == ONE_PASS
    reads = known if fast else None
    found = _obstacle(reads, optimizer, settings, model)
    if found is None and manifest.plan.bands is not None:
        found = f"rows of a table cannot wait for noise of {manifest.plan.bands} bands"
    if settings.embedding_noise == LAZY_NOISE and found is not None:
        raise InputError(
            f"Expected --embedding-noise lazy only where it is exact; here {found}. "
            "Omit it for dense noise."
        )
    parts = manifest.parts_per_step or _ceil(
        manifest.plan.expected_batch_size, manifest.physical_batch_size
    )
    step_rows = parts * manifest.physical_batch_size
    if found is not None:
        return Choice(message=_dense_message(known, step_rows, found))
    assert reads is not None  # else there is an obstacle
    if settings.embedding_noise != LAZY_NOISE:
        reads = _worthwhile(reads, step_rows)
    if not reads.tables:
        return Choice()
    return Choice(
        reads=reads,
        flush_every=_flush_every(model, reads, step_rows),
        message=(
            f"embedding noise: lazy for {_num_values(reads.tables):,} values; all rows "
            "are completed before anything but a step reads them"
        ),
    )


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _num_values(variables: Sequence[Any]) -> int:
    return sum(variable.shape.num_elements() for variable in variables)


def _worthwhile(reads: TableReads, step_rows: int) -> TableReads:
    """Returns the reads of those tables of which a step reads a small part."""
    kept = [
        table.shape[0] >= _ROWS_PER_READ * count * step_rows
        for table, count in zip(reads.tables, reads.num_ids, strict=True)
    ]

    def ids(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        return list(itertools.compress(reads.ids(columns, weight), kept))

    return TableReads(
        tables=tuple(itertools.compress(reads.tables, kept)),
        num_ids=tuple(itertools.compress(reads.num_ids, kept)),
        ids=ids,
    )


def _flush_every(model: TrainableModel, reads: TableReads, step_rows: int) -> int:
    """Returns the steps between flushes, so that these cost a fraction of the steps."""
    lazy = _num_values(reads.tables)
    read = sum(
        min(table.shape[0], count * step_rows) * table.shape[1]
        for table, count in zip(reads.tables, reads.num_ids, strict=True)
    )
    drawn = _num_values(model.variables) - lazy + read
    return max(1, _ceil(_DRAWS_PER_FLUSH_DRAW * lazy, drawn))


def _dense_message(reads: TableReads | None, step_rows: int, found: str) -> str:
    large = _worthwhile(reads, step_rows).tables if reads is not None else ()
    if not large:
        return ""
    return (
        f"embedding noise: dense, {_num_values(large):,} values at every step, since "
        f"{found}"
    )
