"""Evaluation on held-out examples: AUC and log loss.

Training losses and metrics are not private and are never computed.  The metrics here
are of examples that were not trained on; the privacy statement does not protect those.

Formal guarantees:
  - Rows are read one row group at a time; of all rows only labels and logits are kept.
  - ``auc`` is exact: the probability that a positive scores above a negative, ties
    counted half.
  - ``digest`` differs between folders whose files differ in name, order or one byte.

Public: metrics, if the held-out examples need no protection.  Sensitive: rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.validation import InputError
from pipelines.batch_format import Column
from pipelines.manifest import DATASET_METADATA_KEY, Manifest
from trainer.settings import LABEL

#: Columns of some rows -> one logit per row.
Predict = Callable[[Mapping[str, np.ndarray]], np.ndarray]

#: Rows that a model sees at a time.
_BATCH_ROWS = 8192

#: Bytes of a file that are digested at a time.
_DIGEST_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """What predictions of held-out examples are worth.

    Attributes:
      auc: None where all labels are equal.
      log_loss: Mean, in nats; None for predictions that are no probabilities.
      accuracy: Share of the examples whose label has the higher probability; 0 is
        predicted where both have the same.
      num_examples: How many there are.
    """

    auc: float | None
    log_loss: float | None
    accuracy: float
    num_examples: int

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return dataclasses.asdict(self)


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Returns the area under the ROC curve; None where all labels are equal.

    Example:
      >>> auc(np.array([0, 1, 1]), np.array([0.5, 0.5, 2.0]))
      0.75
    """
    positive = labels > 0
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = mean_rank[place][positive].sum()
    above = rank_sum - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Returns the mean binary cross-entropy in nats."""
    signed = np.where(labels > 0, logits, -logits).astype(np.float64)
    return float(np.logaddexp(0, -signed).mean())


def metrics_of(labels: np.ndarray, logits: np.ndarray) -> Metrics:
    """Returns the metrics of predictions that are given as logits."""
    return Metrics(
        auc=auc(labels, logits),
        log_loss=log_loss(labels, logits),
        accuracy=float(((logits > 0) == (labels > 0)).mean()),
        num_examples=len(labels),
    )


class HeldOut:
    """The held-out examples in a folder of Parquet files.

    Args:
      directory: Holds ``*.parquet`` files.
      manifest: The batches; the files must have their columns.

    Raises:
      InputError: no file, no row, other columns, or data prepared in another way.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest) -> None:
        self._columns = manifest.columns
        self._paths = sorted(pathlib.Path(directory).glob("*.parquet"))
        if not self._paths:
            raise InputError(
                f"Expected *.parquet files in --eval {directory}; there are none. Give "
                "a folder that `dpsgd prepare` wrote."
            )
        num_rows = sum(_check_file(path, manifest) for path in self._paths)
        if not num_rows:
            raise InputError(f"Expected examples in --eval {directory}; it has none.")

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over names and contents of the files, as hex digits."""
        total = hashlib.sha256()
        for path in self._paths:
            with path.open("rb") as file:
                part = hashlib.sha256()
                while block := file.read(_DIGEST_BYTES):
                    part.update(block)
            total.update(f"{path.name}\n{part.hexdigest()}\n".encode())
        return total.hexdigest()

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields columns of at most ``_BATCH_ROWS`` rows.  Sensitive."""
        names = [column.name for column in self._columns]
        for path in self._paths:
            with pq.ParquetFile(path) as file:
                for part in file.iter_batches(_BATCH_ROWS, columns=names):
                    yield {c.name: _values(part[c.name], c) for c in self._columns}

    def evaluate(self, predict: Predict) -> Metrics:
        """Returns the metrics of the logits that ``predict`` gives."""
        return metrics_of(*self.predictions(predict))

    def predictions(self, predict: Predict) -> tuple[np.ndarray, np.ndarray]:
        """Returns labels and logits of all rows, in order.

        Raises:
          InputError: a logit is not finite.
        """
        labels, logits = [], []
        for columns in self.batches():
            labels.append(columns[LABEL])
            logits.append(predict(columns))
        label, logit = np.concatenate(labels), np.concatenate(logits)
        if not np.isfinite(logit).all():
            raise InputError(
                "Expected finite predictions for the held-out examples; the weights "
                "have diverged, or the model cannot take a value of theirs. Try a "
                "smaller --learning-rate."
            )
        return label, logit


def _check_file(path: pathlib.Path, manifest: Manifest) -> int:
    """Returns the number of rows of a file that has the columns of ``manifest``."""
    try:
        with pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"Expected {path} to be a Parquet file: {type(error).__name__}."
        ) from None
    for column in manifest.columns:
        _check_column(path, schema, column)
    found = _description(schema)
    if found != manifest.dataset:
        raise InputError(
            f"Expected {path} to be prepared as the examples of the batches were; its "
            "description differs. Use the test split of the same `dpsgd prepare`."
        )
    return num_rows


def _description(schema: pa.Schema) -> Any:
    try:
        return json.loads((schema.metadata or {}).get(DATASET_METADATA_KEY, b"{}"))
    except ValueError:
        return None


def _check_column(path: pathlib.Path, schema: pa.Schema, column: Column) -> None:
    index = schema.get_field_index(column.name)
    if index < 0:
        raise InputError(f"Expected column {column.name} in {path}.")
    kind, shape = schema.field(index).type, []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    wanted = pa.from_numpy_dtype(np.dtype(column.dtype))
    boolean = pa.types.is_boolean(kind) and column.dtype == "uint8"
    if tuple(shape) != column.shape or not (kind == wanted or boolean):
        raise InputError(
            f"Expected column {column.name} of {path} to be {column.dtype} of shape "
            f"{column.shape}, as in the batches; it is {schema.field(index).type}."
        )


def _values(array: pa.Array, column: Column) -> np.ndarray:
    num_rows = len(array)
    while pa.types.is_fixed_size_list(array.type) and not array.null_count:
        array = array.flatten()
    if array.null_count:
        raise InputError(
            f"Expected column {column.name} of --eval to hold no nulls. Fill them, for "
            "example with NaN, or drop the rows."
        )
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape((num_rows, *column.shape))
