"""Pictures of privacy answers.  Guarantees are solid, lower bounds are hollow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accounting.validation import InputError

if TYPE_CHECKING:
    from accounting.comparison import Answer, Question

_COLOR = "#31688e"


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure and its axes, without a display or a global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    """Writes ``figure``; the suffix says the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    if not path.parent.is_dir():
        raise InputError(f"Expected the folder of plot={str(path)!r} to exist.")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        known = ", ".join(sorted(formats))
        raise InputError(f"Expected plot={str(path)!r} to end in one of {known}.")
    figure.savefig(path, dpi=150)


def _value(row: Answer) -> tuple[float, bool]:
    """Returns the number to draw, and whether it is a guarantee."""
    if row.noise_multiplier is not None:
        proven, possible = (
            row.noise_multiplier.sufficient,
            row.noise_multiplier.necessary,
        )
    else:
        assert row.epsilon is not None
        proven, possible = row.epsilon.upper, row.epsilon.lower
    if proven is not None:
        return proven, True
    assert possible is not None
    return possible, False


def draw_comparison(question: Question, rows: list[Answer], path: Path) -> None:
    """Draws one bar per sampler: the noise it needs, or the epsilon it has."""
    figure, axes = new_figure(7.0, 0.9 + 0.5 * len(rows))
    for position, row in enumerate(rows):
        value, proven = _value(row)
        fill = _COLOR if proven else "none"
        axes.barh(position, value, color=fill, edgecolor=_COLOR, height=0.6)
        label = f" {value:.4g}" if proven else f" at least {value:.4g}, no guarantee"
        axes.text(value, position, label, va="center")
    axes.set_yticks(range(len(rows)), [row.plan.sampler for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set_xlim(left=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    if question.epsilon is not None:
        axes.set_xlabel(
            f"noise multiplier for epsilon={question.epsilon:g}, "
            f"delta={question.delta:g}, zero-out relation"
        )
    else:
        axes.set_xlabel(
            f"epsilon at noise multiplier {question.noise_multiplier:g}, "
            f"delta={question.delta:g}, zero-out relation"
        )
    save(figure, path)
