"""From the settings of a simulation to its report.

Formal guarantees:
  - Every error that can be found early is raised before any batch is made or any row is
    read.
  - The privacy statement is the accountant's, for the reference run alone.

Public: what the runs publish; see ``simulation``.
"""

from __future__ import annotations

from typing import Any

from accounting.core import deltas
from accounting.core.plan import steps_and_epochs
from accounting.core.statement import PrivacyStatement
from accounting.core.validation import check_choice
from accounting.planning.comparison import LARGEST_DESIGN_EPSILON, Question
from accounting.planning.tan import Configuration
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.batch_settings import MAKE_BATCHES
from trainer.experiments.comparison.runs import Say, settled, silent, training_data
from trainer.model.metrics import VOTE_METRICS
from trainer.papers.settings import SimulationSettings
from trainer.papers.simulation import Protocol, Simulator, best
from trainer.papers.simulation_report import NOT_PRIVATE, report
from trainer.report.report import Report
from trainer.run import privacy
from trainer.settings.aggregation_settings import OMV
from trainer.settings.comparison_settings import AUTO_METRIC, LAST
from trainer.settings.method_settings import gradients_text
from trainer.settings.train_settings import AUTO_LOSS


def simulate(
    settings: SimulationSettings, say: Say = silent, make_batches: str = MAKE_BATCHES
) -> Report:
    """Makes all small runs that are not done yet, and predicts the large one.

    Arguments and errors as for `compare`.
    """
    _check_weights(settings)
    settings = settled(settings)
    _check_weights(settings)
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
    say(NOT_PRIVATE)
    simulator = Simulator(protocol, say, make_batches)
    found = [simulator.simulate(rate) for rate in settings.learning_rates]
    if settings.run_reference:
        chosen = best(found, settings.metric)
        found[found.index(chosen)] = simulator.run_reference(chosen)
    return report(protocol, found, statement)


def _check_weights(settings: SimulationSettings) -> None:
    """Refuses weights that will not have the metric, if that is known yet."""
    training = settings.training
    tasks = list(VOTE_METRICS) if training.loss == AUTO_LOSS else [training.task]
    of_votes = {AUTO_METRIC, *(name for task in tasks for name in VOTE_METRICS[task])}
    has_votes = settings.metric in of_votes
    averages = [name for name in training.average_names if name != OMV or has_votes]
    check_choice(
        "weights",
        settings.weights,
        (LAST, *averages),
        remedy="`dpsgd train --help` names the flags that make averages.",
    )


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
