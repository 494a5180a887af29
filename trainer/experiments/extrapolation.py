"""A metric as a straight line in the logarithm of the batch size, and how far it holds.

    metric = intercept + slope * log2(batch size) + error

Formal guarantees:
  - ``fit_line`` is the least-squares line of all runs, each run a point.
  - If the law above holds, with errors that are independent, normal and of one
    variance, then the metric of one more run lies in ``Line.predict`` with probability
    ``confidence``, exactly: Student's t with ``num_runs - 2`` degrees of freedom.
  - ``Line.lack_of_fit`` is a p-value of the same law: small values speak against the
    line.  It needs repeated runs and three sizes.

The interval covers chance.  It does not cover a law that bends beyond the points, which
no run with small batches can show.

References:
  Draper and Smith (1998), Applied Regression Analysis, sections 1.4, 2.1 and 3.1;
  Sander, Stock and Sablayrolles (2023), arXiv:2210.03403, Figure 1, for the law.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from accounting.validation import InputError, check_float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The metric of one run that was not made.

    Attributes:
      mean: On the line.
      lower, upper: Ends of the interval.
      confidence: Probability that the run lies between them.
    """

    mean: float
    lower: float
    upper: float
    confidence: float

    def __contains__(self, value: float) -> bool:
        return self.lower <= value <= self.upper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A fitted line.

    Attributes:
      intercept: Metric at batch size 1.
      slope: Change of the metric when the batch size doubles.
      residual_stddev: Of a run around the line; its square is unbiased.
      num_runs: Points that were fitted.
      mean_log2: Mean of their ``log2(batch size)``.
      sum_squares: Of their deviations from that mean.
      lack_of_fit: p-value of the F-test of the line against one mean for each size;
        None without repetitions or with two sizes alone.
    """

    intercept: float
    slope: float
    residual_stddev: float
    num_runs: int
    mean_log2: float
    sum_squares: float
    lack_of_fit: float | None

    def predict(self, batch_size: float, *, confidence: float) -> Prediction:
        """Returns the metric of one more run, with Student's prediction interval.

        Args:
          batch_size: Expected examples of a step of that run, above 0.
          confidence: Of the interval, in (0, 1).

        Raises:
          InputError: ``confidence`` is out of range.
        """
        check_float("confidence", confidence, above=0, below=1)
        place = math.log2(batch_size)
        mean = self.intercept + self.slope * place
        leverage = 1 / self.num_runs + (place - self.mean_log2) ** 2 / self.sum_squares
        quantile = float(stats.t.ppf((1 + confidence) / 2, self.num_runs - 2))
        margin = quantile * self.residual_stddev * math.sqrt(1 + leverage)
        return Prediction(
            mean=mean, lower=mean - margin, upper=mean + margin, confidence=confidence
        )


def fit_line(batch_sizes: Sequence[int], values: Sequence[float]) -> Line:
    """Returns the line through runs.

    Args:
      batch_sizes: One for each run.
      values: Their metric.

    Raises:
      InputError: fewer than three runs, or all of one size.
    """
    x, y = np.log2(np.asarray(batch_sizes, float)), np.asarray(values, float)
    if len(x) < 3 or len(set(batch_sizes)) < 2:
        raise InputError(
            f"Expected num_runs={len(x)} of {len(set(batch_sizes))} batch size(s) to "
            "be at least 3 of at least 2: fewer show no scatter around a line. "
            "Add --seeds, or sizes to --small-batch-sizes."
        )
    centred = x - x.mean()
    sum_squares = float(centred @ centred)
    slope = float(centred @ y) / sum_squares
    residuals = y - y.mean() - slope * centred
    squares = float(residuals @ residuals)
    return Line(
        intercept=float(y.mean() - slope * x.mean()),
        slope=slope,
        residual_stddev=math.sqrt(squares / (len(x) - 2)),
        num_runs=len(x),
        mean_log2=float(x.mean()),
        sum_squares=sum_squares,
        lack_of_fit=_lack_of_fit(x, y, squares),
    )


def _lack_of_fit(x: np.ndarray, y: np.ndarray, squares: float) -> float | None:
    sizes = np.unique(x)
    repeated, beyond = len(x) - len(sizes), len(sizes) - 2
    if not repeated or not beyond:
        return None
    groups = [y[x == size] for size in sizes]
    pure = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    if pure == 0.0:
        return None
    ratio = max(0.0, squares - pure) / beyond / (pure / repeated)
    return float(stats.f.sf(ratio, beyond, repeated))
