"""The tables of ``dpsgd plan``.

Formal guarantees:
  - What is proven is rounded up and what is known from below is rounded down.
  - A lower bound alone is printed as no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import click
from rich.console import Console
from rich.table import Table

from accounting import neighboring_relation
from accounting.intervals import Bounds, NoiseBounds
from accounting.planning.comparison import Answer, Question, SweepPoint


def print_table(question: Question, rows: list[Answer]) -> None:
    """Prints the question and one row per sampler.

    Args:
      question: What was asked.
      rows: The answers.
    """
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
        f"{neighboring_relation.NAMES[question.neighboring_relation]} relation"
        f"{_of_users(question)}\n"
        f"n={question.num_examples:,} examples, b={question.expected_batch_size:,} "
        f"per step, T={question.num_steps:,} steps, {question.num_epochs:,} epoch(s)"
    )
    Console().print(table)


def _of_users(question: Question) -> str:
    count = question.max_examples_per_user
    return "" if count == 1 else f", users with at most {count} examples"


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
    found = row.noise_multiplier or row.epsilon
    assert found is not None
    no_guarantee = "" if _ends(found)[1] is not None else ": no guarantee"
    return _range(found), f"{found.kind}{no_guarantee}"


def _ends(found: Bounds | NoiseBounds) -> tuple[float | None, float | None]:
    """Returns what is known from below, and what is proven."""
    if isinstance(found, NoiseBounds):
        return found.necessary, found.sufficient
    return found.lower, found.upper


def _range(found: Bounds | NoiseBounds) -> str:
    lower, upper = _ends(found)
    if upper is None:
        return f">= {_rounded(lower, math.floor)}"
    if lower is None or lower >= upper * (1 - 1e-8):
        return _rounded(upper, math.ceil)
    return f"{_rounded(lower, math.floor)} .. {_rounded(upper, math.ceil)}"


def _rounded(value: float | None, side: Callable[[float], int]) -> str:
    assert value is not None
    return f"{side(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else "infinite"


def print_sweep(axis: str, points: list[SweepPoint]) -> None:
    """Prints the noise that each sampler needs at each point of a sweep.

    Args:
      axis: What was varied.
      points: At least one.
    """
    table = Table(caption="* below what Poisson needs: the order of the samplers flips")
    table.add_column(axis, justify="right")
    for row in points[0].rows:
        table.add_column(row.plan.sampler, justify="right")
    for point in points:
        cells = [
            _value_cells(row)[0] + ("*" if row.plan.sampler in point.crossed else "")
            for row in point.rows
        ]
        table.add_row(f"{point.value:g}", *cells)
    click.echo("noise multiplier: suffices, or necessary .. suffices")
    Console().print(table)
