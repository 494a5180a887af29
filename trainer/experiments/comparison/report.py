"""A comparison as a table for the terminal, for notebooks and as Markdown.

Formal guarantees:
  - Upper bounds are rounded up, and lower bounds down.
  - A line whose target is not proven says "no guarantee".
  - Values that differ between lines are in columns; common values are above the table.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from trainer.experiments.comparison import plot
from trainer.experiments.comparison.results import NO_GUARANTEE, Outcome
from trainer.model.metrics import in_words
from trainer.report.fitness import notes_on_plain
from trainer.report.plots import over_seeds
from trainer.report.report import Report, Table
from trainer.settings.aggregation_settings import OMV
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import number_in_words

TITLE = "Ways of batching and training"
COSTS = (
    "Choosing among runs on the same data costs privacy that no statement of a single "
    "run covers."
)
_NO_GUARANTEE_NOTE = (
    "no guarantee: the target is not proven at this noise, which is optimistic or that "
    "of another sampler; eps ≤ is proven."
)
#: Columns of text, which are on the left; the first two need no name in a legend.
_TEXTS = ("batches", "method", "weights", "noise rule")
#: Variables of the plot -> columns of their values.
_COLUMN_OF = {"epsilon": "target", "batch size": "size", "epochs": "epochs"}
#: Heading -> text of a line.
_Columns = dict[str, Callable[[Outcome], str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Report):
    """The report of a comparison.

    Attributes:
      outcomes: Lines of the table.
    """

    outcomes: Sequence[Outcome]


def report(outcomes: Sequence[Outcome], notes: Sequence[str] = ()) -> Comparison:
    """Returns the report of a comparison.

    Args:
      outcomes: Lines of the table.
      notes: Further notes that explain the table.
    """
    settings = _settings(outcomes)
    columns = {**settings, **_results(outcomes)}
    axis = plot.axis_of(outcomes)
    shared = ", ".join(_in_common(outcomes))
    # Votes have few levels and a low AUC, which would compress all other lines.
    shown = [outcome for outcome in outcomes if outcome.weights != OMV]
    table = Table(
        headings=list(columns),
        rows=[[text(one) for text in columns.values()] for one in outcomes],
        left=[place for place, name in enumerate(columns) if name in _TEXTS],
    )
    return Comparison(
        stem="comparison",
        title=TITLE,
        tables=[table],
        above=[shared],
        notes=_all_notes(outcomes, notes),
        fields=[dataclasses.asdict(outcome) for outcome in outcomes],
        draw={
            "comparison.png": functools.partial(
                plot.plot, _lines(shown, axis), axis, title=f"{TITLE}\n{shared}"
            )
        },
        outcomes=outcomes,
    )


def _in_common(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns those of epsilon, delta, batch size and epochs that all lines share."""
    found = []
    for axis in plot.AXES:
        values = plot.values_of(axis, outcomes)
        if len(values) == 1:
            text = f"{axis} {plot.tick(values[0])}"
            found.append("1 epoch" if text == "epochs 1" else text)
    deltas = {outcome.delta for outcome in outcomes} - {None}
    return found + [f"delta {delta!r}" for delta in deltas]


def _lines(outcomes: Sequence[Outcome], axis: str) -> dict[str, list[Outcome]]:
    """Returns the lines of the plot over a variable: outcomes of equal settings.

    Args:
      outcomes: What to draw.
      axis: A key of ``plot.AXES``, by whose values outcomes of a line differ.
    """
    settings = {**_settings(outcomes)}
    if "noise rule" in settings:  # the plot itself marks what has no guarantee
        settings["noise rule"] = lambda one: _or_dash(one.noise_rule)
    settings.pop(_COLUMN_OF.get(axis, ""), None)
    # A rate that is chosen for each plan is no setting of its own.
    of_any_rate = {name: settings[name] for name in settings if name != "rate"}
    lines = _of_equal(outcomes, of_any_rate)
    for line in lines.values():
        if len({plot.AXES[axis](one) for one in line}) < len(line):
            return _of_equal(outcomes, settings)
    return lines


def _of_equal(
    outcomes: Sequence[Outcome], settings: _Columns
) -> dict[str, list[Outcome]]:
    """Returns the outcomes of each combination of settings, by its words."""
    found = defaultdict[str, list[Outcome]](list)
    for one in outcomes:
        texts = [
            text(one) if name in _TEXTS[:2] else f"{name} {text(one)}"
            for name, text in settings.items()
            if text(one) != "-"
        ]
        found[", ".join(texts)].append(one)
    return dict(found)


def _all_notes(outcomes: Sequence[Outcome], notes: Sequence[str]) -> list[str]:
    marked = any(one.guarantee == NO_GUARANTEE for one in outcomes)
    return [
        "eps ≤ is proven for these batches at the noise multiplier in column "
        "noise; no proof can give less than eps ≥. The columns after it are for "
        f"held-out examples: {over_seeds(outcomes[0].num_seeds)}.",
        *([_NO_GUARANTEE_NOTE] if marked else []),
        *_plain_notes(outcomes),
        *_unfit_notes(outcomes),
        *notes,
        COSTS,
    ]


def _plain_notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the notes on lines without privacy, among those of their plan."""
    plans = defaultdict[tuple[Any, ...], list[Outcome]](list)
    for one in outcomes:
        plans[_of_plan(one)].append(one)
    found: dict[str, None] = {}
    for lines in plans.values():
        plain = [one.mean for one in lines if one.method == NON_PRIVATE]
        private = [one.mean for one in lines if one.method != NON_PRIVATE]
        if plain:
            found |= dict.fromkeys(notes_on_plain(lines[0].metric, private, plain))
    return list(found)


def _of_plan(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.sampler, outcome.expected_batch_size, outcome.num_epochs


def _unfit_notes(outcomes: Sequence[Outcome]) -> list[str]:
    unfit = [one.warnings[0] for one in outcomes if one.warnings]
    return (
        [f"warning: {len(unfit)} of {len(outcomes)} lines: {unfit[0]}"] if unfit else []
    )


def _settings(outcomes: Sequence[Outcome]) -> _Columns:
    """Returns the columns of settings: the sampler, and whatever differs."""
    own = dict.fromkeys(name for one in outcomes for name in one.method_settings)
    every: _Columns = {
        "batches": lambda one: one.sampler,
        "size": lambda one: f"{one.expected_batch_size:,}",
        "epochs": lambda one: _or_dash(one.num_epochs),
        "method": lambda one: one.method,
        "rate": lambda one: number_in_words(one.learning_rate),
        "clip": lambda one: _or_dash(one.l2_norm_clip),
        **{name: _own_setting(name) for name in own},
        "weights": lambda one: one.weights,
        "target": lambda one: _or_dash(one.target_epsilon),
        "noise rule": noise_rule,
    }
    return {
        heading: text
        for heading, text in every.items()
        if heading == "batches" or len({text(one) for one in outcomes} - {"-"}) > 1
    }


def _results(outcomes: Sequence[Outcome]) -> _Columns:
    return {
        "noise": lambda one: _number(one.noise_multiplier),
        "eps ≤": lambda one: rounded(one.epsilon, math.ceil),
        "eps ≥": lambda one: rounded(one.epsilon_lower_bound, math.floor),
        in_words(outcomes[0].metric): _value,
        **{in_words(name): _other(name) for name in outcomes[0].others},
    }


def _own_setting(name: str) -> Callable[[Outcome], str]:
    return lambda one: _or_dash(one.method_settings.get(name))


def _other(name: str) -> Callable[[Outcome], str]:
    return lambda one: _number(one.others.get(name))


def noise_rule(outcome: Outcome) -> str:
    """Returns how the noise was chosen, marked if it does not guarantee the target."""
    if outcome.noise_rule is None:
        return "-"
    marked = outcome.guarantee == NO_GUARANTEE
    return outcome.noise_rule + (f": {NO_GUARANTEE}" if marked else "")


def rounded(epsilon: float | None, direction: Callable[[float], int]) -> str:
    """Returns a bound on epsilon; upper ones are rounded up, lower ones down.

    Args:
      epsilon: The bound; None if there is none.
      direction: ``math.ceil`` or ``math.floor``.
    """
    return "-" if epsilon is None else f"{direction(epsilon * 100) / 100:.2f}"


def _value(outcome: Outcome) -> str:
    spread = "" if outcome.stddev is None else f" ±{outcome.stddev:.4f}"
    return f"{outcome.mean:.4f}{spread}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _or_dash(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
