"""A comparison as a table for the terminal, as Markdown, and as a plot."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipelines.batches.manifest import pretty_json, write_atomically
from trainer.experiments.compare import Outcome
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
        f"mean and standard deviation over {outcomes[0].num_seeds} seeds."
    )


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
    """Draws the metric over the proven epsilon: a panel for each way of training.

    Colours are the weights that were evaluated, bars one standard deviation, dashed
    lines the runs without privacy on the same kind of batches.  Where nothing is proven
    the point stands at the epsilon that no proof can go below.  Majority votes are in
    the table alone.

    Args:
      outcomes: Lines of the table.
      path: Where the PNG goes.
      title: Above the panels.
    """
    # Votes have few levels, and an AUC so low that it would flatten all other lines.
    shown = [outcome for outcome in outcomes if outcome.weights != OMV]
    panels = list(dict.fromkeys(_panel(o) for o in shown if _place(o) is not None))
    panels = panels or [_panel(shown[0])]
    figure = Figure(figsize=(2.5 + 3.2 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, shown)
    axes[0].set_ylabel(f"held-out {outcomes[0].metric.replace('_', ' ')}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.suptitle(title)
    write_png(figure, path)


def _panel(outcome: Outcome) -> tuple[str, str]:
    return outcome.method, outcome.sampler


def _place(outcome: Outcome) -> float | None:
    bound = outcome.epsilon
    return bound if bound is not None else outcome.epsilon_lower_bound


def _draw_panel(axes: Any, panel: tuple[str, str], shown: Sequence[Outcome]) -> None:
    lines: dict[str, list[Outcome]] = {}
    for outcome in shown:
        lines.setdefault(outcome.weights, [])
        if _panel(outcome) == panel and _place(outcome) is not None:
            lines[outcome.weights].append(outcome)
        elif outcome.sampler == panel[1] and _place(outcome) is None:
            color = f"C{list(lines).index(outcome.weights)}"
            axes.axhline(outcome.mean, color=color, linestyle="--", linewidth=1)
    for index, (weights, points) in enumerate(lines.items()):
        # A little apart, so that bars at one epsilon do not hide each other.
        shift = 1.02 ** (index - (len(lines) - 1) / 2)
        axes.errorbar(
            [(_place(point) or 0.0) * shift for point in points],
            [point.mean for point in points],
            yerr=[point.stddev or 0.0 for point in points],
            color=f"C{index}", marker="o", markersize=4, capsize=2, label=weights,
        )  # fmt: skip
    places = {round(p, 2) for o in shown if _panel(o) == panel and (p := _place(o))}
    if places:
        axes.set_xscale("log")
        axes.set_xticks(sorted(places), [f"{value:g}" for value in sorted(places)])
        axes.minorticks_off()
    axes.set_xlabel("proven epsilon")
    axes.set_title(f"{panel[0]}, {panel[1]}", fontsize="medium")
    axes.grid(alpha=0.3)
