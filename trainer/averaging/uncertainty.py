"""Variation of predictions due to noise, from the last k iterates of one run.

    pbar = (p_1 + ... + p_k) / k          S^2 = sum (p_i - pbar)^2 / (k - 1)
    interval at level L:  pbar +- t S / sqrt(k),  clipped to [0, 1] for probabilities,

where t is the (1 + L) / 2 quantile of Student's distribution with k - 1 degrees of
freedom, and p_1, ..., p_k are the predictions of the kept iterates for one held-out
example: the probability of label 1, that of each class, or any other output of the
network.  The level holds for each interval alone, not for all classes together.

Formal guarantees:
  - For k independent normal predictions the interval, before clipping, covers their
    mean with probability L.  Iterates are only approximately so.

S^2 approximates the variance over runs for late and distant kept iterates (section 5 of
the paper); it is smaller if they are close together.

Public, if the held-out examples need no protection; rows are in their order.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, section 5.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import t

from accounting.core.validation import InputError, check_float
from pipelines.files.storage import write_atomically
from trainer.averaging.aggregates import Outputs, OutputsByName
from trainer.model.metrics import OTHER
from trainer.model.target import Target
from trainer.report.arrow_tables import as_table

#: Name of a single output in the file.
PREDICTION = "prediction"

#: Suffixes of columns for one of several outputs; used alone for a single output.
STDDEV = "stddev"
_PARTS = (STDDEV, "low", "high")


def student_interval(
    mean: np.ndarray,
    stddev: np.ndarray,
    *,
    num_iterates: int,
    level: float,
    of_probabilities: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper ends of the intervals, each like ``mean``.

    Args:
      mean: Mean prediction over iterates, shape (examples, ...).
      stddev: Standard deviation over iterates, in the shape of ``mean``.
      num_iterates: k, at least 2.
      level: Level of the intervals, in (0, 1).
      of_probabilities: Whether to clip the ends to [0, 1].

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
    low, high = mean - half, mean + half
    if of_probabilities:
        return np.maximum(low, 0.0), np.minimum(high, 1.0)
    return low, high


def column_names(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns output -> columns of its prediction, stddev, low and high.

    Example:
      >>> column_names(["probability"])
      {'probability': ('probability', 'stddev', 'low', 'high')}
      >>> column_names(["rating", "click"])["click"]
      ('click', 'click_stddev', 'click_low', 'click_high')

    Raises:
      InputError: two columns have one name.
    """
    prefixes = {name: f"{name}_" if len(names) > 1 else "" for name in names}
    found = {n: (n, *(prefixes[n] + part for part in _PARTS)) for n in names}
    columns = [column for several in found.values() for column in several]
    for column in columns:
        if columns.count(column) > 1:
            raise InputError(
                f"Expected outputs whose columns beside intervals differ; two are "
                f"{column!r}. Rename an output of the model, or omit --uncertainty."
            )
    return found


def interval_columns(
    outputs: Mapping[str, Outputs], level: float
) -> dict[str, np.ndarray]:
    """Returns means, standard deviations and ends, each (examples, ...).

    Args:
      outputs: Name -> predictions of at least two iterates.
      level: Level of the intervals, in (0, 1).

    Raises:
      InputError: as ``column_names``, which has the names of the arrays.
    """
    columns: dict[str, np.ndarray] = {}
    for name, names in column_names(list(outputs)).items():
        one = outputs[name]
        ends = student_interval(
            one.mean,
            one.stddev,
            num_iterates=one.num_iterates,
            level=level,
            of_probabilities=one.task != OTHER,
        )
        columns |= zip(names, (one.mean, one.stddev, *ends), strict=True)
    return columns


def in_units(
    columns: Mapping[str, np.ndarray], target: Target | None
) -> dict[str, np.ndarray]:
    """Returns a predicted number and its interval in the unit of the label.

    Args:
      columns: Column -> predictions, (examples, ...).
      target: What is predicted; without a range, columns stay as they are.
    """
    if target is None or target.range is None or PREDICTION not in columns:
        return dict(columns)
    return {
        name: (
            x.astype(np.float64) * target.half_range
            if name == STDDEV
            else target.in_units(x)
        )
        for name, x in columns.items()
    }


def write_uncertainty(
    path: pathlib.Path,
    outputs: OutputsByName,
    *,
    steps: Sequence[int],
    level: float,
    target: Target | None = None,
) -> dict[str, Any]:
    """Writes one row per held-out example; returns the summary for the metrics.

    Arguments as for `interval_columns`.

    Args:
      path: Parquet file with the columns of ``column_names``; float64, or lists of them
        for several classes.
      steps: Numbers of steps of the iterates.
      target: What is predicted; None if nothing says so.
    """
    columns = in_units(interval_columns(outputs, level), target)
    buffer = io.BytesIO()
    pq.write_table(as_table(columns), buffer)
    write_atomically(path, buffer.getvalue())
    stddevs, widths = {}, {}
    for name, (_, stddev, low, high) in column_names(list(outputs)).items():
        stddevs[name] = float(columns[stddev].mean())
        widths[name] = float((columns[high] - columns[low]).mean())
    return {
        "level": level,
        "steps": list(steps),
        "mean_stddev": stddevs.pop(name) if len(outputs) == 1 else stddevs,
        "mean_width": widths.pop(name) if len(outputs) == 1 else widths,
    }
