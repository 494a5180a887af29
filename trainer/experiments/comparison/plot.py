"""Plots of a comparison: the metric over epsilon, batch size and other variables.

There is one picture per variable that takes several values.  It has a panel for every
combination of the other variables.  In each panel there is a line for every sampler,
method, noise rule and setting, and for rows and users.  Lines differ in colour, marker
and dashes.  Points are hollow if the target epsilon is not proven.  Error bars are one
standard deviation over the seeds.

Formal guarantees:
  - A line whose noise guarantees nothing says so in the legend, and its points are
    hollow.
  - Every line of every panel has its entry in the legend.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.lines import Line2D

from accounting.plots import new_figure
from trainer.experiments.comparison.case import GIVEN
from trainer.experiments.comparison.results import NO_GUARANTEE, Outcome
from trainer.model.metrics import in_words
from trainer.report.plots import DASHES, MARKERS, over_seeds, write_png
from trainer.settings.aggregation_settings import OMV
from trainer.settings.comparison_settings import OPTIMISTIC, OWN, SAME
from trainer.settings.train_settings import number_in_words

_RULES = {
    OWN: "own noise",
    SAME: "the first sampler's noise",
    OPTIMISTIC: "optimistic noise",
    GIVEN: "",
}
#: Maximum number of panels in a row.
_MOST_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class Axis:
    """A numeric variable of outcomes.

    Attributes:
      words: Name of the variable, in words.
      value: Outcome -> value; None if the outcome has none.
    """

    words: str
    value: Callable[[Outcome], float | None]


EPSILON = Axis("epsilon", lambda one: one.target_epsilon)
NOISE = Axis(
    "noise multiplier",
    lambda one: one.noise_multiplier if one.noise_rule == GIVEN else None,
)
BATCH_SIZE = Axis(
    "batch size", lambda one: one.rows_per_step or one.expected_batch_size
)
EPOCHS = Axis("epochs", lambda one: one.num_epochs)
ROWS_KEPT = Axis("rows of a user at most", lambda one: one.max_examples_per_user)
#: In the order of their pictures.
AXES = (ROWS_KEPT, EPSILON, NOISE, BATCH_SIZE, EPOCHS)


def _values(axis: Axis, outcomes: Sequence[Outcome]) -> list[float]:
    found = {axis.value(outcome) for outcome in outcomes}
    return sorted(value for value in found if value is not None)


def pictures(outcomes: Sequence[Outcome]) -> dict[Axis, str]:
    """Returns the variables that get a picture, with the file name of each."""
    asked = [axis for axis in AXES if len(_values(axis, outcomes)) > 1]
    first, *others = asked or [a for a in AXES if _values(a, outcomes)][:1]
    names = {axis: f"comparison-{axis.words.replace(' ', '-')}.png" for axis in others}
    return {first: "comparison.png", **names}


def in_common(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns those of epsilon, delta, batch size and epochs that all lines share."""
    found = []
    for axis in AXES:
        values = _values(axis, outcomes)
        if len(values) == 1:
            found.append(_said(axis, values[0]))
    deltas = {outcome.delta for outcome in outcomes} - {None}
    found += [f"delta {delta!r}" for delta in deltas]
    return found


def _said(axis: Axis, value: float) -> str:
    if axis is EPOCHS:
        return "1 epoch" if value == 1 else f"{value:g} epochs"
    if axis is ROWS_KEPT:
        return f"at most {value:g} row{'s' * (value != 1)} of a user"
    return f"{axis.words} {_tick(value)}"


def plot(
    outcomes: Sequence[Outcome], axis: Axis, path: pathlib.Path, *, title: str
) -> None:
    """Draws the held-out metric over one variable.

    Runs without privacy have no epsilon: over epsilon they are horizontal lines.
    Majority votes are only in the table.

    Args:
      outcomes: Lines of the table.
      axis: Variable on the horizontal axis, one of ``AXES``.
      path: Path of the PNG.
      title: Title of the picture.
    """
    # Votes have few levels and a low AUC, which would compress all other lines.
    shown = [outcome for outcome in outcomes if outcome.weights != OMV]
    lines = _lines(shown)
    panels = _panels(shown, axis)
    figure, grid = _new_grid(len(panels), len(lines))
    for axes, panel in zip(grid, panels, strict=True):
        for style, line in zip(_styles(len(lines)), lines.values(), strict=True):
            _draw_line(
                axes, axis, [one for one in line if one in panel.outcomes], style
            )
        axes.set_title(panel.title, fontsize="medium")
        axes.set_xlabel(axis.words)
        axes.grid(alpha=0.3)
        _set_ticks(axes, _values(axis, shown))
    figure.supylabel(f"held-out {in_words(outcomes[0].metric)}", fontsize="medium")
    _add_legend(figure, axis, lines)
    figure.suptitle(f"{title}\n{over_seeds(outcomes[0].num_seeds)}", fontsize="medium")
    write_png(figure, path)


def _new_grid(panels: int, lines: int) -> tuple[Any, list[Any]]:
    """Returns a figure, and axes for the panels, with room for a legend below."""
    columns = 2 if panels == 4 else min(panels, _MOST_COLUMNS)
    rows = -(-panels // columns)
    width = max(7.5, 1 + 3.4 * columns)
    figure, _ = new_figure(width, 1.4 + 3.2 * rows + 0.22 * lines)
    figure.clear()
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for empty in grid[panels:]:
        empty.remove()
    return figure, list(grid[:panels])


# -- panels ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Panel:
    """The outcomes at one combination of the other variables."""

    title: str
    outcomes: Sequence[Outcome]


def _panels(outcomes: Sequence[Outcome], axis: Axis) -> list[_Panel]:
    others = [each for each in AXES if each is not axis]
    others = [each for each in others if len(_values(each, outcomes)) > 1]
    weights = list(dict.fromkeys(outcome.weights for outcome in outcomes))
    return [
        _panel(outcomes, dict(zip(others, values, strict=True)), chosen, len(weights))
        for values in itertools.product(*(_values(each, outcomes) for each in others))
        for chosen in weights
    ]


def _panel(
    outcomes: Sequence[Outcome], at: dict[Axis, float], weights: str, num_weights: int
) -> _Panel:
    """Returns a panel; outcomes without a value, such as no epsilon, are in all."""
    inside = [
        one
        for one in outcomes
        if one.weights == weights
        and all(axis.value(one) in (None, value) for axis, value in at.items())
    ]
    words = [_said(axis, value) for axis, value in at.items()]
    words += [f"weights {weights}"] if num_weights > 1 else []
    return _Panel(", ".join(words), inside)


# -- lines -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Style:
    """Colour, marker and dashes of a line, and its horizontal shift."""

    color: str
    marker: str
    dashes: str
    shift: float


def _styles(count: int) -> list[_Style]:
    return [
        _Style(
            color=f"C{index % 10}",
            marker=MARKERS[index % len(MARKERS)],
            dashes=DASHES[index % len(DASHES)],
            # Shifted slightly, so that error bars do not hide each other.
            shift=1.015 ** (index - (count - 1) / 2),
        )
        for index in range(count)
    ]


def _lines(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Returns legend entry -> outcomes of the line."""
    labels = _distinguished_by(outcomes)
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        texts = (text(outcome) for text in labels)
        found.setdefault(", ".join(filter(None, texts)), []).append(outcome)
    return {_marked(label, line): line for label, line in found.items()}


def _clip(l2_norm_clip: float | str) -> str:
    return f"clip {number_in_words(l2_norm_clip)}"


def _distinguished_by(outcomes: Sequence[Outcome]) -> list[Callable[[Outcome], str]]:
    """Returns functions for the legend entries: the sampler, and whatever differs."""
    own = dict.fromkeys(name for one in outcomes for name in one.method_settings)
    others: list[Callable[[Outcome], str]] = [
        lambda one: "" if one.sampled is None else f"{one.sampled} sampled",
        lambda one: one.method,
        lambda one: _RULES.get(one.noise_rule or "", ""),
        lambda one: f"rate {number_in_words(one.learning_rate)}",
        lambda one: "" if one.l2_norm_clip is None else _clip(one.l2_norm_clip),
        *map(_setting, own),
    ]
    differ = [
        text for text in others if len({text(one) for one in outcomes} - {""}) > 1
    ]
    return [lambda one: one.sampler, *differ]


def _setting(name: str) -> Callable[[Outcome], str]:
    return lambda one: (
        f"{name} {one.method_settings[name]}" if name in one.method_settings else ""
    )


def _marked(label: str, line: Sequence[Outcome]) -> str:
    unproven = [one.guarantee == NO_GUARANTEE for one in line]
    if all(unproven):
        return f"{label}: {NO_GUARANTEE}"
    return f"{label}: {NO_GUARANTEE} where hollow" if any(unproven) else label


def _draw_line(axes: Any, axis: Axis, line: Sequence[Outcome], style: _Style) -> None:
    placed = sorted(
        ((x, one) for one in line if (x := axis.value(one)) is not None),
        key=lambda point: point[0],
    )
    for outcome in line:
        if axis.value(outcome) is None:
            axes.axhline(outcome.mean, color=style.color, ls=style.dashes, lw=1.2)
    spread = [one.stddev or 0.0 for _, one in placed]
    axes.errorbar(
        [x * style.shift for x, _ in placed],
        [one.mean for _, one in placed],
        yerr=spread if any(spread) else None,
        color=style.color, ls=style.dashes, lw=1.2, capsize=2,
    )  # fmt: skip
    for x, one in placed:
        axes.plot(
            x * style.shift, one.mean, style.marker, color=style.color, markersize=6,
            mfc="white" if one.guarantee == NO_GUARANTEE else style.color,
        )  # fmt: skip


def _add_legend(figure: Any, axis: Axis, lines: dict[str, list[Outcome]]) -> None:
    handles = []
    for style, (label, line) in zip(_styles(len(lines)), lines.items(), strict=True):
        has_points = any(axis.value(one) is not None for one in line)
        handles.append(
            Line2D(
                [], [], color=style.color, ls=style.dashes, lw=1.2, label=label,
                marker=style.marker if has_points else "",
                mfc="white" if label.endswith(NO_GUARANTEE) else style.color,
            )
        )  # fmt: skip
    figure.legend(
        handles=handles, loc="outside lower center", fontsize="small", handlelength=4
    )


def _set_ticks(axes: Any, values: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(values, [_tick(value) for value in values])
    axes.minorticks_off()
    axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)


def _tick(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
