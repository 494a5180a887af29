"""Pictures of comparisons: guarantees solid, lower bounds hollow or dashed."""

from __future__ import annotations

import math
from pathlib import Path

from accounting.neighboring_relation import NAMES
from accounting.planning.comparison import Answer, Point, Question
from accounting.plots import new_figure, save

_COLOR = "#31688e"
_PALETTE = ("#440154", "#31688e", "#35b779", "#d95f02", "#7570b3", "#666666")


def _interval(row: Answer) -> tuple[float | None, float | None]:
    """Returns what is proven to suffice or to hold, and what is known from below."""
    if row.noise_multiplier is not None:
        return row.noise_multiplier.sufficient, row.noise_multiplier.necessary
    assert row.epsilon is not None
    return row.epsilon.upper, row.epsilon.lower


def draw_comparison(question: Question, rows: list[Answer], path: Path) -> None:
    """Draws one bar per sampler: the noise it needs, or the epsilon it has.

    Solid: proven.  Hollow: the lower bound, where there is one that is smaller.

    Args:
      question: What was asked.
      rows: The answers.
      path: Of the picture; the suffix says the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    figure, axes = new_figure(7.0, 1.0 + 0.5 * len(rows))
    for position, row in enumerate(rows):
        proven, possible = _interval(row)
        if proven is not None and math.isfinite(proven):
            axes.barh(position, proven, color=_COLOR, height=0.6)
            axes.text(proven, position, f" {proven:.4g}", va="center")
        if possible is not None and math.isfinite(possible) and possible != proven:
            axes.plot(possible, position, marker="o", mfc="white", mec="black")
    axes.set_yticks(range(len(rows)), [row.plan.sampler for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(_caption(question) + "\nbar: proven; circle: lower bound")
    save(figure, path)


def _caption(question: Question) -> str:
    relation = NAMES[question.neighboring_relation]
    if question.epsilon is None:
        return (
            f"epsilon at noise multiplier {question.noise_multiplier:g}, "
            f"delta={question.delta:g}, {relation} relation"
        )
    return (
        f"noise multiplier for epsilon={question.epsilon:g}, "
        f"delta={question.delta:g}, {relation} relation"
    )


def draw_sweep(points: list[Point], axis: str, caption: str, path: Path) -> None:
    """Draws the noise of each sampler against the value that is varied.

    Solid lines are proven to suffice; dashed lines are necessary, and where a dashed
    line falls below Poisson's no order is proven: those values are shaded.

    Args:
      points: Of a sweep; at least one.
      axis: What was varied.
      caption: Above the picture.
      path: Of the picture; the suffix says the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    figure, axes = new_figure(7.0, 4.5)
    samplers = [row.plan.sampler for row in points[0].rows]
    values = [point.value for point in points]
    for index, sampler in enumerate(samplers):
        color = _PALETTE[index % len(_PALETTE)]
        intervals = [_interval(point.rows[index]) for point in points]
        axes.plot(values, [_or_nan(pair[0]) for pair in intervals], "o-", color=color)
        lower = [_or_nan(pair[1]) for pair in intervals]
        axes.plot(values, lower, "--", color=color, linewidth=1.2)
        axes.plot([], [], "o-", color=color, label=sampler)
    for point in points:
        if point.crossed:
            axes.axvspan(point.value / 1.1, point.value * 1.1, color="0.9")
    axes.plot([], [], "--", color="0.3", label="necessary (lower bound)")
    axes.set_xscale("linear" if axis == "epochs" else "log", **_base(axis))
    axes.set_yscale("log")
    axes.set_xlabel(axis)
    axes.set_ylabel("noise multiplier")
    axes.set_title(caption + "\nshaded: a shuffle may need less than Poisson", size=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, path)


def _base(axis: str) -> dict[str, float]:
    return {} if axis == "epochs" else {"base": 2}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value
