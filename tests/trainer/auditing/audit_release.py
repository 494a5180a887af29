"""Compares the releases of a small run with those that its batches imply.

The clipped gradient of every canary is known (see ``audit_model``).  The contributions
of the canaries in a release's batches are subtracted from the change of the weights.
The residual must be noise of a known standard deviation, which ``residuals`` tests.

Formal guarantees:
  - The only inputs are the weights that the run released, its batches and its canaries.
  - If the batches are trained on as the mechanism says, with independent noise of the
    claimed deviation, the checks are those of independent standard normal values, up to
    the rounding of float32.

Public: everything, since nobody's data is in it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipelines.batches.folder import read_batches
from tests.trainer.auditing import audit_model
from tests.trainer.auditing.audit_model import CANARY, LARGE, LARGE_DIM, LAYERS
from tests.trainer.auditing.residuals import (
    Check,
    contributions,
    correlations,
    deviations,
    repetitions,
)  # fmt: skip

#: Number of ranges of the large table whose noise is tested separately.
_NUM_SLICES = 8
#: Number of values per layer whose noise is compared with other layers and releases.
_COMPARED = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canaries:
    """The canaries in the data of a small run.

    Attributes:
      is_real: For each canary, whether it is real or a ghost.
    """

    is_real: np.ndarray

    def __len__(self) -> int:
        return len(self.is_real)

    @property
    def directions(self) -> np.ndarray:
        """Unit gradients of real canaries, shape (canaries, layers)."""
        return audit_model.directions(len(self))

    def project(self, change: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the change of the weights along the gradient of each canary."""
        numbers = np.arange(1, len(self) + 1)
        own = [
            change[layer][audit_model.places(layer, numbers, len(self))]
            for layer in LAYERS
        ]
        return np.sum(np.stack(own, 1) * self.directions, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The canaries of one physical batch.

    Attributes:
      step: Step of the batch.
      canaries: Canary of every row, without padding.
      padded: Whether it has padding.
    """

    step: int
    canaries: np.ndarray
    padded: bool


def read_contents(folder: pathlib.Path) -> list[Contents]:
    """Returns the canaries in each physical batch."""
    return [
        Contents(
            step=batch.step,
            canaries=batch.columns[CANARY][batch.weight > 0],
            padded=bool(np.any(batch.weight == 0)),
        )
        for batch in read_batches(folder)
    ]


class _Sums(NamedTuple):
    """The sum of residuals, or of their squares, and their number, for each group."""

    totals: list[float]
    counts: list[int]

    def add(self, total: float, count: int) -> None:
        """Adds a group with ``total`` and ``count``, see `_Sums`."""
        self.totals.append(total)
        self.counts.append(count)

    def add_squares(self, values: np.ndarray) -> None:
        known = values[~np.isnan(values)]
        self.add(float(np.sum(known**2)), len(known))


class ReleaseChecks:
    """Checks the releases of one run in order.

    Args:
      canaries: Canaries in its data.
      batches: Physical batches in order.
      noise: Standard deviation of the noise of a release, in clip norms.
      steps_per_release: Number of steps per release.
      looks_within: Whether the noise of a table is compared with itself at every
        offset, which takes as long as several steps.
    """

    def __init__(
        self,
        canaries: Canaries,
        batches: Sequence[Contents],
        *,
        noise: float,
        steps_per_release: int,
        looks_within: bool,
    ) -> None:
        self._canaries, self._looks_within = canaries, looks_within
        self._noise = noise
        self._releases = [
            list(found)
            for _, found in itertools.groupby(
                batches, lambda batch: batch.step // steps_per_release
            )
        ]
        self._num_added = 0
        shape = (audit_model.num_kinds(), len(LAYERS))
        self._of_kinds, self._num_of_kinds = np.zeros(shape), np.zeros(shape)
        self._of_padding = np.zeros(len(LAYERS))
        self._of_batches, self._noise_of_layers = _Sums([], []), _Sums([], [])
        self._noise_of_slices = [_Sums([], []) for _ in range(_NUM_SLICES)]
        self._noise_of_reads = _Sums([], [])
        self._compared: list[np.ndarray] = []
        self._repeated: list[Check] = []

    def add(self, change: Mapping[str, np.ndarray]) -> None:
        """Adds the next release: by what each layer changes, in clip norms."""
        assert all(np.all(np.isfinite(change[layer])) for layer in LAYERS)
        batches = self._releases[self._num_added]
        self._num_added += 1
        residuals = {
            layer: change[layer].astype(np.float64) / self._noise for layer in LAYERS
        }
        self._add_contributions(residuals, batches)
        for layer in LAYERS:
            self._add_noise(residuals[layer])
        self._add_large(residuals[LARGE], batches)

    def _places(self, layer: str, canaries: np.ndarray) -> np.ndarray:
        return audit_model.places(layer, canaries, len(self._canaries))

    def _add_contributions(
        self, residuals: dict[str, np.ndarray], batches: list[Contents]
    ) -> None:
        """Also replaces the residuals of the canaries in the batches by NaN."""
        size = len(self._canaries)
        times = np.bincount(
            np.concatenate([batch.canaries for batch in batches]), minlength=size + 1
        )[1:]
        real = np.flatnonzero(times * self._canaries.is_real)
        shares = self._canaries.directions[real]
        excess = np.empty(shares.shape)
        for column, layer in enumerate(LAYERS):
            self._of_padding[column] += residuals[layer][0]
            places = self._places(layer, real + 1)
            expected = times[real] * shares[:, column] / self._noise
            excess[:, column] = residuals[layer][places] - expected
            residuals[layer][places] = np.nan
        kinds = (real + 1) % audit_model.num_kinds()
        np.add.at(self._of_kinds, kinds, excess * np.sign(shares))
        np.add.at(self._num_of_kinds, kinds, 1)
        along = np.zeros(size + 1)
        along[real + 1] = np.sum(excess * shares, 1)
        for batch in batches:
            there = np.unique(batch.canaries)
            count = np.sum(self._canaries.is_real[there - 1])
            self._of_batches.add(float(np.sum(along[there])), int(count))

    def _add_noise(self, values: np.ndarray) -> None:
        self._noise_of_layers.add_squares(values)
        self._compared.append(np.nan_to_num(values[:_COMPARED]))

    def _add_large(self, values: np.ndarray, batches: list[Contents]) -> None:
        for sums, found in zip(
            self._noise_of_slices, np.array_split(values, _NUM_SLICES), strict=True
        ):
            sums.add_squares(found)
        rows = values.reshape(-1, LARGE_DIM)
        read = [self._places(LARGE, batch.canaries) // LARGE_DIM for batch in batches]
        padded = any(batch.padded for batch in batches)
        distinct = np.unique(np.concatenate([*read, np.zeros(int(padded), np.int64)]))
        self._noise_of_reads.add_squares(rows[distinct])
        if self._looks_within and not self._repeated:
            halves = np.array_split(np.nan_to_num(values), 2)
            self._repeated.append(repetitions("noise repeated within a table", *halves))

    def results(self) -> list[Check]:
        """Returns all checks of the releases so far."""
        added = functools.partial(contributions, noise=self._noise)
        of_slices = [
            [sum(each) for each in part]
            for part in zip(*self._noise_of_slices, strict=True)
        ]
        times = np.full(len(LAYERS), self._num_added)
        return [
            deviations("noise of each layer in each release", *self._noise_of_layers),
            deviations("noise of each range of a table", *of_slices),
            deviations("noise of rows that are read", *self._noise_of_reads),
            correlations("noise shared by layers or releases", self._compared),
            *self._repeated,
            added("excess that each batch adds", *self._of_batches),
            added(
                "excess of canaries in each layer", self._of_kinds, self._num_of_kinds
            ),
            added("excess that padding adds", self._of_padding, times),
        ]
