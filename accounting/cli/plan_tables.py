"""The tables of ``dpsgd plan``.

Formal guarantees:
  - What is proven is rounded up, and lower bounds are rounded down.
  - A lower bound alone is printed as no guarantee.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from accounting.core import neighboring_relation
from accounting.core.intervals import upper_text
from accounting.planning import comparison, sweeps, tuning
from accounting.planning.comparison import NOISE, Answer, Question
from accounting.planning.sweeps import Sweep
from accounting.planning.tuning import Price, Tuning


def print_table(question: Question, rows: list[Answer]) -> None:
    """Prints the question, and a table with a row for each answer.

    Args:
      question: The question.
      rows: Its answers, one for each line of the table.
    """
    noise = question.asks_for == NOISE
    table = Table()
    table.add_column("sampler", no_wrap=True)
    table.add_column("noise" if noise else "epsilon", justify="right", no_wrap=True)
    table.add_column("bound")
    truncated = any(row.padding is not None for row in rows)
    if truncated:
        table.add_column("truncated at", justify="right")
        table.add_column("padding", justify="right")
    for row in rows:
        table.add_row(*(_cells(row) if truncated else _cells(row)[:3]))
    each = "" if question.of_runs == 1 else ", in each run"
    print(f"{_claim(question)}\n{question.schedule}{each}")
    Console(markup=False).print(table)


_RELEASED = {
    tuning.ONE: "one run",
    tuning.ALL: "all {runs} runs",
    tuning.BEST: "the best of a secret number of runs, {mean:.1f} expected",
}


def print_prices(question: Question, asked: Tuning, prices: list[Price]) -> None:
    """Prints what tuning costs.

    Args:
      question: The question.
      asked: The runs.
      prices: One for each mode.
    """
    at_noise = question.noise_multiplier is not None
    table = Table()
    table.add_column("what is released")
    table.add_column("epsilon" if at_noise else "noise", justify="right")
    for price in prices:
        mean = 1.0 if price.runs is None else price.runs.mean
        value = price.epsilon if at_noise else price.noise_multiplier
        released = _RELEASED[price.mode].format(runs=asked.num_runs, mean=mean)
        table.add_row(released, upper_text(value))
    print(f"{_claim(question)}, {asked.plan.sampler}\n{question.schedule}")
    Console(markup=False).print(table)
    print(
        f"The secret number tries a candidate of the best tenth as surely as "
        f"{asked.num_runs} runs do ({1 - 0.9**asked.num_runs:.0%}).  Every run has its "
        "own batches and keys, and scores are of other rows, public or with noise.  "
        "Runs on rows that the released one does not use cost it nothing."
    )


def in_words(row: Answer) -> str:
    """Returns the name and the value of a row, as one line."""
    value, bound = _value_cells(row)
    return f"{row.name}: {row.asked} {value} ({bound})"


def _claim(question: Question) -> str:
    target = f"noise multiplier {question.noise_multiplier!r}"
    if question.asks_for == NOISE:
        target = f"epsilon={question.epsilon!r}"
    relation = neighboring_relation.NAMES[question.neighboring_relation]
    count = question.max_examples_per_user
    users = "" if count == 1 else f", users with at most {count} examples"
    runs = "" if question.of_runs == 1 else f", of {question.of_runs} runs together"
    return f"{target}, delta={question.delta!r}, {relation} relation{users}{runs}"


def _cells(row: Answer) -> list[str]:
    size = row.plan.truncated_batch_size
    padding = row.padding
    return [
        row.name,
        *_value_cells(row),
        "" if size is None else f"{size:,}",
        "" if padding is None else f"{padding:.1%}",
    ]


def _value_cells(row: Answer) -> tuple[str, str]:
    no_guarantee = "" if row.proven is not None else ": no guarantee"
    return _range(row), f"{row.bounds.kind}{no_guarantee}"


def _range(row: Answer) -> str:
    if row.proven is None:
        return f">= {comparison.least_text(row)}"
    if row.least is None or comparison.is_exact(row):
        return comparison.proven_text(row)
    return f"{comparison.least_text(row)} .. {comparison.proven_text(row)}"


def print_sweep(sweep: Sweep) -> None:
    """Prints the bounds of each line at each value.

    Args:
      sweep: The bounds.
    """
    print(sweep.title)
    Console(markup=False).print(_sweep_table(sweep))
    if sweep.points[0][0].estimate is not None:
        print(
            "TAN: the closed form of epsilon, an estimate and no guarantee. Below "
            f"noise multiplier {sweeps.LEAST_NOISE:g} the true epsilon may be far "
            "larger."
        )


def _sweep_table(sweep: Sweep) -> Table:
    estimated = sweep.points[0][0].estimate is not None
    table = Table()
    table.add_column(sweep.axis, justify="right", overflow="fold")
    table.add_column("line", overflow="fold")
    table.add_column(sweep.asks_for, justify="right", no_wrap=True)
    if estimated:
        table.add_column("TAN", justify="right", no_wrap=True)
    for place, value in enumerate(sweep.values):
        number = comparison.swept_text(value)
        for line, points in zip(sweep.lines, sweep.points, strict=True):
            point = points[place]
            cells = [number, line.name, _range(point.answer)]
            if point.estimate is not None:
                cells.append(f"{point.estimate.epsilon:.4f}")
            table.add_row(*cells)
    return table
