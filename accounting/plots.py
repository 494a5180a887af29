"""Matplotlib figures without pyplot: the picture of a sweep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from accounting import comparison
from accounting.comparison import NOISE, Sweep
from accounting.core.validation import InputError


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure and its axes; an array of axes if there are several.

    Args:
      width: Width in inches.
      height: Height in inches.
      columns: Number of axes, side by side.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def check_path(path: Path) -> None:
    """Refuses a path that no figure can be written to, before a figure is drawn.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    if not path.parent.is_dir():
        raise InputError(
            f"Expected the folder of plot={str(path)!r} to exist. Create it first."
        )
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        known = ", ".join(sorted(formats))
        raise InputError(f"Expected plot={str(path)!r} to end in one of {known}.")


# -- sweeps: guarantees solid, lower bounds hollow

_PALETTE = (
    "#440154", "#31688e", "#35b779", "#d95f02", "#7570b3", "#666666", "#e7298a",
    "#1b6f4f", "#a6761d", "#000000",
)  # fmt: skip
_MARKERS = "osD^vPX*<>"


def draw_sweep(sweep: Sweep, path: Path, *, tan: bool = False) -> None:
    """Draws the lines of a sweep, with the numbers as the table prints them.

    Lines differ in their markers as well as in colour; of equal lines the later ones
    are thinner, and on top.

    Args:
      sweep: Answers of the lines.
      path: File of the picture; its suffix determines the format.
      tan: Whether to draw TAN's closed form, once for all lines of one total noise.
    """
    figure, axes = new_figure(9.0, 5.0)
    for index, (line, answers) in enumerate(
        zip(sweep.lines, sweep.answers, strict=True)
    ):
        layer = 1 - index / max(1, len(sweep.lines) - 1)
        style: dict[str, Any] = {
            "color": _PALETTE[index % len(_PALETTE)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "markersize": 5 + 4 * layer,
        }
        places = [sweep.value(answer) for answer in answers]
        proven = [_number(answer.proven_text) for answer in answers]
        axes.plot(
            places, proven, **style, label=line.name.replace(", ", ",\n", 1),
            linewidth=1.5 + 2.5 * layer,
        )  # fmt: skip
        least = [math.nan if a.is_exact else _number(a.least_text) for a in answers]
        if not all(map(math.isnan, least)):
            axes.fill_between(places, least, proven, color=style["color"], alpha=0.15)
            # Hidden where it is as good as equal to what is proven.
            axes.plot(
                places, least, ":", **style, markerfacecolor="white", zorder=1.9,
                label="lower bound: no guarantee,\nbetween the bounds nothing is known",
            )  # fmt: skip
    if tan:
        places = [sweep.value(answer) for answer in sweep.answers[0]]
        estimates = [comparison.tan_epsilon(answer) for answer in sweep.answers[0]]
        label = "TAN's closed form:\nan estimate, no guarantee"
        axes.plot(places, estimates, "k:", linewidth=2, zorder=4, label=label)
    _set_scales(axes, sweep)
    axes.set_title(sweep.title, size=10)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels[::-1], handles[::-1], strict=True))
    figure.legend(
        [once[label] for label in dict.fromkeys(labels)], list(dict.fromkeys(labels)),
        loc="outside right upper", fontsize="small", handlelength=3,
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def _number(text: str) -> float:
    return math.nan if text in ("infinite", "unknown") else float(text)


def _set_scales(axes: Any, sweep: Sweep) -> None:
    # An axis that shows a zero must be linear.
    if sweep.values[0] > 0:
        axes.set_xscale("log")
    ticks = [f"{value:,.7g}" if value < 1e9 else f"{value:g}" for value in sweep.values]
    axes.set_xticks(sweep.values, ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    if max(map(len, ticks)) > 4:
        axes.tick_params("x", rotation=30)
    axes.set_yscale("log")
    axes.set_xlabel(sweep.axis.replace("-", " "))
    needed = "that suffices" if sweep.asks_for == NOISE else "that is proven"
    axes.set_ylabel(f"{sweep.asks_for} {needed}")
    axes.spines[["top", "right"]].set_visible(False)
