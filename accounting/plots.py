"""Figures without a global state, and where they may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from accounting.validation import InputError


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure and its axes, or an array of them.

    Args:
      width: In inches.
      height: In inches.
      columns: Axes beside each other.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def check_path(path: Path) -> None:
    """Refuses a path that ``save`` would refuse, before there is a figure.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    if not path.parent.is_dir():
        raise InputError(
            f"Expected the folder of plot={str(path)!r} to exist. Make it first."
        )
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        known = ", ".join(sorted(formats))
        raise InputError(f"Expected plot={str(path)!r} to end in one of {known}.")


def save(figure: Any, path: Path) -> None:
    """Writes ``figure``; the suffix says the format.

    Args:
      figure: From `new_figure`.
      path: New or to be replaced.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    check_path(path)
    figure.savefig(path, dpi=150)
