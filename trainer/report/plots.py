"""Images of a run, such as the training curve, each complete or absent."""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from accounting.plots import new_figure
from pipelines.files.storage import write_atomically
from trainer.model.metrics import in_words, metric_names

#: Dashes of the lines of a plot, which tell them apart without colours.
DASHES = ("-", "--", "-.", ":")
#: Their number is coprime to those of colours and dashes, so that all combine.
MARKERS = "osD^vP*X<>p"


def over_seeds(count: int) -> str:
    """Returns what a picture or a table shows of ``count`` seeds, in words."""
    return "1 seed" if count == 1 else f"mean and standard deviation over {count} seeds"


@contextlib.contextmanager
def drawn(
    path: pathlib.Path, size: tuple[float, float], title: str, *, columns: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its panels to draw in, side by side; writes it whole.

    Args:
      path: Path of the PNG, which is replaced if it exists.
      size: Width and height in inches.
      title: Lines above the panels.
      columns: Number of panels.
    """
    figure, found = new_figure(*size, columns=columns)
    panels = np.atleast_1d(found)
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    yield figure, panels
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def plot_curve(points: list[dict[str, Any]], path: pathlib.Path, *, title: str) -> None:
    """Draws the first two metrics of held-out examples over the steps, side by side.

    Args:
      points: Dicts with ``step`` and metrics.
      path: Path of the PNG.
      title: One line above the plot.
    """
    names = metric_names(points[-1])[:2]
    steps = [point["step"] for point in points]
    size, columns = (4.5 * len(names), 3.6), len(names)
    with drawn(path, size, title, columns=columns) as (_, panels):
        for axes, name in zip(panels, names, strict=True):
            values = [point[name] for point in points]
            known = [value if value is not None else float("nan") for value in values]
            axes.plot(steps, known, color="tab:blue", marker="o", markersize=3)
            axes.set_ylabel(f"{in_words(name)} on held-out examples")
            axes.set_xlabel("step")
