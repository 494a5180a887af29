"""Images of a run, each whole or not there: the training curve, for one."""

from __future__ import annotations

import io
import pathlib
from typing import Any

from accounting.plots import new_figure
from pipelines.batches.manifest import write_atomically
from trainer.model.metrics import in_words, metric_names


def write_png(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure of Matplotlib."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def plot_curve(points: list[dict[str, Any]], path: pathlib.Path, *, title: str) -> None:
    """Draws the first two metrics of held-out examples over the steps.

    Args:
      points: Dicts with ``step`` and the metrics of ``tasks.Scores``.
      path: Where the PNG goes.
      title: One line above the plot.
    """
    figure, left = new_figure(7, 4)
    steps = [point["step"] for point in points]
    for index, name in enumerate(metric_names(points[-1])[:2]):
        axes = left if index == 0 else left.twinx()
        color = ("tab:blue", "tab:orange")[index]
        values = [point[name] for point in points]
        known = [value if value is not None else float("nan") for value in values]
        axes.plot(steps, known, color=color, marker="o", markersize=3)
        axes.set_ylabel(f"{in_words(name)} on held-out examples", color=color)
    left.set_xlabel("step")
    left.set_title(title)
    left.grid(alpha=0.3)
    write_png(figure, path)
