"""Runs with small batches that tell how one with large batches will do.

    OUT/b128/batches/, OUT/b128/runs/       of every small batch size: see ``compare``
    OUT/reference/batches/, ...runs/        of the large one, if it is trained
    OUT/simulation.json, .md, .png          the answer, for machines, people and eyes

All runs have the steps, the learning rate and the noise of a mean gradient in common,
hence the total amount of noise (``accounting.planning.tan``).  Every run has batches,
initial weights and noise of its own, on which the interval of ``extrapolation`` relies;
runs that differ in their learning rate alone share batches and initial weights.

Formal guarantees:
  - Batches and runs are made as those of a comparison; a simulation that was stopped
    goes on with the same settings, as a comparison does.
  - Batches that are found are taken only if they are of the plan that is asked for.
  - The record of every run but the reference says what the run stands for.
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

from accounting.plan import DpSgdPlan
from accounting.planning.tan import Configuration
from accounting.validation import InputError
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.experiments.comparison.case import Trial
from trainer.experiments.comparison.runs import Runs, Say
from trainer.experiments.extrapolation import Line, Prediction, fit_line
from trainer.model.metrics import metric_names
from trainer.settings.comparison_settings import LAST, SimulationSettings
from trainer.settings.train_settings import TrainSettings

#: Held-out metrics of which less is better; of all others more is.
LOWER_IS_BETTER = ("log_loss", "loss")
#: Below this p-value the points are said to bend.
BENDS_BELOW = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is simulated, and how.  All public.

    Attributes:
      settings: What was asked for.
      reference: What is to be predicted.
      epsilon: Of the reference; the caps of all batches are safe for it.
    """

    settings: SimulationSettings
    reference: Configuration
    epsilon: float

    @property
    def batch_sizes(self) -> list[int]:
        """Of the simulated runs, in ascending order."""
        return sorted(self.settings.small_batch_sizes)

    @property
    def configurations(self) -> list[Configuration]:
        """One for each small batch size."""
        return [
            self.reference.simulated(
                size, epsilon=self.epsilon, delta=self.settings.delta
            )
            for size in self.batch_sizes
        ]

    @property
    def cost(self) -> float:
        """Examples that all simulated runs expect, over those of one reference run."""
        runs = len(self.settings.learning_rates) * self.settings.seeds
        return runs * sum(self.batch_sizes) / self.reference.plan.expected_batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Runs that differ in their seed alone.

    Attributes:
      batch_size: Expected examples of a step.
      noise_multiplier: Of the runs.
      values: The metric of each seed.
    """

    batch_size: int
    noise_multiplier: float
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def stddev(self) -> float | None:
        """Sample standard deviation; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came out for one learning rate.

    Attributes:
      learning_rate: Of all runs.
      points: One for each small batch size.
      line: Through all their runs.
      prediction: Of one run of the reference.
      actual: The metric of that run, if it was made.
    """

    learning_rate: float
    points: tuple[Point, ...]
    line: Line
    prediction: Prediction
    actual: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the interval holds the reference run; None if that was not made."""
        return None if self.actual is None else self.actual in self.prediction

    @property
    def bends(self) -> bool:
        """Whether the points speak against a line."""
        found = self.line.lack_of_fit
        return found is not None and found < BENDS_BELOW


def best(simulations: Sequence[Simulation], metric: str) -> Simulation:
    """Returns the simulation whose predicted metric is best.

    Args:
      simulations: One for each learning rate.
      metric: Its name, which says whether more or less is better.
    """
    sign = _sign(metric)
    return max(simulations, key=lambda one: sign * one.prediction.mean)


def best_simulated(simulations: Sequence[Simulation], metric: str) -> Simulation:
    """Returns the simulation whose runs with the largest of the small sizes are best.

    Where the metric bends away from its line, ``best`` may choose the learning rate
    that is worst at small sizes; this does not extrapolate.

    Args:
      simulations: One for each learning rate.
      metric: Its name, which says whether more or less is better.
    """
    sign = _sign(metric)
    return max(simulations, key=lambda one: sign * one.points[-1].mean)


def _sign(metric: str) -> int:
    return -1 if metric in LOWER_IS_BETTER else 1


def undecided(simulations: Sequence[Simulation], metric: str) -> list[Simulation]:
    """Returns those whose interval overlaps with that of the best.

    Args:
      simulations: One for each learning rate.
      metric: Its name, which says whether more or less is better.
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
    """Carries out a protocol.

    Args:
      protocol: What to do.
      say: Takes a line of progress.
      make_batches: As in ``comparison.runs.Runs``.
    """

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
          InputError: batches or runs were refused, or made before with other settings.
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
            # Of its own for each size and seed: a size is at most the reference's.
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
    """Returns the seed of the initial weights: no two sizes or repetitions share it.

    Args:
      one: Whose runs it is for; of a batch size at most that of the reference.
      reference: The run that is predicted.
      seed: Which repetition.
    """
    large = reference.plan.expected_batch_size
    return one.plan.expected_batch_size + seed * large


def stands_for(reference: Configuration) -> str:
    """Returns what the record of a small run says.

    Example:
      >>> from accounting.plan import DpSgdPlan
      >>> plan = DpSgdPlan(sampler="poisson", num_examples=5000,
      ...                  expected_batch_size=1024, num_steps=50)
      >>> stands_for(Configuration(plan=plan, noise_multiplier=2.5))
      'expected_batch_size=1024, noise_multiplier=2.5'
    """
    return (
        f"expected_batch_size={reference.plan.expected_batch_size}, "
        f"noise_multiplier={reference.noise_multiplier!r}"
    )
