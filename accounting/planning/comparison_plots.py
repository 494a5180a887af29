"""Pictures of comparisons: guarantees solid, lower bounds hollow or dashed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from accounting.neighboring_relation import NAMES
from accounting.planning.comparison import Answer, Question, SweepPoint
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

    Numbers are rounded as in the table: what is proven up, lower bounds down.

    Args:
      question: What was asked.
      rows: The answers, from top to bottom.
      path: Of the picture; the suffix says the format.
    """
    figure, axes = new_figure(7.0, 1.5 + 0.5 * len(rows))
    for position, row in enumerate(rows):
        _draw_answer(axes, position, *_interval(row))
    axes.set_yticks(range(len(rows)), [row.plan.sampler for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.set_xlim(left=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(_caption(question))
    _add_legend(figure, axes, loc="outside lower center", ncols=2)
    save(figure, path)


def _draw_answer(
    axes: Any, position: int, proven: float | None, possible: float | None
) -> None:
    """Draws a bar up to what is proven, and a circle at a lower bound beneath it."""
    if proven is not None and math.isfinite(proven):
        axes.barh(position, proven, color=_COLOR, height=0.6, label="proven")
    known = possible is not None and math.isfinite(possible)
    if known and not _coincide(proven, possible):
        axes.plot(
            possible, position, "o", mfc="white", mec="black", label="lower bound"
        )
    ends = [each for each in (proven, possible) if each and math.isfinite(each)]
    # Beside the circle, where that is at the end of the bar.
    axes.annotate(
        _text(proven, possible), (max(ends, default=0.0), position), (7, 0),
        textcoords="offset points", va="center",
    )  # fmt: skip


def _coincide(proven: float | None, possible: float | None) -> bool:
    """Whether two bounds differ by roundings alone."""
    if proven is None or possible is None:
        return False
    return possible >= proven * (1 - 1e-8)


def _text(proven: float | None, possible: float | None) -> str:
    if proven is not None:
        infinite = not math.isfinite(proven)
        return "infinite" if infinite else f"{math.ceil(proven * 1e4) / 1e4:.4f}"
    return (
        "unknown" if possible is None else f"≥ {math.floor(possible * 1e4) / 1e4:.4f}"
    )


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


def draw_sweep(points: list[SweepPoint], axis: str, caption: str, path: Path) -> None:
    """Draws the noise of each sampler against the value that is varied.

    Solid lines are proven to suffice; dashed lines are necessary, and where a dashed
    line falls below Poisson's no order is proven: those values are shaded.  Of samplers
    that need the same the lines are inside each other.

    Args:
      points: From left to right.
      axis: Name of the value that is varied.
      caption: Above the picture.
      path: Of the picture; the suffix says the format.
    """
    figure, axes = new_figure(9.0, 4.5)
    values = [point.value for point in points]
    num_samplers = len(points[0].rows)
    for index in range(num_samplers):
        rows = [point.rows[index] for point in points]
        _draw_line(axes, values, rows, index, layer=num_samplers - 1 - index)
    shaded = "not proven: a shuffle may\nneed less than Poisson"
    for point in points:
        if point.crossed:
            ends = point.value / 1.1, point.value * 1.1
            axes.axvspan(*ends, color="0.9", zorder=0, label=shaded)
    _set_scales(axes, axis, values)
    axes.set_title(caption, size=10)
    _add_legend(figure, axes, loc="outside right upper", fontsize="small")
    save(figure, path)


def _draw_line(
    axes: Any, values: list[float], rows: list[Answer], index: int, *, layer: int
) -> None:
    """Draws one sampler; of equal lines those on a lower layer are on top."""
    color, name = _PALETTE[index % len(_PALETTE)], rows[0].plan.sampler
    pairs = [_interval(row) for row in rows]
    axes.plot(
        values, [_or_nan(proven) for proven, _ in pairs], "o-", color=color, label=name,
        linewidth=1.5 + 2 * layer, markersize=4 + 2.5 * layer,
    )  # fmt: skip
    lower = [
        math.nan if _coincide(proven, possible) else _or_nan(possible)
        for proven, possible in pairs
    ]
    if not all(map(math.isnan, lower)):
        label = f"{name},\nnecessary (lower bound)"
        # Above the solid lines, to which it may be close.
        axes.plot(values, lower, "--", color=color, lw=1.2, zorder=3, label=label)


def _set_scales(axes: Any, axis: str, values: list[float]) -> None:
    axes.set_xscale("linear" if axis == "epochs" else "log", **_base(axis))
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.set_ylabel("noise multiplier")
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Any, axes: Any, **where: Any) -> None:
    """Adds a line for each label, outside of the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found, **where)


def _base(axis: str) -> dict[str, float]:
    return {} if axis == "epochs" else {"base": 2}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value
