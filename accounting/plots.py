"""Matplotlib figures without pyplot: of trade-offs and sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from accounting import comparison
from accounting.comparison import AXES, DELTA, NOISE, Answer, Sweep
from accounting.core.validation import InputError
from accounting.trade_off import TradeOff, percent_up

_PROVEN = "#31688e"
_LEAST = 1e-6


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
    """Refuses a path that ``save`` cannot write to, before a figure is drawn.

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


def save(figure: Any, path: Path) -> None:
    """Writes ``figure`` in the format of the path's suffix.

    Args:
      figure: A result of `new_figure`.
      path: Where to write; an existing file is replaced.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    check_path(path)
    figure.savefig(path, dpi=150)


def draw_trade_off(found: TradeOff, title: str, path: Path) -> None:
    """Draws the largest true positive rate over the false positive rate, twice.

    Args:
      found: The trade-off that `trade_off.trade_off` returned.
      title: Title of the picture.
      path: File of the picture; its suffix determines the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    figure, (left, right) = new_figure(9.6, 4.8, columns=2)
    axes_rates = (left, np.linspace(0, 1, 401)), (right, np.geomspace(_LEAST, 1, 401))
    for axes, rates in axes_rates:
        most = [found.true_positive_rate(float(rate)) for rate in rates]
        axes.plot(rates, most, color=_PROVEN, label="the best test, at most")
        axes.fill_between(
            rates, most, 1, color=_PROVEN, alpha=0.15, lw=0, label="impossible"
        )
        axes.plot(rates, rates, ":", color="0.5", label="mere guessing")
        axes.set_ylabel("true positive rate: used rows called used")
    left.set(xlim=(0, 1), ylim=(0, 1), title="all tests")
    ends = {"xlim": (_LEAST, 1), "ylim": (_LEAST, 1)}
    right.set(xscale="log", yscale="log", title="tests that accuse few", **ends)
    advantage = f"membership advantage at most {percent_up(found.advantage)}"
    figure.suptitle(f"{title}\n{advantage}", size=10)
    for axes in (left, right):
        axes.set_xlabel("false positive rate: unused rows called used")
        axes.spines[["top", "right"]].set_visible(False)
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3)
    save(figure, path)


# -- sweeps: guarantees solid, lower bounds hollow

_PALETTE = (
    "#440154", "#31688e", "#35b779", "#d95f02", "#7570b3", "#666666", "#e7298a",
    "#1b6f4f", "#a6761d", "#000000",
)  # fmt: skip
_MARKERS = "osD^vPX*<>"
_DASHES = ("-", (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
#: Of each power of ten, in a picture of few of them.
_TICKS = {False: (1.0, 2.0, 5.0), True: (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)}


def draw_sweep(sweep: Sweep, path: Path, *, tan: bool = False) -> None:
    """Draws the lines of a sweep, with the numbers as the table prints them.

    Lines differ in their markers and dashes as well as in colour; of equal lines the
    later ones are thinner, and on top.

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
        places = [_place(sweep, answer) for answer in answers]
        proven = [_number(answer.proven_text) for answer in answers]
        axes.plot(
            places, proven, **style, label=line.name.replace(", ", ",\n", 1),
            linestyle=_DASHES[index % len(_DASHES)], linewidth=1.5 + 2.5 * layer,
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
        places = [_place(sweep, answer) for answer in sweep.answers[0]]
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
    save(figure, path)


def _place(sweep: Sweep, answer: Answer) -> float:
    return float(getattr(answer.question, AXES[sweep.axis].field))


def _number(text: str) -> float:
    return math.nan if text in ("infinite", "unknown") else float(text)


def _set_scales(axes: Any, sweep: Sweep) -> None:
    # An axis that shows a zero must be linear.
    if not AXES[sweep.axis].linear and sweep.values[0] > 0:
        axes.set_xscale("log")
    ticks = [f"{value:,.7g}" if value < 1e9 else f"{value:g}" for value in sweep.values]
    axes.set_xticks(sweep.values, ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    if max(map(len, ticks)) > 4:
        axes.tick_params("x", rotation=30)
    axes.set_yscale("log")
    if sweep.asks_for != DELTA:
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=_TICKS[bool(high / low < 40)]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(AXES[sweep.axis].label)
    needed = "that suffices" if sweep.asks_for == NOISE else "that is proven"
    axes.set_ylabel(f"{sweep.asks_for} {needed}")
    axes.spines[["top", "right"]].set_visible(False)
