"""What ``dpsgd plan`` does with its flags: asks, and prints or draws the answers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from accounting import neighboring_relation, sampler_registry
from accounting import plan as plans
from accounting.cli import plan_tables, shared_options
from accounting.planning import comparison
from accounting.planning.comparison import Answer, Question, SweepPoint
from accounting.validation import InputError


def print_answers(flags: dict[str, Any]) -> None:
    """Answers one command.

    Raises:
      InputError: flags that contradict each other, or a value out of range.
    """
    question = _question(flags)
    shared_options.warn(question.delta, question.num_examples)
    plot, as_json = flags["plot"], flags["as_json"]
    if plot is not None:
        from accounting import plots  # matplotlib, for this flag alone

        plots.check_path(plot)
    if flags["sweep"] is not None:
        _sweep(question, flags)
        return
    samplers = flags["samplers"] or _supported(question, sampler_registry.names())
    rows = [comparison.answer(question, sampler) for sampler in samplers]
    if plot is not None:
        from accounting.planning import comparison_plots

        comparison_plots.draw_comparison(question, rows, plot)
    if as_json:
        click.echo(json.dumps(_to_json(question, rows), indent=2))
    else:
        plan_tables.print_table(question, rows)


def _supported(question: Question, samplers: tuple[str, ...]) -> tuple[str, ...]:
    relation = question.neighboring_relation
    # Steps that are no whole epochs are for the samplers that know none.
    steps = plans.steps_per_epoch(question.num_examples, question.expected_batch_size)
    whole = question.num_steps == question.num_epochs * steps
    supported = [
        name
        for name in samplers
        if neighboring_relation.is_supported(
            name, relation, question.max_examples_per_user
        )
        and (whole or not plans.goes_through_epochs(name))
    ]
    # If there are none, the first says why not.
    return tuple(supported) or samplers[:1]


def _sweep(question: Question, flags: dict[str, Any]) -> None:
    axis, plot = flags["sweep"], flags["plot"]
    samplers = flags["samplers"] or _supported(question, comparison.sweep_samplers())
    points = comparison.sweep(question, axis, tuple(samplers))
    if plot is not None:
        from accounting.planning import comparison_plots

        relation = neighboring_relation.NAMES[question.neighboring_relation]
        caption = f"n={question.num_examples:,}, delta={question.delta!r}, {relation}"
        comparison_plots.draw_sweep(points, axis, caption, plot)
    if flags["as_json"]:
        click.echo(json.dumps(_sweep_json(question, axis, points), indent=2))
    else:
        plan_tables.print_sweep(axis, points)


def _sweep_json(
    question: Question, axis: str, points: list[SweepPoint]
) -> dict[str, Any]:
    rows = [
        {
            "value": point.value,
            "answers": [row.to_json() for row in point.rows],
            "may_need_less_noise_than_poisson": list(point.crossed),
        }
        for point in points
    ]
    return {**_to_json(question, []), "sweep": axis, "answers": rows}


def _question(flags: dict[str, Any]) -> Question:
    if (flags["epsilon"] is None) == (flags["noise_multiplier"] is None):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    given, samplers = flags["truncated_batch_size"], flags["samplers"]
    capped = [
        n for n in sampler_registry.names() if sampler_registry.rules(n).truncates
    ]
    if given is not None and samplers and not set(capped) & set(samplers):
        raise InputError(
            f"Expected no truncated_batch_size={given} beside --sampler "
            f"{samplers[0]}: it caps {' and '.join(capped)} alone. Omit it."
        )
    num_examples, batch_size = flags["num_examples"], flags["batch_size"]
    num_steps, num_epochs = plans.steps_and_epochs(
        num_examples,
        batch_size,
        epochs=flags["epochs"],
        num_steps=flags["num_steps"],
    )
    return Question(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        num_steps=num_steps,
        num_epochs=num_epochs,
        delta=flags["delta"],
        epsilon=flags["epsilon"],
        noise_multiplier=flags["noise_multiplier"],
        truncated_batch_size=given,
        neighboring_relation=flags["relation"],
        max_examples_per_user=flags["max_examples_per_user"],
    )


def _to_json(question: Question, rows: list[Answer]) -> dict[str, Any]:
    return {
        "question": dataclasses.asdict(question),
        "neighboring_relation": question.neighboring_relation,
        "answers": [row.to_json() for row in rows],
    }
