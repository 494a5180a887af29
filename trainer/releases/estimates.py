"""Metrics with intervals, from sums with noise.

Metrics are functions of released sums and of public values alone.

An interval has the true value of the population with a probability of about 95 %, over
noise and over which rows were held out, where the normal approximation holds.  If users
are protected, the probability is that or larger.  Rows of a user may be alike, and
nobody knows which rows are of one user.  But each metric is, to first order, a sum of
one term for each row, and the square of the sum of a user's k terms is at most k times
the sum of their squares.  So the stated variance is k times that of independent rows,
which is the variance if users have k rows that are all alike.

Public: everything.

References:
  Hanley and McNeil (1982), "The meaning and use of the area under a receiver operating
  characteristic (ROC) curve", for the sampling error of AUC.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from trainer.model.metrics import ABSOLUTE_ERROR, SQUARED_ERROR, unit_of_loss
from trainer.releases.held_out_sums import NoisySum, mean, noise_of_mean

#: Standard deviations on each side of an interval of 95 %.
_SIDES = 1.96
#: A class has at least so many times the noise of its size, or AUC is not stated.
_LEAST = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
    """The number of held-out rows.

    Attributes:
      value: The number, or an estimate of it.
      noise: Standard deviation by the noise of a release; 0 if it is public.
      most: Largest number of rows of one user; 1 if the unit is a row.
    """

    value: float
    noise: float = 0.0
    most: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricEstimate:
    """A metric of held-out rows.

    Attributes:
      value: The estimate.
      noise: Standard deviation by the noise of the release.
      sampling: Standard deviation by the choice of the rows.
      most: Largest possible value; the least one is 0.
    """

    value: float
    noise: float
    sampling: float
    most: float = 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of 95 %, of possible values."""
        side = _SIDES * math.hypot(self.noise, self.sampling)
        return max(0.0, self.value - side), min(self.most, self.value + side)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimates:
    """The metrics of a release.

    Attributes:
      metrics: Name -> estimate; None where the rows do not show it.
      guessing: Metrics of the best constant, from the same release.
      num_rows: Number of rows, or an estimate of it.
      capped: Share of rows whose loss is above the cap; None if it was not counted.
    """

    metrics: dict[str, MetricEstimate | None]
    guessing: dict[str, float]
    num_rows: float
    capped: MetricEstimate | None = None

    def in_units(self, unit: float) -> Estimates:
        """Returns the estimates of predicted numbers in units of their label.

        Args:
          unit: How many of them one of the numbers is.
        """
        scaled = {
            name: each and MetricEstimate(
                **{n: x * unit_of_loss(name, unit) for n, x in vars(each).items()}
            )
            for name, each in self.metrics.items()
        }  # fmt: skip
        guessing = {n: x * unit_of_loss(n, unit) for n, x in self.guessing.items()}
        return dataclasses.replace(self, metrics=scaled, guessing=guessing)

    def without_metrics(self) -> Estimates:
        """Returns the estimates of rows that noise hides."""
        hidden = dict.fromkeys(self.metrics)
        return dataclasses.replace(self, metrics=hidden, guessing={}, capped=None)


def of_binary(sums: Mapping[str, NoisySum], rows: Count, cap: float) -> Estimates:
    """Returns the metrics of probabilities of label 1.

    Args:
      sums: From `release.release`.
      rows: Number of held-out rows.
      cap: Largest loss that counts.
    """
    counts = sums["counts"].values.reshape(-1, 2)
    right = np.concatenate([counts[:2, 0], counts[2:, 1]])  # on sides of 1/2
    wrong = np.concatenate([counts[:2, 1], counts[2:, 0]])
    noise = sums["counts"].stddev * math.sqrt(counts.size) / 2
    ones = _difference(counts[:, 1], counts[:, 0], rows)
    outermost = counts[0, 1] + counts[-1, 0]
    return Estimates(
        metrics={
            "auc": _auc(sums["pairs"], ones, noise, rows),
            "log_loss": _mean(sums["loss"], sums["squares"], rows, cap),
            "accuracy": _half_and(right, wrong, noise, rows),
        },
        guessing={"auc": 0.5, **_guessing(np.array([rows.value - ones, ones]))},
        capped=_share(outermost, sums["counts"].stddev * math.sqrt(2), rows),
        num_rows=rows.value,
    )


def of_classes(sums: Mapping[str, NoisySum], rows: Count, cap: float) -> Estimates:
    """Returns the metrics of one of several classes.

    Args:
      sums: From `release.release`.
      rows: Number of held-out rows.
      cap: Largest loss that counts.
    """
    counts = sums["counts"].values.reshape(-1, 2)
    noise = sums["counts"].stddev * math.sqrt(counts.size) / 2
    return Estimates(
        metrics={
            "accuracy": _half_and(counts[:, 1], counts[:, 0], noise, rows),
            "log_loss": _mean(sums["loss"], sums["squares"], rows, cap),
        },
        guessing=_guessing(counts.sum(1)),
        num_rows=rows.value,
    )


def of_numbers(sums: Mapping[str, NoisySum], rows: Count, cap: float) -> Estimates:
    """Returns the metrics of predicted numbers.

    Args:
      sums: From `release.release`.
      rows: Number of held-out rows.
      cap: Largest squared error that counts.
    """
    loss, absolute = sums["loss"], sums["absolute"]
    return Estimates(
        metrics={
            SQUARED_ERROR: _mean(loss, sums["squares"], rows, cap),
            # Squares of absolute errors are the squared ones.
            ABSOLUTE_ERROR: _mean(absolute, loss, rows, math.sqrt(cap)),
        },
        guessing=_variance(sums, rows),
        num_rows=rows.value,
    )


def _variance(sums: Mapping[str, NoisySum], rows: Count) -> dict[str, float]:
    """Returns the squared error of the mean of labels in [-1, 1]."""
    of_labels = 2 * mean(float(sums["label"].values[0]), rows.value) - 1
    squares = mean(float(sums["label_squares"].values[0]), rows.value)
    return {SQUARED_ERROR: min(1.0, max(0.0, squares - of_labels**2))}


def _difference(some: np.ndarray, others: np.ndarray, rows: Count) -> float:
    """Returns how many rows are among ``some``, where all are among one of both."""
    # The number of all rows has less noise than the sum of some, or none.
    return float((rows.value + some.sum() - others.sum()) / 2)


def _half_and(
    some: np.ndarray, others: np.ndarray, noise: float, rows: Count
) -> MetricEstimate:
    """Returns the share of ``some``, which is a half and half of the difference."""
    return _share(_difference(some, others, rows), noise, rows, known=0.5)


def _share(
    count: float, noise: float, rows: Count, known: float = 0.0
) -> MetricEstimate:
    """Returns a count as a share, of which a part is known whatever ``rows`` is."""
    value = min(1.0, max(0.0, count / rows.value))
    # At least that of one row, where the estimate is 0 or 1.
    spread = max(value * (1 - value), 1 / rows.value)
    return MetricEstimate(
        value=value,
        noise=math.hypot(noise, (value - known) * rows.noise) / rows.value,
        sampling=math.sqrt(spread * rows.most / rows.value),
    )


def _mean(
    sums: NoisySum, squares: NoisySum, rows: Count, scale: float
) -> MetricEstimate:
    """Returns the mean of shares in [0, 1], and of their squares, times a scale."""
    value = min(1.0, max(0.0, mean(float(sums.values[0]), rows.value)))
    square = mean(float(squares.values[0]), rows.value)
    # Between 0 and that of shares of 0 and 1 alone.
    variance = min(max(square - value**2, 1 / rows.value), value * (1 - value))
    of_rows = (value - 0.5) * rows.noise / rows.value
    noise = math.hypot(noise_of_mean(sums.stddev, rows.value), of_rows)
    return MetricEstimate(
        value=scale * value,
        noise=scale * noise,
        sampling=scale * math.sqrt(max(variance, 0.0) * rows.most / rows.value),
        most=scale,
    )


def _auc(
    pairs: NoisySum, ones: float, noise: float, rows: Count
) -> MetricEstimate | None:
    zeros = rows.value - ones
    if min(ones, zeros) < max(2.0, _LEAST * math.hypot(noise, rows.noise / 2)):
        return None
    above = float(pairs.values[0]) / (2 * ones * zeros)
    value = min(1.0, max(0.0, 0.5 + above))
    # One of both classes is larger by noise, and the other smaller; or both are larger.
    of_sizes = (value - 0.5) * (1 / ones - 1 / zeros) * noise
    of_rows = (value - 0.5) * (1 / ones + 1 / zeros) * rows.noise / 2
    return MetricEstimate(
        value=value,
        noise=math.hypot(pairs.stddev / (2 * ones * zeros), of_sizes, of_rows),
        sampling=_sampling_of_auc(value, ones, zeros) * math.sqrt(rows.most),
    )


def _sampling_of_auc(auc: float, ones: float, zeros: float) -> float:
    """Returns the standard error of Hanley and McNeil (1982)."""
    two_ones, two_zeros = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc)
    spread += (ones - 1) * (two_ones - auc**2) + (zeros - 1) * (two_zeros - auc**2)
    return math.sqrt(max(spread, 1.0) / (ones * zeros))


def _guessing(counts: np.ndarray) -> dict[str, float]:
    shares = np.clip(counts, 0, None)
    shares = shares[shares > 0] / shares.sum() if shares.sum() else np.ones(1)
    entropy = -float((shares * np.log(shares)).sum())
    return {"log_loss": entropy + 0.0, "accuracy": float(shares.max())}
