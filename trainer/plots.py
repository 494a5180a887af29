"""The training curve as an image."""

from __future__ import annotations

import io
import pathlib
from typing import Any

from pipelines.manifest import write_atomically
from trainer.tasks import in_words, metric_names


def plot_curve(points: list[dict[str, Any]], path: pathlib.Path, *, title: str) -> None:
    """Draws the first two metrics of held-out examples over the steps.

    Args:
      points: Dicts with ``step`` and the metrics of ``tasks.Scores``.
      path: Where the PNG goes.
      title: One line above the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())
