"""A comparison as a table for the terminal, as Markdown, and as a plot."""

from __future__ import annotations

import io
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pipelines.manifest import write_atomically
from trainer.compare import Outcome

_HEADINGS = ("batches", "method", "weights", "noise", "eps ≤", "eps ≥")


def _cells(outcome: Outcome) -> list[str]:
    spread = "" if outcome.stddev is None else f" ±{outcome.stddev:.3f}"
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
    """Returns the table as Markdown, with a link to the plot."""
    rows = [_headings(outcomes), *map(_cells, outcomes)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    table = "\n".join(lines)
    return f"# {title}\n\n{table}\n\n{_note(outcomes)}\n\n![{title}]({picture})\n"


def show(outcomes: Sequence[Outcome], *, title: str) -> None:
    """Prints the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title,
        padding=(0, 1, 0, 0),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, heading in enumerate(_headings(outcomes)):
        justify: Literal["left", "right"] = "left" if index < 3 else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console = Console()
    console.print(table)
    console.print(_note(outcomes), highlight=False)


def plot(outcomes: Sequence[Outcome], path: pathlib.Path, *, title: str) -> None:
    """Draws the metric over the proven epsilon: a line per way of training.

    Runs without privacy are horizontal lines; bars are one standard deviation.  Where
    nothing is proven the point stands at the epsilon that no proof can go below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        lines.setdefault(_label(outcome), []).append(outcome)
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(lines.items()):
        # A little apart, so that bars at one epsilon do not hide each other.
        shift = 1.004 ** (index - len(lines) / 2)
        _draw(axes, label, points, color=f"C{index % 10}", shift=shift)
    _describe_axes(axes, outcomes)
    axes.set_title(title)
    figure.legend(loc="outside right upper", fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def _label(outcome: Outcome) -> str:
    return f"{outcome.method}, {outcome.weights}, {outcome.sampler}"


def _place(outcome: Outcome) -> float | None:
    bound = outcome.epsilon
    return bound if bound is not None else outcome.epsilon_lower_bound


def _draw(
    axes: Any, label: str, points: Sequence[Outcome], *, color: str, shift: float
) -> None:
    placed = [(place, p) for p in points if (place := _place(p)) is not None]
    if not placed:
        axes.axhline(points[0].mean, color=color, linestyle="--", label=label)
        return
    axes.errorbar(
        [place * shift for place, _ in placed],
        [point.mean for _, point in placed],
        yerr=[point.stddev or 0.0 for _, point in placed],
        color=color, marker="o", markersize=4, capsize=3, label=label,
    )  # fmt: skip


def _describe_axes(axes: Any, outcomes: Sequence[Outcome]) -> None:
    places = {round(p, 2) for o in outcomes if (p := _place(o)) is not None}
    if places:
        axes.set_xscale("log")
        axes.set_xticks(sorted(places), [f"{value:g}" for value in sorted(places)])
        axes.minorticks_off()
    axes.set_xlabel("proven epsilon")
    axes.set_ylabel(f"held-out {outcomes[0].metric.replace('_', ' ')}")
    axes.grid(alpha=0.3)
