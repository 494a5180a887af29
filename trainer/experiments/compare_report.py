"""A comparison as a table for the terminal, as Markdown, and as a plot."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accounting.plots import new_figure
from pipelines.batches.manifest import pretty_json, write_atomically
from trainer.experiments.compare import Outcome
from trainer.model.metrics import in_words
from trainer.report import tables
from trainer.report.plots import write_png
from trainer.settings.aggregation_settings import OMV

_HEADINGS = ("batches", "method", "weights", "noise", "eps ≤", "eps ≥")


def _cells(outcome: Outcome) -> list[str]:
    spread = "" if outcome.stddev is None else f" ±{outcome.stddev:.4f}"
    noise = outcome.noise_multiplier
    return [
        outcome.sampler,
        outcome.method,
        outcome.weights,
        "-" if noise is None else f"{noise:.4f}",
        _rounded(outcome.epsilon, math.ceil),
        _rounded(outcome.epsilon_lower_bound, math.floor),
        f"{outcome.mean:.4f}{spread}",
    ]


def _rounded(epsilon: float | None, direction: Callable[[float], int]) -> str:
    # What is proven stays proven: upper bounds are rounded up, lower bounds down.
    return "-" if epsilon is None else f"{direction(epsilon * 100) / 100:.2f}"


def _headings(outcomes: Sequence[Outcome]) -> list[str]:
    return [*_HEADINGS, outcomes[0].metric.replace("_", " ")]


def _note(outcomes: Sequence[Outcome]) -> str:
    return (
        "eps ≤ is proven for these batches at the noise multiplier in the column "
        "noise; no proof can go below eps ≥.  The last column is of held-out examples: "
        f"{_over_seeds(outcomes)}."
    )


def _over_seeds(outcomes: Sequence[Outcome]) -> str:
    count = outcomes[0].num_seeds
    return "1 seed" if count == 1 else f"mean and standard deviation over {count} seeds"


def markdown(outcomes: Sequence[Outcome], *, title: str, picture: str) -> str:
    """Returns the table as Markdown, with a link to the plot.

    Args:
      outcomes: Lines of the table.
      title: Above it.
      picture: File of the plot, beside that of the table.
    """
    table = tables.markdown(_headings(outcomes), map(_cells, outcomes))
    return f"# {title}\n\n{table}\n\n{_note(outcomes)}\n\n![{title}]({picture})\n"


def write(
    outcomes: Sequence[Outcome], out: pathlib.Path, *, title: str
) -> list[dict[str, Any]]:
    """Writes comparison.json, comparison.md and comparison.png; returns the first.

    Args:
      outcomes: Lines of the table.
      out: Folder of the files.
      title: Of table and plot.
    """
    fields = [dataclasses.asdict(outcome) for outcome in outcomes]
    write_atomically(out / "comparison.json", pretty_json(fields))
    plot(outcomes, out / "comparison.png", title=title)
    text = markdown(outcomes, title=title, picture="comparison.png")
    write_atomically(out / "comparison.md", text.encode())
    return fields


def show(outcomes: Sequence[Outcome], *, title: str) -> None:
    """Prints the table.

    Args:
      outcomes: Lines of the table.
      title: Above it.
    """
    tables.show(
        title,
        _headings(outcomes),
        map(_cells, outcomes),
        left=range(3),
        notes=[_note(outcomes)],
    )


def plot(outcomes: Sequence[Outcome], path: pathlib.Path, *, title: str) -> None:
    """Draws the metric over epsilon: a panel for each way of training.

    Colours are the weights that were evaluated, bars one standard deviation, dashed
    lines the runs without privacy on the same kind of batches.  Where nothing is proven
    the point is hollow, at the epsilon that no proof can go below.  Majority votes are
    in the table alone.

    Args:
      outcomes: Lines of the table.
      path: Of the PNG.
      title: One line above the plot.
    """
    # Votes have few levels, and an AUC so low that it would flatten all other lines.
    shown = [outcome for outcome in outcomes if outcome.weights != OMV]
    panels = list(dict.fromkeys(_panel(o) for o in shown if _place(o) is not None))
    panels = panels or [_panel(shown[0])]
    figure, found = new_figure(2.5 + 3.2 * len(panels), 4.5, columns=len(panels))
    axes = np.atleast_1d(found)
    for axis, panel in zip(axes, panels, strict=True):
        axis.sharey(axes[0])
        axis.label_outer()
        _draw_panel(axis, panel, shown)
    axes[0].set_ylabel(f"held-out {in_words(outcomes[0].metric)}")
    _add_legend(figure, axes)
    figure.suptitle(f"{title}\n{_over_seeds(outcomes)}", fontsize="medium")
    write_png(figure, path)


def _add_legend(figure: Any, axes: Any) -> None:
    """Names everything that stands in one of the panels, once."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found, loc="outside right upper", fontsize="small")


def _panel(outcome: Outcome) -> tuple[str, str]:
    return outcome.method, outcome.sampler


def _place(outcome: Outcome) -> float | None:
    bound = outcome.epsilon
    return bound if bound is not None else outcome.epsilon_lower_bound


def _draw_panel(axes: Any, panel: tuple[str, str], shown: Sequence[Outcome]) -> None:
    weights = list(dict.fromkeys(outcome.weights for outcome in shown))
    for index, name in enumerate(weights):
        # A little apart, so that bars at one epsilon do not hide each other.
        shift = 1.02 ** (index - (len(weights) - 1) / 2)
        of = [outcome for outcome in shown if outcome.weights == name]
        points = [o for o in of if _panel(o) == panel and _place(o) is not None]
        _draw_points(axes, points, f"C{index}", shift)
        for outcome in of:
            if outcome.sampler == panel[1] and _place(outcome) is None:
                label = f"{name}, {outcome.method}"
                axes.axhline(
                    outcome.mean, color=f"C{index}", ls="--", lw=1, label=label
                )
    _set_ticks(axes, [outcome for outcome in shown if _panel(outcome) == panel])
    axes.set_xlabel("epsilon")
    axes.set_title(f"{panel[0]}, {panel[1]}", fontsize="medium")
    axes.grid(alpha=0.3)


def _draw_points(
    axes: Any, points: Sequence[Outcome], color: str, shift: float
) -> None:
    for proven in (True, False):
        some = [point for point in points if (point.epsilon is not None) == proven]
        if some:
            spread = [point.stddev or 0.0 for point in some]
            label = some[0].weights + ("" if proven else ", epsilon not proven")
            axes.errorbar(
                [(_place(point) or 0.0) * shift for point in some],
                [point.mean for point in some],
                yerr=spread if any(spread) else None,
                color=color, marker="o", markersize=4, capsize=2,
                fillstyle="full" if proven else "none", label=label,
            )  # fmt: skip


def _set_ticks(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """Marks the epsilons of a panel, rounded as in the table."""
    ticks = {}
    for outcome in outcomes:
        place = _place(outcome)
        if place:
            upper = outcome.epsilon is not None
            text = _rounded(place, math.ceil if upper else math.floor)
            ticks[text if upper else f"≥ {text}"] = place
    if ticks:
        axes.set_xscale("log")
        axes.set_xticks(list(ticks.values()), list(ticks))
        axes.minorticks_off()
