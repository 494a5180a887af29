"""A linear fit of a metric against the logarithm of the batch size.

    metric = intercept + slope * log2(batch size) + error

Formal guarantees:
  - ``fit_line`` is the least-squares line through all runs, one point per run.
  - If this model holds, with independent normal errors of equal variance, the metric of
    one more run lies in ``Line.predict`` with probability ``confidence``, exactly:
    Student's t with ``num_runs - 2`` degrees of freedom.
  - ``Line.lack_of_fit`` is a p-value under the same model: small values are evidence
    against the line.  It needs repeated runs and three sizes.

The interval covers random error.  It does not cover a curve that bends beyond the
points, which no run with small batches can show.

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

from accounting.core.validation import InputError, check_float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted metric of one more run.

    Attributes:
      mean: Value of the line.
      lower, upper: Ends of the interval.
      confidence: Probability that the metric lies between them.
    """

    mean: float
    lower: float
    upper: float
    confidence: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A fitted line.

    Attributes:
      intercept: Metric at batch size 1.
      slope: Change of the metric when the batch size doubles.
      residual_stddev: Standard deviation of runs around the line; its square is
        unbiased.
      num_runs: Number of fitted points.
      mean_log2: Mean of their ``log2(batch size)``.
      sum_squares: Sum of squared deviations from that mean.
      lack_of_fit: p-value of the F-test of the line against one mean for each size;
        None without repetitions or with only two sizes.
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
          batch_size: Expected batch size of that run, above 0.
          confidence: Confidence of the interval, in (0, 1).

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
      batch_sizes: Batch size of each run.
      values: Metric of each run.

    Raises:
      InputError: there are fewer than three runs, or all have one size.
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
