"""Pictures of comparisons: guarantees solid, lower bounds hollow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from accounting.core.neighboring_relation import NAMES
from accounting.planning import rounding
from accounting.planning.comparison import Answer, Question
from accounting.plots import new_figure, save

_COLOR = "#31688e"


def draw_comparison(question: Question, rows: list[Answer], path: Path) -> None:
    """Draws one bar per sampler: the noise it needs, or the epsilon it has.

    Numbers are rounded as in the table: what is proven up, lower bounds down.

    Args:
      question: What was asked.
      rows: The answers, from top to bottom.
      path: File of the picture; its suffix determines the format.
    """
    figure, axes = new_figure(7.0, 1.5 + 0.5 * len(rows))
    for position, row in enumerate(rows):
        _draw_answer(axes, position, row)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.set_xlim(left=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(_caption(question))
    _add_legend(figure, axes, loc="outside lower center", ncols=2)
    save(figure, path)


def _draw_answer(axes: Any, position: int, row: Answer) -> None:
    """Draws a bar up to what is proven, and a circle at a lower bound beneath it."""
    proven, possible = row.proven, row.least
    if proven is not None and math.isfinite(proven):
        axes.barh(position, proven, color=_COLOR, height=0.6, label="proven")
    known = possible is not None and math.isfinite(possible)
    if known and not rounding.is_exact(row):
        axes.plot(
            possible, position, "o", mfc="white", mec="black", label="lower bound"
        )
    ends = [each for each in (proven, possible) if each and math.isfinite(each)]
    # Beside the circle, where that is at the end of the bar.
    axes.annotate(
        _text(row), (max(ends, default=0.0), position), (7, 0),
        textcoords="offset points", va="center",
    )  # fmt: skip


def _text(row: Answer) -> str:
    if row.proven is not None or row.least is None:
        return rounding.proven_text(row)
    return f"≥ {rounding.least_text(row)}"


def _caption(question: Question) -> str:
    given = f"noise multiplier {question.noise_multiplier}"
    if question.noise_multiplier is None:
        given = f"epsilon={question.epsilon}"
    relation = NAMES[question.neighboring_relation]
    return (
        f"{question.asks_for} at {given}, delta={question.delta}, {relation} relation\n"
        f"{question.schedule}"
    )


def _add_legend(figure: Any, axes: Any, **where: Any) -> None:
    """Adds a line for each label, outside of the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found, **where)
