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

from trainer.experiments.comparison import plot as compare_plot
from trainer.experiments.comparison.results import NO_GUARANTEE, Outcome
from trainer.model.metrics import in_words
from trainer.report.fitness import notes_on_plain
from trainer.report.plots import over_seeds
from trainer.report.report import Report, Table
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
_LEVELS_NOTE = (
    "eps is for a user, of whom at most k rows are kept. Users and rows are sampled "
    "with the same probability."
)

#: Heading, text of a line, and whether to show the column if all lines are equal.
_Column = tuple[str, Callable[[Outcome], str], bool]


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
    columns = _columns(outcomes)
    texts = ("sampled", "batches", "method", "weights", "noise rule")
    shared = ", ".join(compare_plot.in_common(outcomes))
    table = Table(
        headings=[heading for heading, _, _ in columns],
        rows=[[text(outcome) for _, text, _ in columns] for outcome in outcomes],
        left=[i for i, (name, _, _) in enumerate(columns) if name in texts],
    )
    return Comparison(
        stem="comparison",
        title=TITLE,
        tables=[table],
        above=[shared],
        notes=_all_notes(outcomes, notes),
        fields=[dataclasses.asdict(outcome) for outcome in outcomes],
        draw={
            name: functools.partial(
                compare_plot.plot, outcomes, axis, title=f"{TITLE}\n{shared}"
            )
            for axis, name in compare_plot.pictures(outcomes).items()
        },
        outcomes=outcomes,
    )


def _all_notes(outcomes: Sequence[Outcome], notes: Sequence[str]) -> list[str]:
    marked = any(one.guarantee == NO_GUARANTEE for one in outcomes)
    return [
        "eps ≤ is proven for these batches at the noise multiplier in column "
        "noise; no proof can give less than eps ≥. The columns after it are for "
        f"held-out examples: {over_seeds(outcomes[0].num_seeds)}.",
        *([_LEVELS_NOTE] if any(one.sampled for one in outcomes) else []),
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
    return (
        outcome.sampler, outcome.expected_batch_size, outcome.num_epochs,
        outcome.sampled, outcome.max_examples_per_user,
    )  # fmt: skip


def _unfit_notes(outcomes: Sequence[Outcome]) -> list[str]:
    unfit = [one.warnings[0] for one in outcomes if one.warnings]
    return (
        [f"warning: {len(unfit)} of {len(outcomes)} lines: {unfit[0]}"] if unfit else []
    )


def _columns(outcomes: Sequence[Outcome]) -> list[_Column]:
    own = dict.fromkeys(name for one in outcomes for name in one.method_settings)
    every: list[_Column] = [
        ("sampled", lambda one: _or_dash(one.sampled), False),
        ("k", lambda one: _or_dash(one.max_examples_per_user), False),
        ("batches", lambda one: one.sampler, True),
        ("size", lambda one: f"{one.expected_batch_size:,}", False),
        ("epochs", lambda one: _or_dash(one.num_epochs), False),
        ("method", lambda one: one.method, False),
        ("rate", lambda one: number_in_words(one.learning_rate), False),
        ("clip", lambda one: _or_dash(one.l2_norm_clip), False),
        *((name, _own_setting(name), False) for name in own),
        ("weights", lambda one: one.weights, False),
        ("target", lambda one: _or_dash(one.target_epsilon), False),
        ("noise rule", noise_rule, False),
        ("noise", lambda one: _number(one.noise_multiplier), True),
        ("eps ≤", lambda one: rounded(one.epsilon, math.ceil), True),
        ("eps ≥", lambda one: rounded(one.epsilon_lower_bound, math.floor), True),
        (in_words(outcomes[0].metric), _value, True),
        *((in_words(name), _other(name), True) for name in outcomes[0].others),
    ]
    return [
        (heading, text, always)
        for heading, text, always in every
        if always or len({text(outcome) for outcome in outcomes} - {"-"}) > 1
    ]


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
