"""Predicts a run with large batches from runs with small batches.

    OUT/b128/batches/, OUT/b128/runs/       every small batch size: see ``compare``
    OUT/reference/batches/, ...runs/        the large batch size, if it is trained
    OUT/simulation.json, .md, .png          the results

All runs share the number of steps, the learning rate and the noise on a mean gradient,
hence the total amount of noise (``accounting.planning.tan``).  Every run has its own
batches, initial weights and noise, as the interval of ``extrapolation`` requires; runs
that differ only in their learning rate share batches and initial weights.

Formal guarantees:
  - Batches and runs are made as in a comparison; a stopped simulation resumes with the
    same settings, as a comparison does.
  - Existing batches are used only if they have the requested plan.
  - The record of every run except the reference names the configuration it simulates.
  - No epsilon of a small run is reported: ``Simulation`` has only the reference's,
    which is the accountant's.

Public: what the runs publish, if the data is public.  A small run has almost no noise:
on private data it is a release that must be accounted for, and so is the choice among
runs.

References:
  Sander, Stock and Sablayrolles (2023), arXiv:2210.03403, Section 4.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from accounting.planning.tan import Configuration
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.experiments.comparison.case import Trial
from trainer.experiments.comparison.runs import Runs, Say
from trainer.model.metrics import LOWER_IS_BETTER, metric_names
from trainer.papers.extrapolation import Line, Prediction, fit_line
from trainer.papers.settings import SimulationSettings
from trainer.settings.comparison_settings import LAST
from trainer.settings.train_settings import TrainSettings

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
      batch_size: Expected batch size.
      noise_multiplier: Noise multiplier of the runs.
      values: Metric of each seed.
    """

    batch_size: int
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
      actual: Metric of that run, if it was made.
    """

    learning_rate: float
    points: tuple[Point, ...]
    line: Line
    prediction: Prediction
    actual: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the interval contains the reference run; None if there is none."""
        return None if self.actual is None else self.actual in self.prediction

    @property
    def bends(self) -> bool:
        """Whether the points deviate significantly from a line."""
        found = self.line.lack_of_fit
        return found is not None and found < BENDS_BELOW


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


def undecided(simulations: Sequence[Simulation], metric: str) -> list[Simulation]:
    """Returns the simulations whose interval overlaps with that of the best.

    Arguments as for `best`.
    """
    chosen = best(simulations, metric)
    found = chosen.prediction
    return [
        one
        for one in simulations
        if one is not chosen
        and one.prediction.lower <= found.upper
        and found.lower <= one.prediction.upper
    ]


class Simulator:
    """Runs the simulations of a protocol; other arguments as for ``simulate``."""

    def __init__(
        self,
        protocol: Protocol,
        say: Say,
        make_batches: str = MAKE_BATCHES,
    ) -> None:
        self._protocol, self._settings = protocol, protocol.settings
        self._say, self._make = say, make_batches

    def simulate(self, learning_rate: float) -> Simulation:
        """Makes the small runs of one learning rate, unless they are done.

        Raises:
          InputError: batches or runs are refused, or exist with other settings.
        """
        protocol = self._protocol
        points = []
        for one in protocol.configurations:
            values = [
                self._run(one, f"b{one.plan.expected_batch_size}", learning_rate, seed)
                for seed in range(self._settings.seeds)
            ]
            points.append(
                Point(
                    batch_size=one.plan.expected_batch_size,
                    noise_multiplier=one.noise_multiplier,
                    values=tuple(values),
                )
            )
        line = _fit(points)
        return Simulation(
            learning_rate=learning_rate,
            points=tuple(points),
            line=line,
            prediction=line.predict(
                protocol.reference.plan.expected_batch_size,
                confidence=self._settings.confidence,
            ),
        )

    def run_reference(self, found: Simulation) -> Simulation:
        """Makes one run of the reference, unless it is done, and adds its metric."""
        reference = self._protocol.reference
        actual = self._run(reference, "reference", found.learning_rate, 0)
        return dataclasses.replace(found, actual=actual)

    def _run(
        self, one: Configuration, folder: str, learning_rate: float, seed: int
    ) -> float:
        settings = self._settings
        experiment = dataclasses.replace(settings, out=settings.out / folder)
        runs = Runs(experiment, self._say, self._make)
        training = self._training(one, learning_rate, seed)
        sampler = one.plan.sampler
        trial = Trial(
            name=f"{sampler}-{training.method}-seed{seed}-lr{learning_rate:g}",
            batches=f"{sampler}-seed{seed}",
            settings=training,
        )
        runs.make_batches(trial.batches, _sampling(one.plan), one.plan)
        self._say(f"{folder}: {trial.name}")
        return self._value(runs.run(trial)["metrics"])

    def _training(
        self, one: Configuration, learning_rate: float, seed: int
    ) -> TrainSettings:
        large = self._protocol.reference
        return dataclasses.replace(
            self._settings.training,
            target_epsilon=None,
            noise_multiplier=one.noise_multiplier,
            learning_rate=learning_rate,
            # Distinct for each size and seed, since no size exceeds the reference's.
            init_seed=init_seed(one, large, seed),
            simulates="" if one == large else stands_for(large),
        )

    def _value(self, metrics: dict[str, Any]) -> float:
        settings = self._settings
        found = {LAST: metrics, **metrics["aggregates"]}
        if settings.weights not in found:
            raise InputError(
                f"Expected weights={settings.weights!r} among those that the runs "
                f"have: {', '.join(found)}. `dpsgd train --help` names the averages."
            )
        value = found[settings.weights].get(settings.metric)
        if not isinstance(value, (int, float)):
            raise InputError(
                f"Expected metric={settings.metric!r} among those of held-out examples "
                f"with a value: {', '.join(_names(found[settings.weights]))}."
            )
        return float(value)


def _sampling(plan: DpSgdPlan) -> BatchSettings:
    return BatchSettings(
        sampler=plan.sampler,
        expected_batch_size=plan.expected_batch_size,
        num_steps=plan.num_steps,
        truncated_batch_size=plan.truncated_batch_size,
    )


def _names(metrics: dict[str, Any]) -> list[str]:
    return [name for name in metric_names(metrics) if metrics[name] is not None]


def _fit(points: Sequence[Point]) -> Line:
    runs = [(point.batch_size, value) for point in points for value in point.values]
    return fit_line([size for size, _ in runs], [value for _, value in runs])


def init_seed(one: Configuration, reference: Configuration, seed: int) -> int:
    """Returns the seed of the initial weights, distinct for each size and repetition.

    Args:
      one: Configuration of the run, with a batch size up to the reference's.
      reference: Configuration of the predicted run.
      seed: Index of the repetition.
    """
    large = reference.plan.expected_batch_size
    return one.plan.expected_batch_size + seed * large


def stands_for(reference: Configuration) -> str:
    """Returns the text that the record of a small run has as ``simulates``.

    Example:
      >>> from accounting.core.plan import DpSgdPlan
      >>> plan = DpSgdPlan(sampler="poisson", num_examples=5000,
      ...                  expected_batch_size=1024, num_steps=50)
      >>> stands_for(Configuration(plan=plan, noise_multiplier=2.5))
      'expected_batch_size=1024, noise_multiplier=2.5'
    """
    return (
        f"expected_batch_size={reference.plan.expected_batch_size}, "
        f"noise_multiplier={reference.noise_multiplier!r}"
    )
