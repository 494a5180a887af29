"""Matplotlib figures without pyplot's global state, and checks of their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
