"""The results of a simulation: runs, the line through them, and the prediction.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from accounting.planning.tan import Configuration
from trainer.model.metrics import LOWER_IS_BETTER
from trainer.papers.extrapolation import Line, Prediction
from trainer.papers.settings import SimulationSettings

#: Below this p-value the report says that the points deviate from a line.
BENDS_BELOW = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """A simulation.  Public.

    Attributes:
      settings: Settings of the simulation.
      reference: Configuration of the predicted run.
      epsilon: Epsilon of the reference, for which the caps of all batches are safe.
    """

    settings: SimulationSettings
    reference: Configuration
    epsilon: float

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes of the simulated runs, in ascending order."""
        return sorted(self.settings.small_batch_sizes)

    @property
    def configurations(self) -> list[Configuration]:
        """The configuration of each small batch size."""
        return [
            self.reference.simulated(
                size, epsilon=self.epsilon, delta=self.settings.delta
            )
            for size in self.batch_sizes
        ]

    @property
    def cost(self) -> float:
        """Expected examples of all simulated runs over those of one reference run."""
        runs = len(self.settings.learning_rates) * self.settings.seeds
        return runs * sum(self.batch_sizes) / self.reference.plan.expected_batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Runs that differ only in their seed.

    Attributes:
      expected_batch_size: Expected batch size.
      noise_multiplier: Noise multiplier of the runs.
      values: Metric of each seed.
    """

    expected_batch_size: int
    noise_multiplier: float
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def stddev(self) -> float | None:
        """Sample standard deviation; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """Results for one learning rate.

    Attributes:
      learning_rate: Learning rate of all runs.
      points: One for each small batch size.
      line: Line through all their runs.
      prediction: Prediction for one run of the reference.
    """

    learning_rate: float
    points: tuple[Point, ...]
    line: Line
    prediction: Prediction

    @property
    def bends(self) -> bool:
        """Whether the points deviate significantly from a line."""
        found = self.line.lack_of_fit
        return found is not None and found < BENDS_BELOW

    @property
    def predicted(self) -> str:
        """The prediction with its interval, in words."""
        found = self.prediction
        return f"{found.mean:.4f} predicted ({found.lower:.4f} to {found.upper:.4f})"

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, without an epsilon."""
        points = [
            {
                **dataclasses.asdict(one),
                "is_private": False,
                "mean": one.mean,
                "stddev": one.stddev,
            }
            for one in self.points
        ]
        return {**dataclasses.asdict(self), "points": points}


def best(simulations: Sequence[Simulation], metric: str) -> Simulation:
    """Returns the simulation whose predicted metric is best.

    Args:
      simulations: One for each learning rate.
      metric: Name of the metric, which decides whether larger or smaller is better.
    """
    sign = _sign(metric)
    return max(simulations, key=lambda one: sign * one.prediction.mean)


def best_simulated(simulations: Sequence[Simulation], metric: str) -> Simulation:
    """Returns the simulation that is best at the largest of the small sizes.

    If the metric deviates from a line, ``best`` may choose the learning rate that is
    worst at small sizes; this function does not extrapolate.  Arguments as for `best`.
    """
    sign = _sign(metric)
    return max(simulations, key=lambda one: sign * one.points[-1].mean)


def _sign(metric: str) -> int:
    return -1 if metric in LOWER_IS_BETTER else 1
