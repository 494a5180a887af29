"""Sums over held-out rows, how far one row or user moves them, and their release.

*The release* of several sums over the same rows is one Gaussian mechanism.

Formal guarantees of the release:
  - The sums together are one Gaussian mechanism with ``noise_multiplier``: each has
    noise of its bound times ``noise_multiplier`` over the root of its share, and shares
    add up to 1 at most.  It is (epsilon, delta)-private for one unit under zero-out by
    Balle and Wang (2018), Theorem 8.
  - Noise is added to integers and rounded to integers, which is post-processing, so
    that no low bits of a float are released.
  - Noise has a key of its own, from the operating system, that is kept nowhere: two
    releases have independent noise.

*The sums of a classification* are integers:

    rows       all rows, if their number is not public
    counts     rows by bin of the probability and by label, or by class and whether the
               predicted one is right
    pairs      pairs of a positive and a negative row that the scores order rightly,
               less those that they order wrongly: ``2 n1 n0 (AUC - 1/2)``; scores of
               one cell of a public grid, `_cells`, order none
    loss       of each row, at most a public cap, less half the cap
    squares    of the loss

*The sums of a regression*:

    rows             all rows, if their number is not public
    loss             squared error of each row, at most a public cap, as a share of it
    squares          of that share, for the sampling error of its mean
    absolute         root of that share: the absolute error
    label, label_squares
                     the label in [-1, 1] as a share of that range, which is public,
                     and its square, for the variance

Formal guarantees of the sums.  A row that is zeroed out adds nothing to any sum.
  - One row moves the values of a sum by its ``bound`` at most, in L2 norm.  In a
    classification it is in one cell of the counts, in fewer pairs than there are rows,
    and its loss less half the cap is between plus and minus half the cap.  In a
    regression it moves each sum by half at most, since a half is taken from every share
    in [0, 1].
  - A user of at most k rows moves each sum but ``pairs`` by k times that at most, by
    the triangle inequality, and ``pairs`` by `moved_pairs`: if a of its rows have
    label 1 and b label 0, they are in ``a n0 + b n1 - a b`` pairs.  Let a >= b; as
    ``n0 <= n - a``, these are at most ``a (n - a) + b a - a b = a (n - a)``, which
    grows up to ``a = n / 2``, and a is at most k.  If b > a, exchange the labels.
  - Every row has a place, whatever is in it, and nothing is refused.  In a
    classification, a label that is no class, or a prediction that is not finite, counts
    as the worst.  In a regression, an error that is not finite counts as the cap, and a
    label that is not finite as 0.
  - Values are integers, so that sums have no rounding.
  - Memory does not grow with the rows.

Public: names, bounds, what `release` returns, and the number of rows if users are not
bounded.  Sensitive: values of the sums.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import secrets
from collections.abc import Mapping

import numpy as np

from pipelines.core.keys import KEY_BYTES
from trainer.core.step.noise import grid_normal
from trainer.model.metrics import BINARY


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSum:
    """A sum over rows.

    Attributes:
      values: int64.  Sensitive.
      bound: By how much one unit, a row or a user, moves them at most, in L2 norm.
      share: Share of the squared sensitivity of all sums together.
    """

    values: np.ndarray = dataclasses.field(repr=False)
    bound: float
    share: float

    def stddev(self, noise_multiplier: float) -> float:
        """Returns the standard deviation of the noise of each value."""
        return noise_multiplier * self.bound / math.sqrt(self.share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisySum:
    """A released sum.

    Attributes:
      values: float64.
      stddev: Standard deviation of the noise of each value.
    """

    values: np.ndarray
    stddev: float


def release(sums: Mapping[str, RowSum], noise_multiplier: float) -> dict[str, NoisySum]:
    """Returns the sums with noise, by name.

    Args:
      sums: Sums over the same rows.  Sensitive.
      noise_multiplier: Noise standard deviation over the sensitivity of all together.

    Raises:
      ValueError: shares that add up to more than 1, or no noise.
    """
    if sum(each.share for each in sums.values()) > 1 or not noise_multiplier > 0:
        raise ValueError("Expected shares of at most 1 in all, and noise above 0.")
    key, found = secrets.token_bytes(KEY_BYTES), {}
    for index, (name, each) in enumerate(sums.items()):
        stddev = each.stddev(noise_multiplier)
        noise = grid_normal(key, 0, index, each.values.shape, stddev=stddev)
        values = (each.values + noise).astype(np.float64)
        found[name] = NoisySum(values=values, stddev=stddev)
    return found


#: A loss of 1 caps, and of its square.
_UNITS = 1 << 20
_HALF = _UNITS // 2

#: Octaves of a probability, or of 1 less it, and bits within each, by which scores
#: differ.  The grid may not depend on the rows, or one could move all pairs.
_OCTAVES, _BITS = 24, 12
_MIDDLE = _OCTAVES << _BITS

#: Shares of the squared sensitivity, which add up to 1.
_BINARY = {"counts": 0.3, "pairs": 0.3, "loss": 0.3, "squares": 0.1}
_CLASSES = {"counts": 0.6, "loss": 0.3, "squares": 0.1}
#: Share of the number of rows, if it is not public; the others have the rest.
_OF_ROWS = 0.2


def default_cap(num_classes: int) -> float:
    """Returns the largest loss that counts: 4 above that of guessing one of two.

    Args:
      num_classes: At least 2.

    Example:
      >>> default_cap(2)
      4.0
    """
    return float(4 + np.log(num_classes / 2))


def edges(cap: float) -> np.ndarray:
    """Returns the edges between bins of probability, shape (3,).

    The outermost bins hold the rows whose loss is above the cap if they are wrong.
    """
    least = float(np.exp(-cap))
    return np.array([least, 0.5, 1 - least])


def moved_pairs(num_rows: int, most: int) -> int:
    """Returns how many pairs the rows of one user are in, at most.

    Args:
      num_rows: Number of rows, or more.
      most: Largest number of rows of one user.

    Example:
      >>> moved_pairs(100, 1), moved_pairs(100, 3), moved_pairs(4, 3)
      (99, 291, 4)
    """
    moved = min(most, num_rows // 2)
    return max(1, moved * (num_rows - moved))


class KeptRows(abc.ABC):
    """Sums a few numbers of each row.

    Args:
      cap: Largest loss that counts, above 0.
      most: Largest number of rows of one user; None if the unit is a row.
    """

    def __init__(self, cap: float, most: int | None) -> None:
        self.cap, self.most = cap, most
        self._num_rows = 0
        self._totals: dict[str, int] = {}

    #: Name of each sum but ``rows`` -> its share, of all in all 1.
    _shares: Mapping[str, float]

    def add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        """Adds rows.  Sensitive.

        Args:
          labels: (rows,), or one-hot (rows, classes).
          predictions: Predictions of each row, as the class says.
        """
        self._num_rows += len(labels)
        with np.errstate(all="ignore"):  # what is not finite counts as the worst
            self._add(labels, predictions.astype(np.float64))

    @abc.abstractmethod
    def _add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        """Adds rows to the totals; see `add`."""

    @abc.abstractmethod
    def sums(self, at_most: int | None = None) -> dict[str, RowSum]:
        """Returns the sums of all rows but ``rows``, by name.

        Args:
          at_most: Public bound on the number of rows; None if that is public.
        """

    @abc.abstractmethod
    def noise_of_one(self, noise_multiplier: float) -> float:
        """Returns the noise of a metric of one row, over the range of the metric.

        Args:
          noise_multiplier: Noise standard deviation over the sensitivity of all sums.
        """

    @property
    def shares(self) -> dict[str, float]:
        """Name of each sum -> its share of the squared sensitivity."""
        if self.most is None:
            return dict(self._shares)
        # A little less, so that all add up to 1 at most in floating point.
        rest = (1 - _OF_ROWS) * (1 - 1e-12)
        return {"rows": _OF_ROWS, **{n: rest * x for n, x in self._shares.items()}}

    def count(self) -> RowSum:
        """Returns the number of rows, to be released before the other sums."""
        return self._sum("rows", np.array([self._num_rows]), 1)

    def _sum(self, name: str, values: np.ndarray, bound: float) -> RowSum:
        """Returns a sum, of which a row moves the values by ``bound`` at most."""
        share = self.shares[name]
        return RowSum(values=values, bound=bound * (self.most or 1), share=share)

    def _add_centred(self, name: str, values: np.ndarray) -> None:
        """Adds values in [0, 1] less a half, in units, to a total."""
        units = np.rint(values * _UNITS).astype(np.int64) - _HALF
        self._totals[name] = self._totals.get(name, 0) + int(np.sum(units))

    def _centred(self, name: str) -> RowSum:
        """Returns what `_add_centred` added up."""
        return self._sum(name, np.array([self._totals.get(name, 0)]), _HALF)


class HeldOutRows(KeptRows):
    """Sums over labels and the probabilities that a model gives.

    Predictions are the probability of label 1, (rows,) or (rows, 1); or those of all
    classes, (rows, classes).

    Args:
      task: "binary" or "classes".
      num_classes: Number of classes, at least 2.
      cap: Largest loss that counts, above 0.
      most: Largest number of rows of one user; None if the unit is a row.
    """

    def __init__(
        self, task: str, num_classes: int, cap: float, most: int | None = None
    ) -> None:
        super().__init__(cap, most)
        self._is_binary = task == BINARY
        self._shares = _BINARY if self._is_binary else _CLASSES
        self._num_classes = num_classes
        self._counts = np.zeros(self.num_cells, np.int64)
        #: Rows by cell of the score and by label; made by the first rows.
        self._of_scores: np.ndarray | None = None

    @property
    def num_cells(self) -> int:
        """Number of counts."""
        bins = len(edges(self.cap)) + 1
        return 2 * (bins if self._is_binary else self._num_classes)

    def noise_of_one(self, noise_multiplier: float) -> float:
        """Returns the noise of an accuracy of one row; see `KeptRows.noise_of_one`."""
        of_counts = self._sum("counts", np.zeros(0, np.int64), 1)
        return of_counts.stddev(noise_multiplier) * math.sqrt(self.num_cells) / 2

    def _add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        find = self._binary if self._is_binary else self._classes
        cells, losses = find(labels, predictions)
        self._counts += np.bincount(cells, minlength=self.num_cells)
        self._add_centred("loss", losses)
        self._add_centred("squares", np.square(losses))

    def _binary(
        self, labels: np.ndarray, chance: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        positive, score = labels.reshape(-1) > 0, chance.reshape(-1)
        score = np.where(np.isfinite(score), score, np.where(positive, 0.0, 1.0))
        right = np.where(positive, score, 1 - score)
        if self._of_scores is None:
            self._of_scores = np.zeros((2, 2 * _MIDDLE + 1), np.int64)
        np.add.at(self._of_scores, (positive.astype(np.int64), _cells(score)), 1)
        cell = 2 * np.searchsorted(edges(self.cap), score) + positive
        return cell, self._losses(right)

    def _classes(
        self, labels: np.ndarray, chance: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if labels.ndim == 2:
            labels = labels.argmax(-1)
        known = (labels >= 0) & (labels < self._num_classes)
        label = np.where(known, labels, 0).astype(np.int64)
        finite = np.isfinite(chance).all(-1) & known
        hit = finite & (np.where(np.isfinite(chance), chance, 0).argmax(-1) == label)
        given = np.take_along_axis(chance, label[:, None], -1)[:, 0]
        return 2 * label + hit, self._losses(np.where(finite, given, 0.0))

    def _losses(self, chance: np.ndarray) -> np.ndarray:
        """Returns the losses as shares of the cap, in [0, 1]."""
        losses = -np.log(np.clip(chance, 0.0, 1.0)) / self.cap
        return np.clip(losses, 0.0, 1.0)

    def sums(self, at_most: int | None = None) -> dict[str, RowSum]:
        """Returns the sums of all rows but ``rows``, by name; see `KeptRows.sums`."""
        found = {
            "counts": self._sum("counts", self._counts, 1),
            "loss": self._centred("loss"),
            "squares": self._centred("squares"),
        }
        if self._of_scores is not None:
            num_rows = self._num_rows if at_most is None else at_most
            found["pairs"] = RowSum(
                values=_pairs(*self._of_scores),
                bound=moved_pairs(num_rows, self.most or 1),
                share=self.shares["pairs"],
            )
        return dict(sorted(found.items()))


def mean(centred: float, num_rows: float) -> float:
    """Returns the mean of values in [0, 1] from their sum less a half.

    Args:
      centred: The sum, with noise or without.
      num_rows: Number of rows.
    """
    return centred / _UNITS / num_rows + 0.5


def noise_of_mean(stddev: float, num_rows: float) -> float:
    """Returns the standard deviation of what `mean` returns.

    Args:
      stddev: Standard deviation of the noise of the sum.
      num_rows: Number of rows.
    """
    return stddev / _UNITS / num_rows


def _cells(scores: np.ndarray) -> np.ndarray:
    """Returns the cells of a grid that scores are in, which keep their order.

    Cells are as wide as 2**-12 of a probability near 0, or of 1 less it near 1.
    """
    least = np.clip(np.minimum(scores, 1 - scores), 2.0 ** -(_OCTAVES + 1), 0.5)
    fraction, octave = np.frexp(least)  # fraction in [1/2, 1)
    within = ((2 * fraction - 1) * (1 << _BITS)).astype(np.int64)
    cell = ((octave + _OCTAVES).astype(np.int64) << _BITS) + within
    return np.where(scores > 0.5, 2 * _MIDDLE - cell, cell)


def _pairs(zeros: np.ndarray, ones: np.ndarray) -> np.ndarray:
    """Returns the sum over pairs, of rows of label 0 and 1 by cell of the score."""
    below = np.cumsum(zeros) - zeros
    above = zeros.sum() - below - zeros
    return np.array([np.sum(ones * (below - above))])


#: The largest squared error of a number in [-1, 1] for a label in [-1, 1].
CAP = 4.0

#: Shares of the squared sensitivity, which add up to 1.
_SHARES = {
    "loss": 0.4, "absolute": 0.2, "squares": 0.1, "label": 0.15, "label_squares": 0.15
}  # fmt: skip
#: The largest variance of a number, as a share of its squared range.
_OF_VARIANCE = 0.25


class HeldOutNumbers(KeptRows):
    """Sums over labels and errors of predictions, (rows,) or (rows, 1).

    Args:
      cap: Largest squared error that counts, above 0.
      most: Largest number of rows of one user; None if the unit is a row.
    """

    _shares = _SHARES

    def __init__(self, cap: float = CAP, most: int | None = None) -> None:
        super().__init__(cap, most)

    def noise_of_one(self, noise_multiplier: float) -> float:
        """Returns the noise of a squared error, over the largest variance."""
        stddev = self._centred("loss").stddev(noise_multiplier)
        return noise_of_mean(stddev, num_rows=1) / _OF_VARIANCE

    def _add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        label = labels.reshape(-1).astype(np.float64)
        error = np.square(predictions.reshape(-1) - label)
        share = np.clip(error / self.cap, 0.0, 1.0)
        share = np.where(np.isfinite(error), share, 1.0)
        label = np.clip(np.where(np.isfinite(label), label, 0.0), -1.0, 1.0)
        for name, values in {
            "absolute": np.sqrt(share),
            "label": (label + 1) / 2,
            "label_squares": np.square(label),
            "loss": share,
            "squares": np.square(share),
        }.items():
            self._add_centred(name, values)

    def sums(self, at_most: int | None = None) -> dict[str, RowSum]:
        """Returns the sums of all rows but ``rows``, by name; see `KeptRows.sums`."""
        del at_most  # no sum depends on the other rows
        return {name: self._centred(name) for name in sorted(self._shares)}
