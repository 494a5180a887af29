"""``dpsgd plan``: what each way of making batches costs, before any work starts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from accounting import accountant, neighboring_relation
from accounting import plan as plans
from accounting.cli import registered, shared_options
from accounting.validation import InputError

if TYPE_CHECKING:
    from accounting.planning.comparison import Answer, Point, Question


@click.command(name="plan")
@shared_options.num_examples("Slots of the data set.", required=True)
@shared_options.batch_size(
    "Expected examples of a step; gradients are divided by it.", required=True
)
@shared_options.epochs("Rounds over the data.")
@shared_options.num_steps("Steps in all, instead of whole epochs of n/b steps.")
@shared_options.epsilon("Target; the answer is the noise.")
@shared_options.noise_multiplier("Given noise; the answer is epsilon.")
@shared_options.delta("Well below 1/num-examples.", required=True)
@click.option(
    "--sampler",
    "samplers",
    multiple=True,
    type=registered.SAMPLER,
    help="One or more; all by default.",
)
@click.option(
    "--relation",
    type=click.Choice(neighboring_relation.RELATIONS, case_sensitive=False),
    default=neighboring_relation.REPLACE_SPECIAL,
    show_default=True,
    help="Which data sets are neighbours; the default is zero-out.",
)
@shared_options.truncated_batch_size(
    "Cap on the examples of a step, or the least that costs nothing."
)
@click.option(
    "--sweep",
    type=click.Choice(("batch-size", "epsilon", "epochs")),
    help="Vary one thing, and show where the order of the samplers flips.",
)
@shared_options.as_json
@shared_options.plot("Also draw it, e.g. a.png.")
def plan_command(**flags: Any) -> None:
    """Noise (or epsilon) of each way of making batches, side by side.

    Answers are for the zero-out relation: an example is replaced by a ghost that
    contributes zero.  For others, samplers that are not accounted for are left out, or
    refused if asked for.  A lower bound is no guarantee and is never shown as one.

    \b
    Example, one epoch of 36.8 million examples at epsilon 5:
      dpsgd plan --num-examples 36800000 --batch-size 65536 --epochs 1 \\
          --epsilon 5 --delta 2.7e-8
    """
    from accounting.planning import comparison

    question = _question(flags)
    shared_options.warn(question.delta, question.num_examples)
    if flags["plot"] is not None:
        from accounting import plots

        plots.check_path(flags["plot"])
    if flags["sweep"] is not None:
        _sweep(question, flags)
        return
    samplers = flags["samplers"] or _supported(question, accountant.samplers())
    rows = [comparison.answer(question, sampler) for sampler in samplers]
    if flags["plot"] is not None:
        from accounting import plots

        plots.draw_comparison(question, rows, flags["plot"])
    if flags["as_json"]:
        click.echo(json.dumps(_to_json(question, rows), indent=2))
    else:
        _print_table(question, rows)


def _supported(question: Question, samplers: tuple[str, ...]) -> tuple[str, ...]:
    relation = question.neighboring_relation
    # Steps that are no whole epochs are for the samplers that know none.
    steps = plans.steps_per_epoch(question.num_examples, question.expected_batch_size)
    whole = question.num_steps == question.num_epochs * steps
    supported = [
        name
        for name in samplers
        if neighboring_relation.is_supported(name, relation)
        and (whole or not plans.goes_through_epochs(name))
    ]
    # If there are none, the first says why not.
    return tuple(supported) or samplers[:1]


def _sweep(question: Question, flags: dict[str, Any]) -> None:
    from accounting.planning import comparison

    axis = flags["sweep"]
    samplers = flags["samplers"] or _supported(question, comparison.SWEEP_SAMPLERS)
    points = comparison.sweep(question, axis, tuple(samplers))
    if flags["plot"] is not None:
        from accounting import plots

        relation = neighboring_relation.NAMES[question.neighboring_relation]
        caption = f"n={question.num_examples:,}, delta={question.delta!r}, {relation}"
        plots.draw_sweep(points, axis, caption, flags["plot"])
    if flags["as_json"]:
        click.echo(json.dumps(_sweep_json(question, axis, points), indent=2))
    else:
        _print_sweep(axis, points)


def _sweep_json(question: Question, axis: str, points: list[Point]) -> dict[str, Any]:
    rows = [
        {
            "value": point.value,
            "answers": [row.to_json() for row in point.rows],
            "may_need_less_noise_than_poisson": list(point.crossed),
        }
        for point in points
    ]
    return {**_to_json(question, []), "sweep": axis, "answers": rows}


def _print_sweep(axis: str, points: list[Point]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="* below what Poisson needs: the order of the samplers flips")
    table.add_column(axis, justify="right")
    for row in points[0].rows:
        table.add_column(row.plan.sampler, justify="right")
    for point in points:
        cells = [
            _range(row) + ("*" if row.plan.sampler in point.crossed else "")
            for row in point.rows
        ]
        table.add_row(f"{point.value:g}", *cells)
    click.echo("noise multiplier: suffices, or necessary .. suffices")
    Console().print(table)


def _range(row: Answer) -> str:
    noise = row.noise_multiplier
    assert noise is not None
    if noise.sufficient is None:
        return f">= {_rounded(noise.necessary, math.floor)}"
    return _both(noise.necessary, noise.sufficient)


def _question(flags: dict[str, Any]) -> Question:
    from accounting.planning.comparison import Question

    if (flags["epsilon"] is None) == (flags["noise_multiplier"] is None):
        raise InputError("Expected exactly one of --epsilon and --noise-multiplier.")
    given, samplers = flags["truncated_batch_size"], flags["samplers"]
    if given is not None and samplers and plans.TRUNCATED_POISSON not in samplers:
        raise InputError(
            f"Expected no truncated_batch_size={given} beside --sampler "
            f"{samplers[0]}: it caps {plans.TRUNCATED_POISSON} alone. Omit it."
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
    )


def _to_json(question: Question, rows: list[Answer]) -> dict[str, Any]:
    import dataclasses

    return {
        "question": dataclasses.asdict(question),
        "neighboring_relation": question.neighboring_relation,
        "answers": [row.to_json() for row in rows],
    }


def _print_table(question: Question, rows: list[Answer]) -> None:
    from rich.console import Console
    from rich.table import Table

    noise = question.epsilon is not None
    target = (
        f"epsilon={question.epsilon!r}"
        if noise
        else f"noise multiplier {question.noise_multiplier!r}"
    )
    table = Table()
    table.add_column("sampler", no_wrap=True)
    table.add_column("noise" if noise else "epsilon", justify="right", no_wrap=True)
    table.add_column("bound")
    table.add_column("truncated at", justify="right")
    table.add_column("padding", justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    click.echo(
        f"{target}, delta={question.delta!r}, "
        f"{neighboring_relation.NAMES[question.neighboring_relation]} relation\n"
        f"n={question.num_examples:,} examples, b={question.expected_batch_size:,} "
        f"per step, T={question.num_steps:,} steps, {question.num_epochs:,} epoch(s)"
    )
    Console().print(table)


def _cells(row: Answer) -> list[str]:
    size = row.plan.truncated_batch_size
    padding = row.padding
    return [
        row.plan.sampler,
        *_value_cells(row),
        "" if size is None else f"{size:,}",
        "" if padding is None else f"{padding:.1%}",
    ]


def _value_cells(row: Answer) -> tuple[str, str]:
    if row.noise_multiplier is not None:
        noise = row.noise_multiplier
        if noise.sufficient is None:
            return (
                f">= {_rounded(noise.necessary, math.floor)}",
                f"{noise.kind}: no guarantee",
            )
        return _both(noise.necessary, noise.sufficient), noise.kind
    assert row.epsilon is not None
    if row.epsilon.upper is None:
        return (
            f">= {_rounded(row.epsilon.lower, math.floor)}",
            f"{row.epsilon.kind}: no guarantee",
        )
    return _both(row.epsilon.lower, row.epsilon.upper), row.epsilon.kind


def _both(lower: float | None, upper: float) -> str:
    # What is proven is rounded up, what is known from below is rounded down.
    if lower is None or lower >= upper * (1 - 1e-8):
        return _rounded(upper, math.ceil)
    return f"{_rounded(lower, math.floor)} .. {_rounded(upper, math.ceil)}"


def _rounded(value: float | None, side: Callable[[float], int]) -> str:
    assert value is not None
    return f"{side(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else "infinite"
