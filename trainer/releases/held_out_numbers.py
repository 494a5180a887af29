"""Sums over held-out rows of a regression, and how far one row or user moves them.

    rows             all rows, if their number is not public
    loss             squared error of each row, at most a public cap, as a share of it
    squares          of that share, for the sampling error of its mean
    absolute         root of that share: the absolute error
    label, label_squares
                     the label in [-1, 1] as a share of that range, and its square, for
                     the variance; where the range is public

Formal guarantees (a row that is zeroed out adds nothing to any sum):
  - one row moves each sum by half at most, since a half is taken from every share in
    [0, 1]; a user of at most k rows by k times that.
  - every row has a place, whatever is in it: an error that is not finite counts as the
    cap, a label that is not as 0, and nothing is refused.
  - values are integers, so that sums have no rounding.

Public: names, bounds.  Sensitive: values.
"""

from __future__ import annotations

import numpy as np

from trainer.releases.held_out_sums import KeptRows, noise_of_mean
from trainer.releases.release import RowSum

#: The largest squared error of a number in [-1, 1] for a label in [-1, 1].
CAP = 4.0

#: Shares of the squared sensitivity, which add up to 1.
_SHARES = {
    "loss": 0.4, "absolute": 0.2, "squares": 0.1, "label": 0.15, "label_squares": 0.15
}  # fmt: skip
_WITHOUT_LABELS = {"loss": 0.5, "absolute": 0.3, "squares": 0.2}
#: The largest variance of a number, as a share of its squared range.
_OF_VARIANCE = 0.25


class HeldOutNumbers(KeptRows):
    """Sums over labels and errors of predictions, (rows,) or (rows, 1).

    Args:
      cap: Largest squared error that counts, above 0.
      most: Largest number of rows of one user; None if the unit is a row.
      has_range: Whether labels are in [-1, 1], which is public.
    """

    def __init__(
        self, cap: float = CAP, most: int | None = None, *, has_range: bool = True
    ) -> None:
        super().__init__(cap, most)
        self._has_range = has_range

    @property
    def _shares(self) -> dict[str, float]:
        return _SHARES if self._has_range else _WITHOUT_LABELS

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
