"""The plot of a comparison: the held-out metric over what varies.

The horizontal axis is the first of target epsilon, given noise, batch size and epochs
that takes several values.  Lines differ in colour, marker and dashes.  Error bars are
one standard deviation over the seeds.

Formal guarantees:
  - A line whose noise guarantees nothing says so in the legend, and its points are
    hollow.
  - Every line has its entry in the legend.

Public: everything.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.experiments.comparison.case import GIVEN
from trainer.experiments.comparison.results import NO_GUARANTEE, Outcome
from trainer.model.metrics import in_words
from trainer.report.plots import DASHES, MARKERS, drawn, over_seeds

#: Variables of the horizontal axis, in order of preference -> value; None for none.
AXES: Mapping[str, Callable[[Outcome], float | None]] = {
    "epsilon": lambda one: one.target_epsilon,
    "noise multiplier": lambda one: (
        one.noise_multiplier if one.noise_rule == GIVEN else None
    ),
    "batch size": lambda one: one.expected_batch_size,
    "epochs": lambda one: one.num_epochs,
}


def values_of(axis: str, outcomes: Sequence[Outcome]) -> list[float]:
    """Returns the values that a variable takes, in increasing order.

    Args:
      axis: A key of ``AXES``.
      outcomes: Lines of the table.
    """
    found = {AXES[axis](outcome) for outcome in outcomes}
    return sorted(value for value in found if value is not None)


def axis_of(outcomes: Sequence[Outcome]) -> str:
    """Returns the variable to draw over: the first that varies, or that has a value."""
    known = [axis for axis in AXES if values_of(axis, outcomes)]
    return next(
        (each for each in known if len(values_of(each, outcomes)) > 1), known[0]
    )


def plot(
    lines: Mapping[str, Sequence[Outcome]],
    axis: str,
    path: pathlib.Path,
    *,
    title: str,
) -> None:
    """Draws the held-out metric over one variable.

    Runs without privacy have no epsilon: over epsilon they are horizontal lines.

    Args:
      lines: Entry of the legend -> outcomes of the line.
      axis: Variable on the horizontal axis, a key of ``AXES``.
      path: Path of the PNG.
      title: Title of the picture.
    """
    shown = [outcome for line in lines.values() for outcome in line]
    size = (7.5, 4.6 + 0.22 * len(lines))
    title = f"{title}\n{over_seeds(shown[0].num_seeds)}"
    with drawn(path, size, title) as (figure, [axes]):
        for index, (label, line) in enumerate(lines.items()):
            # Shifted slightly, so that error bars do not hide each other.
            shift = 1.015 ** (index - (len(lines) - 1) / 2)
            _draw_line(axes, AXES[axis], line, _marked(label, line), index, shift)
        values = values_of(axis, shown)
        axes.set_xscale("log")
        axes.set_xticks(values, [tick(value) for value in values])
        axes.minorticks_off()
        axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)
        axes.set_xlabel(axis)
        axes.set_ylabel(f"held-out {in_words(shown[0].metric)}")
        figure.legend(loc="outside lower center", fontsize="small", handlelength=4)


def tick(value: float) -> str:
    """Returns the text of a value of an axis."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _marked(label: str, line: Sequence[Outcome]) -> str:
    unproven = [one.guarantee == NO_GUARANTEE for one in line]
    if any(unproven) and not all(unproven):
        return f"{label}: {NO_GUARANTEE} where hollow"
    return f"{label}: {NO_GUARANTEE}" if any(unproven) else label


def _draw_line(
    axes: Any,
    value: Callable[[Outcome], float | None],
    line: Sequence[Outcome],
    label: str,
    index: int,
    shift: float,
) -> None:
    placed = sorted(
        ((x * shift, one) for one in line if (x := value(one)) is not None),
        key=lambda point: point[0],
    )
    style: dict[str, Any] = {
        "color": f"C{index % 10}",
        "ls": DASHES[index % len(DASHES)],
        "lw": 1.2,
        "marker": MARKERS[index % len(MARKERS)],
    }
    for one in line:
        if value(one) is None:
            named = "" if placed else label
            axes.axhline(one.mean, **{**style, "marker": ""}, label=named)
    if not placed:
        return
    places, means = [x for x, _ in placed], [one.mean for _, one in placed]
    spread = [one.stddev or 0.0 for _, one in placed]
    hollow = {"mfc": "white"} if label.endswith(NO_GUARANTEE) else {}
    axes.plot(places, means, **style, **hollow, label=label)
    if any(spread):
        axes.errorbar(
            places, means, spread, fmt="none", ecolor=style["color"], capsize=2
        )
    for place, one in placed:
        if one.guarantee == NO_GUARANTEE:
            axes.plot(place, one.mean, **style, mfc="white")
