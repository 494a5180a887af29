"""Metrics with intervals, from sums with noise.

Formal guarantees:
  - metrics are functions of released sums and of public values alone.
  - an interval has the true value of the population with a probability of about 95 %,
    over noise and over which rows were held out, where the normal approximation holds.

Public: everything.

References:
  Hanley and McNeil (1982), "The meaning and use of the area under a receiver operating
  characteristic (ROC) curve", for the sampling error of AUC.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.releases.held_out_sums import edges, mean
from trainer.releases.release import NoisySum

#: Standard deviations on each side of an interval of 95 %.
_SIDES = 1.96
#: A class has at least so many times the noise of its size, or AUC is not stated.
_LEAST = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric of held-out rows.

    Attributes:
      value: The estimate.
      noise: Standard deviation by the noise of the release.
      sampling: Standard deviation by the choice of the rows.
    """

    value: float
    noise: float
    sampling: float

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of 95 %."""
        side = _SIDES * math.hypot(self.noise, self.sampling)
        return self.value - side, self.value + side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimates:
    """The metrics of a release.

    Attributes:
      metrics: Name -> estimate; None where the rows do not show it.
      guessing: Metrics of the best constant, from the same release.
      calibration: Of probabilities: a dict for each bin.
      capped: Share of rows whose loss is above the cap; None if it was not counted.
    """

    metrics: dict[str, Estimate | None]
    guessing: dict[str, float]
    calibration: list[dict[str, float]]
    capped: Estimate | None


def noise_of_accuracy(stddev_of_counts: float, num_cells: int, num_rows: int) -> float:
    """Returns the standard deviation of the noise of an accuracy.

    Args:
      stddev_of_counts: Of the noise of each count.
      num_cells: Number of counts.
      num_rows: Number of held-out rows.
    """
    return stddev_of_counts * math.sqrt(num_cells) / 2 / num_rows


def of_binary(sums: Mapping[str, NoisySum], num_rows: int, cap: float) -> Estimates:
    """Returns the metrics of probabilities of label 1.

    Args:
      sums: From `release.release`.
      num_rows: Number of held-out rows.
      cap: Largest loss that counts.
    """
    counts = sums["counts"].values.reshape(-1, 2)
    middle = int(np.searchsorted(edges(cap), 0.5)) + 1
    right, wrong = _by_sides(counts, middle)
    noise = sums["counts"].stddev * math.sqrt(counts.size) / 2
    ones = _difference(counts[:, 1], counts[:, 0], num_rows)
    outermost = counts[0, 1] + counts[-1, 0]
    return Estimates(
        metrics={
            "auc": _auc(sums["pairs"], ones, noise, num_rows),
            "log_loss": _loss(sums, num_rows, cap),
            "accuracy": _share(_difference(right, wrong, num_rows), noise, num_rows),
        },
        guessing={"auc": 0.5, **_guessing(np.array([num_rows - ones, ones]))},
        calibration=_calibration(counts, cap, sums["counts"].stddev),
        capped=_share(outermost, sums["counts"].stddev * math.sqrt(2), num_rows),
    )


def of_classes(sums: Mapping[str, NoisySum], num_rows: int, cap: float) -> Estimates:
    """Returns the metrics of one of several classes.

    Args:
      sums: From `release.release`.
      num_rows: Number of held-out rows.
      cap: Largest loss that counts.
    """
    counts = sums["counts"].values.reshape(-1, 2)
    noise = sums["counts"].stddev * math.sqrt(counts.size) / 2
    right = _difference(counts[:, 1], counts[:, 0], num_rows)
    return Estimates(
        metrics={
            "accuracy": _share(right, noise, num_rows),
            "log_loss": _loss(sums, num_rows, cap),
        },
        guessing=_guessing(counts.sum(1)),
        calibration=[],
        capped=None,
    )


def _by_sides(counts: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the counts of right and of wrong predictions at probability 1/2."""
    right = np.concatenate([counts[:middle, 0], counts[middle:, 1]])
    wrong = np.concatenate([counts[:middle, 1], counts[middle:, 0]])
    return right, wrong


def _difference(some: np.ndarray, others: np.ndarray, num_rows: int) -> float:
    """Returns how many rows are among ``some``, where all are among one of both."""
    # The number of all rows is public, which halves the noise of the sum of some.
    return float((num_rows + some.sum() - others.sum()) / 2)


def _share(count: float, noise: float, num_rows: int) -> Estimate:
    value = min(1.0, max(0.0, count / num_rows))
    # At least that of one row, where the estimate is 0 or 1.
    spread = max(value * (1 - value), 1 / num_rows)
    sampling = math.sqrt(spread / num_rows)
    return Estimate(value=value, noise=noise / num_rows, sampling=sampling)


def _loss(sums: Mapping[str, NoisySum], num_rows: int, cap: float) -> Estimate:
    value = min(1.0, max(0.0, mean(float(sums["loss"].values[0]), num_rows)))
    square = mean(float(sums["squares"].values[0]), num_rows)
    # Between 0 and that of losses of 0 and of the cap alone.
    variance = min(max(square - value**2, 1 / num_rows), value * (1 - value))
    unit = mean(sums["loss"].stddev, num_rows) - 0.5
    return Estimate(
        value=cap * value,
        noise=cap * unit,
        sampling=cap * math.sqrt(max(variance, 0.0) / num_rows),
    )


def _auc(pairs: NoisySum, ones: float, noise: float, num_rows: int) -> Estimate | None:
    zeros = num_rows - ones
    if min(ones, zeros) < max(2.0, _LEAST * noise):
        return None
    above = float(pairs.values[0]) / (2 * ones * zeros)
    value = min(1.0, max(0.0, 0.5 + above))
    of_sizes = (value - 0.5) * (1 / ones - 1 / zeros) * noise
    return Estimate(
        value=value,
        noise=math.hypot(pairs.stddev / (2 * ones * zeros), of_sizes),
        sampling=_sampling_of_auc(value, ones, zeros),
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


def _calibration(counts: np.ndarray, cap: float, stddev: float) -> list[dict[str, Any]]:
    """Returns the bins with the share of ones and its standard deviation."""
    ends = [0.0, *map(float, edges(cap)), 1.0]
    found = []
    for (zeros, ones), low, high in zip(counts, ends[:-1], ends[1:], strict=True):
        rows = float(zeros + ones)
        if rows < 2 * _LEAST * stddev:
            continue
        share = _share(float(ones), stddev, max(1, round(rows)))
        spread = math.hypot(share.noise, share.sampling)
        found.append(
            {
                "from": low,
                "to": high,
                "rows": rows,
                "ones": share.value,
                "stddev": spread,
            }
        )
    return found
