"""How much of a prediction is the noise's doing: from the last k iterates of one run.

    pbar = (p_1 + ... + p_k) / k          S^2 = sum (p_i - pbar)^2 / (k - 1)
    interval at level L:  pbar +- t S / sqrt(k),  cut off at 0 and 1,

t the (1 + L) / 2 quantile of Student's distribution with k - 1 degrees of freedom, for
the probability of label 1 that k kept iterates predict for one held-out example.

Formal guarantees:
  - For k independent normal predictions the interval, before it is cut off, covers
    their mean with probability L.  Iterates are only nearly so: see ``STATEMENT``.
  - S^2 tends to the variance over runs as the first kept iterate is later and kept ones
    are further apart; where they are close together it is smaller.

Public: where the held-out examples need no protection; rows are in their order.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, section 5.
"""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import t

from accounting.validation import check_float
from pipelines.batches.manifest import write_atomically
from trainer.averaging.aggregates import Outputs

#: Key of the Parquet file's metadata; its value says what the columns mean.
METADATA_KEY = b"dpsgd.uncertainty"

STATEMENT = (
    "For every held-out example, in their order: prediction is the mean probability of "
    "label 1 over kept iterates of one run, stddev the standard deviation of one "
    "iterate's, low and high a Student interval for the expected prediction. They "
    "measure how much predictions vary with the noise and with the order of sampling, "
    "for this data set, and treat the iterates as independent draws from where "
    "training has settled. Iterates too close together, or still on their way, make "
    "them too narrow; other data, models and initial weights are not in them. Take "
    "them as a lower bound on the true uncertainty. The privacy of the run is that of "
    "its training examples; held-out examples are not protected."
)


def student_interval(
    mean: np.ndarray, stddev: np.ndarray, *, num_iterates: int, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper ends of the intervals, within [0, 1].

    Args:
      mean: Mean probability over iterates, shape (examples,).
      stddev: Standard deviation of one iterate's, shape (examples,).
      num_iterates: k, at least 2.
      level: Of the intervals, in (0, 1).

    Returns:
      Two arrays of the shape of ``mean``.

    Raises:
      InputError: ``level`` is out of range.

    Example:
      >>> low, high = student_interval(
      ...     np.array([0.5]), np.array([0.02]), num_iterates=4, level=0.95)
      >>> round(float(high[0] - 0.5), 6)  # 3.182446 * 0.02 / 2
      0.031824
    """
    check_float("uncertainty", level, above=0, below=1)
    quantile = float(t.ppf((1 + level) / 2, num_iterates - 1))
    half = quantile * stddev / np.sqrt(num_iterates)
    return np.maximum(mean - half, 0.0), np.minimum(mean + half, 1.0)


def write_uncertainty(
    path: pathlib.Path, outputs: Outputs, *, steps: Sequence[int], level: float
) -> dict[str, Any]:
    """Writes one row per held-out example; returns the summary for the metrics.

    Args:
      path: Where the Parquet file goes: prediction, stddev, low, high; float64.
      outputs: Predictions of at least two iterates.
      steps: After how many steps the iterates are those of.
      level: Of the intervals, in (0, 1).
    """
    stddev = outputs.stddev
    low, high = student_interval(
        outputs.mean, stddev, num_iterates=outputs.num_iterates, level=level
    )
    meaning = {"level": level, "steps": list(steps), "statement": STATEMENT}
    columns = {"prediction": outputs.mean, "stddev": stddev, "low": low, "high": high}
    table = pa.table(columns).replace_schema_metadata(
        {METADATA_KEY: json.dumps(meaning)}
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    write_atomically(path, buffer.getvalue())
    return {
        **meaning,
        "mean_stddev": float(stddev.mean()),
        "mean_width": float((high - low).mean()),
    }
