"""The bias of clipping as JSON, as a table and as a figure.  Not private."""

from __future__ import annotations

import functools
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from accounting.plots import new_figure
from trainer.report.plots import DASHES, write_png
from trainer.report.report import Report, Table
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
    "an orthogonal rest whose norm is direction times the norm of the unclipped sum. "
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

#: For each step, ``step`` and ``COLUMNS``; NaN where undefined.
Steps = Sequence[Mapping[str, float]]
#: Method -> its steps.
Lines = Mapping[str, Steps]


def report(lines: Lines, setting: str) -> Report:
    """Returns the report of a measurement.  Not private.

    Args:
      lines: For each method, one line per step.
      setting: What all methods share, in words.
    """
    rows = [
        [method, *(_rounded(value) for value in means(lines[method]).values())]
        for method in lines
    ]
    return Report(
        stem=_NAME,
        title=TITLE,
        tables=[Table(headings=["method", *_WORDS.values()], rows=rows)],
        notes=_NOTES,
        fields={
            "private": False,
            "warning": NOT_PRIVATE,
            "methods": [
                {
                    "method": method,
                    "mean": means(steps),
                    "steps": [_without_nan(line) for line in steps],
                }
                for method, steps in lines.items()
            ],
        },
        draw={f"{_NAME}.png": functools.partial(_plot, lines, setting)},
    )


def means(lines: Steps) -> dict[str, float | None]:
    """Returns means over the steps that have a value; None if no step has one."""
    found = {name: _known(lines, name) for name in COLUMNS}
    return {
        name: statistics.fmean(value for _, value in points) if points else None
        for name, points in found.items()
    }


def _known(lines: Steps, name: str) -> list[tuple[float, float]]:
    """Returns (step, value) of all steps that have the value."""
    return [(x["step"], x[name]) for x in lines if not math.isnan(x[name])]


def _plot(lines: Lines, setting: str, path: pathlib.Path) -> None:
    figure, panels = new_figure(13, 4, columns=len(_PANELS))
    for axes, (name, label) in zip(panels, _PANELS.items(), strict=True):
        for index, method in enumerate(lines):
            points = _known(lines[method], name) or [(math.nan, math.nan)]
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
    figure.suptitle(f"{TITLE}\n{setting}", fontsize="medium")
    write_png(figure, path)


def _without_nan(line: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(x) else x for name, x in line.items()}


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
