"""The bias of clipping as JSON, as a table and as a figure.  Not private."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from accounting.plots import new_figure
from pipelines.files.json_files import pretty_json
from pipelines.files.storage import write_atomically
from trainer.report import tables
from trainer.report.plots import DASHES, write_png
from trainer.settings.bias_settings import COLUMNS

TITLE = "Bias of clipping, not private"
NOT_PRIVATE = (
    "NOT PRIVATE: the bias of clipping is computed from the examples without noise; no "
    "epsilon covers it. The data was declared public."
)
_NAME = "non_private_bias"
_WORDS = {
    "magnitude": "magnitude",
    "direction": "direction",
    "bias": "absolute bias",
    "cosine": "cosine",
    "ascent_cosine": "cosine of ascent",
}
_NOTES = (
    NOT_PRIVATE,
    "Means over the steps. The clipped sum is magnitude times the unclipped sum, plus "
    "an orthogonal part whose norm is direction times the norm of the unclipped sum. "
    "Absolute bias is the distance of the two sums over the expected batch size; "
    "cosine is the cosine of their angle. The cosine of ascent is between the ascent "
    "direction of a method and the gradient of the loss.",
)
#: Columns of the file, and the axis labels of their panels.
_PANELS = {
    "bias": "absolute bias",
    "cosine": "cosine of clipped and unclipped sums",
    "ascent_cosine": "cosine of ascent and gradient",
}

#: Method -> for each step, ``step`` and ``COLUMNS``; NaN where undefined.
Lines = Mapping[str, Sequence[Mapping[str, float]]]


class Report:
    """The measured bias.  Not private.

    Args:
      lines: For each method, one line per step.
      setting: What all methods share, in words.
    """

    def __init__(self, lines: Lines, setting: str) -> None:
        self._lines, self._setting = lines, setting

    def means(self, method: str) -> dict[str, float | None]:
        """Returns means over the steps that have a value; None if no step has one."""
        found = {name: self._known(method, name) for name in COLUMNS}
        return {
            name: statistics.fmean(value for _, value in points) if points else None
            for name, points in found.items()
        }

    def _known(self, method: str, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) of all steps that have the value."""
        lines = self._lines[method]
        return [(x["step"], x[name]) for x in lines if not math.isnan(x[name])]

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict of the means and of every step."""
        return {
            "private": False,
            "warning": NOT_PRIVATE,
            "methods": [
                {
                    "method": method,
                    "mean": self.means(method),
                    "steps": [_without_nan(line) for line in lines],
                }
                for method, lines in self._lines.items()
            ],
        }

    def show(self) -> None:
        """Prints the table."""
        tables.show(TITLE, self._headings, self._rows(), left=[0], notes=_NOTES)

    def write(self, out: pathlib.Path) -> dict[str, Any]:
        """Writes non_private_bias.json, .md and .png; returns the first."""
        fields = self.to_json()
        table = tables.markdown(self._headings, self._rows())
        text = "\n\n".join((f"# {TITLE}", *_NOTES, table, f"![{TITLE}]({_NAME}.png)"))
        write_atomically(out / f"{_NAME}.json", pretty_json(fields))
        write_atomically(out / f"{_NAME}.md", f"{text}\n".encode())
        self._plot(out / f"{_NAME}.png")
        return fields

    @property
    def _headings(self) -> list[str]:
        return ["method", *_WORDS.values()]

    def _rows(self) -> list[list[str]]:
        return [
            [method, *(_rounded(value) for value in self.means(method).values())]
            for method in self._lines
        ]

    def _plot(self, path: pathlib.Path) -> None:
        figure, panels = new_figure(13, 4, columns=len(_PANELS))
        for axes, (name, label) in zip(panels, _PANELS.items(), strict=True):
            for index, method in enumerate(self._lines):
                points = self._known(method, name) or [(math.nan, math.nan)]
                steps, values = zip(*points, strict=True)
                axes.plot(
                    steps, values, color=f"C{index}", label=method,
                    ls=DASHES[index % len(DASHES)],
                    # Of equal lines the later ones are thinner, and on top.
                    lw=max(1.0, 2.2 - 0.6 * index),
                )  # fmt: skip
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(labels),
            handlelength=4,
        )  # fmt: skip
        figure.suptitle(f"{TITLE}\n{self._setting}", fontsize="medium")
        write_png(figure, path)


def _without_nan(line: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(x) else x for name, x in line.items()}


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
