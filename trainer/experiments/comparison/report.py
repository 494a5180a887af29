"""A comparison as a table for the terminal, for notebooks and as Markdown.

Formal guarantees:
  - Upper bounds are rounded up, and lower bounds down.
  - A line whose target is not proven says "no guarantee".
  - Values that differ between lines are in columns; common values are above the table.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.files.json_files import pretty_json
from pipelines.files.storage import write_atomically
from trainer.experiments.comparison import plot as compare_plot
from trainer.experiments.comparison.results import NO_GUARANTEE, Outcome
from trainer.report import tables

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


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes of a comparison.

    Attributes:
      outcomes: Lines of the table.
      notes: Further notes that explain the table.
      title: Title of the table.
    """

    outcomes: Sequence[Outcome]
    notes: Sequence[str] = ()
    title: str = TITLE

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the outcomes, JSON-serialisable."""
        return [dataclasses.asdict(outcome) for outcome in self.outcomes]

    def markdown(self) -> str:
        """Returns the table as Markdown, with its notes."""
        columns = _columns(self.outcomes)
        rows = [[text(outcome) for _, text, _ in columns] for outcome in self.outcomes]
        table = tables.markdown([heading for heading, _, _ in columns], rows)
        notes = "\n\n".join(self._all_notes())
        return f"# {self.title}\n\n{_in_common(self.outcomes)}\n\n{table}\n\n{notes}\n"

    def _repr_markdown_(self) -> str:
        """Returns what a notebook shows."""
        return self.markdown()

    def write(self, out: pathlib.Path) -> None:
        """Writes comparison.json, comparison.md, and a picture of each variable."""
        write_atomically(out / "comparison.json", pretty_json(self.to_json()))
        text = self.markdown()
        for axis, name in compare_plot.pictures(self.outcomes).items():
            title = f"{self.title}\n{_in_common(self.outcomes)}"
            compare_plot.plot(self.outcomes, axis, out / name, title=title)
            text += f"\n![{self.title} over {axis.words}]({name})\n"
        write_atomically(out / "comparison.md", text.encode())

    def show(self) -> None:
        """Prints the table."""
        columns = _columns(self.outcomes)
        texts = ("sampled", "batches", "method", "weights", "noise rule")
        tables.show(
            f"{self.title}\n{_in_common(self.outcomes)}",
            [heading for heading, _, _ in columns],
            ([text(outcome) for _, text, _ in columns] for outcome in self.outcomes),
            left=[i for i, (name, _, _) in enumerate(columns) if name in texts],
            notes=self._all_notes(),
        )

    def _all_notes(self) -> list[str]:
        marked = any(one.guarantee == NO_GUARANTEE for one in self.outcomes)
        return [
            "eps ≤ is proven for these batches at the noise multiplier in column "
            "noise; no proof can give less than eps ≥. The last column is for held-out "
            f"examples: {compare_plot.over_seeds(self.outcomes)}.",
            *([_LEVELS_NOTE] if any(one.sampled for one in self.outcomes) else []),
            *([_NO_GUARANTEE_NOTE] if marked else []),
            *self.notes,
            COSTS,
        ]


def _columns(outcomes: Sequence[Outcome]) -> list[_Column]:
    own = dict.fromkeys(name for one in outcomes for name in one.method_settings)
    every: list[_Column] = [
        ("sampled", lambda one: _or_dash(one.sampled), False),
        ("k", lambda one: _or_dash(one.max_examples_per_user), False),
        ("batches", lambda one: one.sampler, True),
        ("size", lambda one: f"{one.expected_batch_size:,}", False),
        ("epochs", lambda one: _or_dash(one.num_epochs), False),
        ("method", lambda one: one.method, False),
        ("rate", lambda one: f"{one.learning_rate:g}", False),
        ("clip", lambda one: _or_dash(one.l2_norm_clip), False),
        *((name, _own_setting(name), False) for name in own),
        ("weights", lambda one: one.weights, False),
        ("target", lambda one: _or_dash(one.target_epsilon), False),
        ("noise rule", noise_rule, False),
        ("noise", lambda one: _number(one.noise_multiplier), True),
        ("eps ≤", lambda one: rounded(one.epsilon, math.ceil), True),
        ("eps ≥", lambda one: rounded(one.epsilon_lower_bound, math.floor), True),
        (outcomes[0].metric.replace("_", " "), _value, True),
    ]
    return [
        (heading, text, always)
        for heading, text, always in every
        if always or len({text(outcome) for outcome in outcomes} - {"-"}) > 1
    ]


def _own_setting(name: str) -> Callable[[Outcome], str]:
    return lambda one: _or_dash(one.method_settings.get(name))


def _in_common(outcomes: Sequence[Outcome]) -> str:
    """Returns the values that all private lines share, except their noise."""
    return ", ".join(compare_plot.in_common(outcomes))


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
