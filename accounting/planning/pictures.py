"""Pictures of comparisons and sweeps: guarantees solid, lower bounds hollow.

Lines differ in their markers and dashes as well as in colour.  Values are drawn as the
table prints them: what is proven rounded up, lower bounds rounded down.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from accounting.core.neighboring_relation import NAMES
from accounting.planning import comparison
from accounting.planning.comparison import DELTA, NOISE, Answer, Question
from accounting.planning.sweeps import AXES, Point, Sweep
from accounting.plots import new_figure, save

_PALETTE = (
    "#440154", "#31688e", "#35b779", "#d95f02", "#7570b3", "#666666", "#e7298a",
    "#1b6f4f", "#a6761d", "#000000",
)  # fmt: skip
_MARKERS = "osD^vPX*<>"
_DASHES = ("-", (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
#: Of each power of ten, in a picture of few of them.
_TICKS = {False: (1.0, 2.0, 5.0), True: (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)}
_LOWER = {"linestyle": ":", "linewidth": 1.2, "markerfacecolor": "white"}


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draws the lines of a sweep.

    Args:
      sweep: Points of the lines.
      path: File of the picture; its suffix determines the format.
    """
    figure, axes = new_figure(9.0, 5.0)
    drawn = [_draw_line(axes, sweep, index) for index in range(len(sweep.lines))]
    handles: list[Any] = [line for line, _ in drawn]
    if any(banded for _, banded in drawn):
        handles.append(_sample(label="lower bound: no guarantee", **_LOWER, marker="o"))
        handles.append(Patch(color="0.8", label="between the bounds: not known"))
    handles += _draw_estimates(axes, sweep)
    _set_scales(axes, sweep)
    axes.set_title(sweep.title, size=10)
    figure.legend(
        handles=handles,
        loc="outside right upper",
        fontsize="small",
        handlelength=3,
        handleheight=1.2,
    )
    save(figure, path)


def _sample(**style: Any) -> Line2D:
    return Line2D([], [], color="0.3", **style)


def _draw_line(axes: Any, sweep: Sweep, index: int) -> tuple[Line2D, bool]:
    """Draws one line; of equal lines the later ones are thinner, and on top.

    Returns:
      The line of what is proven, and whether there is a band below it.
    """
    points = sweep.points[index]
    # From 1, of the first line, to 0, of the last.
    layer = 1 - index / max(1, len(sweep.lines) - 1)
    places = [_place(sweep, point) for point in points]
    style: dict[str, Any] = {
        "color": _PALETTE[index % len(_PALETTE)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 5 + 4 * layer,
    }
    proven = [_number(comparison.proven_text(point.answer)) for point in points]
    least = [
        math.nan
        if comparison.is_exact(point.answer)
        else _number(comparison.least_text(point.answer))
        for point in points
    ]
    banded = not all(map(math.isnan, least))
    [line] = axes.plot(
        places, proven, **style, label=sweep.lines[index].name.replace(", ", ",\n", 1),
        linestyle=_DASHES[index % len(_DASHES)], linewidth=1.5 + 2.5 * layer,
    )  # fmt: skip
    if banded:
        axes.fill_between(places, least, proven, color=style["color"], alpha=0.15, lw=0)
        # Hidden where it is as good as equal to what is proven.
        axes.plot(places, least, **style, **_LOWER, zorder=1.9)
    return line, banded


def _place(sweep: Sweep, point: Point) -> float:
    place = AXES[sweep.axis].read(point.question)
    assert place is not None
    return place


def _number(text: str) -> float:
    return math.nan if text in ("infinite", "unknown") else float(text)


def _draw_estimates(axes: Any, sweep: Sweep) -> list[Line2D]:
    """Draws TAN's closed form, once for all lines of one total noise."""
    points = [point for point in sweep.points[0] if point.estimate is not None]
    if not points:
        return []
    label = "TAN's closed form:\nan estimate, no guarantee"
    return list(
        axes.plot(
            [_place(sweep, point) for point in points],
            [point.estimate.epsilon for point in points if point.estimate],
            color="black", linestyle=(0, (1, 1)), linewidth=2, zorder=4, label=label,
        )
    )  # fmt: skip


def _is_linear(sweep: Sweep) -> bool:
    """Whether the axis is linear, or must be, as it shows a zero."""
    return AXES[sweep.axis].linear or sweep.values[0] <= 0


def _set_scales(axes: Any, sweep: Sweep) -> None:
    if not _is_linear(sweep):
        axes.set_xscale("log")
    axes.set_xticks(sweep.values, [_tick(value) for value in sweep.values])
    axes.xaxis.set_minor_locator(NullLocator())
    if max(len(_tick(value)) for value in sweep.values) > 4:
        axes.tick_params("x", rotation=30)
    axes.set_yscale("log")
    if sweep.asks_for != DELTA:
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=_TICKS[bool(high / low < 40)]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(AXES[sweep.axis].label)
    needed = "that suffices" if sweep.asks_for == NOISE else "that is proven"
    axes.set_ylabel(f"{sweep.asks_for} {needed}")
    axes.spines[["top", "right"]].set_visible(False)


def _tick(value: float) -> str:
    if float(value).is_integer() and value < 1e9:
        return f"{int(value):,}"
    return f"{value:g}"


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
    if known and not comparison.is_exact(row):
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
        return comparison.proven_text(row)
    return f"≥ {comparison.least_text(row)}"


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
