"""Predicts a run with large batches from runs with small batches.

    OUT/b128/batches/, OUT/b128/runs/       every small batch size: see ``compare``
    OUT/simulation.json, .md, .png          the results

All runs share the number of steps, the learning rate and the noise on a mean gradient,
hence the total amount of noise (``accounting.planning.tan``).  Every run has its own
batches, initial weights and noise, as the interval of ``extrapolation`` requires; runs
that differ only in their learning rate share batches and initial weights.

Formal guarantees:
  - Batches and runs are made as in a comparison; a stopped simulation resumes with the
    same settings, as a comparison does.
  - Existing batches are used only if they have the requested plan and rows.
  - Every error that can be found early is raised before any batch is made or any row is
    read.
  - The record of every run names the configuration it simulates.
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
from collections.abc import Sequence
from typing import Any

from accounting.core import deltas
from accounting.core.plan import DpSgdPlan, steps_and_epochs
from accounting.core.validation import InputError
from accounting.planning.comparison import LARGEST_DESIGN_EPSILON, Question
from accounting.planning.tan import Configuration
from accounting.statement import PrivacyStatement
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.batch_settings import BatchSettings
from trainer.experiments.comparison.case import Trial
from trainer.experiments.comparison.runs import (
    Runs,
    Say,
    mark,
    settled,
    silent,
    training_data,
)
from trainer.model.metrics import metric_names
from trainer.papers.extrapolation import Line, fit_line
from trainer.papers.settings import LEVEL, SimulationSettings
from trainer.papers.simulation import Point, Protocol, Simulation
from trainer.papers.simulation_report import NOT_PRIVATE, report
from trainer.report.report import Report
from trainer.run import privacy
from trainer.settings.method_settings import gradients_text
from trainer.settings.train_settings import TrainSettings


def simulate(settings: SimulationSettings, say: Say = silent) -> Report:
    """Makes all small runs that are not done yet, and predicts the large one.

    Arguments and errors as for `compare`.
    """
    settings = settled(settings)
    dataset = training_data(settings)
    reference = _reference(settings, dataset)
    settings.training.check_steps(reference.plan.num_steps)
    statement = _statement(settings, reference, dataset.description)
    num_examples = reference.plan.num_examples
    if warning := deltas.warning(settings.delta, num_examples):
        say(warning)
    guaranteed = min(statement.epsilon.guarantee, LARGEST_DESIGN_EPSILON)
    protocol = Protocol(
        settings=settings,
        reference=reference,
        epsilon=settings.training.target_epsilon or guaranteed,
    )
    mark(settings)
    say(NOT_PRIVATE)
    simulator = Simulator(protocol, say)
    found = [simulator.simulate(rate) for rate in settings.learning_rates]
    return report(protocol, found, statement)


def _reference(settings: SimulationSettings, dataset: Dataset) -> Configuration:
    training = settings.training
    num_examples = dataset.num_examples
    num_steps, num_epochs = steps_and_epochs(
        num_examples,
        settings.expected_batch_size,
        epochs=settings.num_epochs,
        num_steps=settings.num_steps,
    )
    question = Question(
        num_examples=num_examples,
        expected_batch_size=settings.expected_batch_size,
        num_steps=num_steps,
        num_epochs=num_epochs,
        delta=settings.delta,
        epsilon=training.target_epsilon,
        noise_multiplier=training.noise_multiplier,
    )
    plan = question.plan(settings.sampler)
    noise = training.noise_multiplier
    if noise is None:
        assert training.target_epsilon is not None  # checked by the settings
        noise = privacy.noise_multiplier(
            plan,
            epsilon=training.target_epsilon,
            delta=settings.delta,
            description=dataset.description,
        )
    return Configuration(plan=plan, noise_multiplier=noise)


def _statement(
    settings: SimulationSettings, reference: Configuration, description: dict[str, Any]
) -> PrivacyStatement:
    training = settings.training
    return privacy.plan_statement(
        reference.plan,
        noise_multiplier=reference.noise_multiplier,
        l2_norm_clip=training.l2_norm_clip,
        delta=settings.delta,
        gradients=gradients_text(training.method, training.method_settings),
        allow_large_delta=training.allow_large_delta,
        **privacy.unit_of(description, reference.plan),
    )


class Simulator:
    """Runs the simulations of a protocol; other arguments as for ``simulate``."""

    def __init__(self, protocol: Protocol, say: Say) -> None:
        self._protocol, self._settings = protocol, protocol.settings
        self._say = say

    def simulate(self, learning_rate: float) -> Simulation:
        """Makes the small runs of one learning rate, unless they are done.

        Raises:
          InputError: batches or runs are refused, or exist with other settings.
        """
        protocol = self._protocol
        points = []
        for one in protocol.configurations:
            values = [
                self._run(one, learning_rate, seed)
                for seed in range(self._settings.seeds)
            ]
            points.append(
                Point(
                    expected_batch_size=one.plan.expected_batch_size,
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
                confidence=LEVEL,
            ),
        )

    def _run(self, one: Configuration, learning_rate: float, seed: int) -> float:
        settings, folder = self._settings, f"b{one.plan.expected_batch_size}"
        experiment = dataclasses.replace(settings, out=settings.out / folder)
        runs = Runs(experiment, self._say)
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
            simulates=stands_for(large),
        )

    def _value(self, metrics: dict[str, Any]) -> float:
        metric = self._settings.metric
        value = metrics.get(metric)
        if not isinstance(value, (int, float)):
            names = [n for n in metric_names(metrics) if metrics[n] is not None]
            raise InputError(
                f"Expected metric={metric!r} among those of held-out examples with a "
                f"value: {', '.join(names)}."
            )
        return float(value)


def _sampling(plan: DpSgdPlan) -> BatchSettings:
    return BatchSettings(
        sampler=plan.sampler,
        expected_batch_size=plan.expected_batch_size,
        num_steps=plan.num_steps,
        truncated_batch_size=plan.truncated_batch_size,
    )


def _fit(points: Sequence[Point]) -> Line:
    runs = [
        (point.expected_batch_size, value) for point in points for value in point.values
    ]
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
