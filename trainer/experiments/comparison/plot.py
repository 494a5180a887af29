"""Plots of a comparison: the metric over epsilon, batch size and other variables.

There is one picture per variable that takes several values, with a line for every
combination of the others: sampler, method, noise rule, settings, and rows or users.
Lines differ in colour, marker and dashes.  Points are hollow if the target epsilon is
not proven.  Error bars are one standard deviation over the seeds.

Formal guarantees:
  - A line whose noise guarantees nothing says so in the legend, and its points are
    hollow.
  - Every line has its entry in the legend.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from trainer.experiments.comparison.case import GIVEN
from trainer.experiments.comparison.results import NO_GUARANTEE, Outcome
from trainer.model.metrics import in_words
from trainer.report.plots import DASHES, MARKERS, drawn, over_seeds
from trainer.settings.aggregation_settings import OMV
from trainer.settings.comparison_settings import OPTIMISTIC, OWN, SAME
from trainer.settings.train_settings import number_in_words

_RULES = {
    OWN: "own noise",
    SAME: "the first sampler's noise",
    OPTIMISTIC: "optimistic noise",
    GIVEN: "",
}


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
    lines = _lines(shown, axis)
    size = (7.5, 4.6 + 0.22 * len(lines))
    title = f"{title}\n{over_seeds(outcomes[0].num_seeds)}"
    with drawn(path, size, title) as (figure, [axes]):
        for index, (label, line) in enumerate(lines.items()):
            # Shifted slightly, so that error bars do not hide each other.
            shift = 1.015 ** (index - (len(lines) - 1) / 2)
            _draw_line(axes, axis, line, label, _style(index), shift)
        axes.set_xlabel(axis.words)
        axes.set_ylabel(f"held-out {in_words(outcomes[0].metric)}")
        _set_ticks(axes, _values(axis, shown))
        figure.legend(loc="outside lower center", fontsize="small", handlelength=4)


# -- lines -----------------------------------------------------------------------------


def _style(index: int) -> dict[str, Any]:
    return {
        "color": f"C{index % 10}",
        "ls": DASHES[index % len(DASHES)],
        "lw": 1.2,
        "marker": MARKERS[index % len(MARKERS)],
    }


def _lines(outcomes: Sequence[Outcome], axis: Axis) -> dict[str, list[Outcome]]:
    """Returns legend entry -> outcomes of the line, over one variable."""
    labels = _distinguished_by(outcomes, axis)
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        texts = (text(outcome) for text in labels)
        found.setdefault(", ".join(filter(None, texts)), []).append(outcome)
    return {_marked(label, line): line for label, line in found.items()}


def _clip(l2_norm_clip: float | str) -> str:
    return f"clip {number_in_words(l2_norm_clip)}"


def _distinguished_by(
    outcomes: Sequence[Outcome], axis: Axis
) -> list[Callable[[Outcome], str]]:
    """Returns functions for the legend entries: the sampler, and whatever differs."""
    own = dict.fromkeys(name for one in outcomes for name in one.method_settings)
    others: list[Callable[[Outcome], str]] = [
        lambda one: "" if one.sampled is None else f"{one.sampled} sampled",
        lambda one: one.method,
        lambda one: _RULES.get(one.noise_rule or "", ""),
        lambda one: f"rate {number_in_words(one.learning_rate)}",
        lambda one: "" if one.l2_norm_clip is None else _clip(one.l2_norm_clip),
        *map(_setting, own),
        *(_at(each) for each in AXES if each is not axis),
        lambda one: f"weights {one.weights}",
    ]
    differ = [
        text for text in others if len({text(one) for one in outcomes} - {""}) > 1
    ]
    return [lambda one: one.sampler, *differ]


def _at(axis: Axis) -> Callable[[Outcome], str]:
    def text(one: Outcome) -> str:
        value = axis.value(one)
        return "" if value is None else _said(axis, value)

    return text


def _setting(name: str) -> Callable[[Outcome], str]:
    return lambda one: (
        f"{name} {one.method_settings[name]}" if name in one.method_settings else ""
    )


def _marked(label: str, line: Sequence[Outcome]) -> str:
    unproven = [one.guarantee == NO_GUARANTEE for one in line]
    if all(unproven):
        return f"{label}: {NO_GUARANTEE}"
    return f"{label}: {NO_GUARANTEE} where hollow" if any(unproven) else label


def _draw_line(
    axes: Any,
    axis: Axis,
    line: Sequence[Outcome],
    label: str,
    style: dict[str, Any],
    shift: float,
) -> None:
    placed = sorted(
        ((x, one) for one in line if (x := axis.value(one)) is not None),
        key=lambda point: point[0],
    )
    for one in line:
        if axis.value(one) is None:
            named = "" if placed else label
            axes.axhline(one.mean, **{**style, "marker": ""}, label=named)
    if not placed:
        return
    places = [x * shift for x, _ in placed]
    means = [one.mean for _, one in placed]
    hollow = {"mfc": "white"} if label.endswith(NO_GUARANTEE) else {}
    axes.plot(places, means, **style, **hollow, label=label)
    spread = [one.stddev or 0.0 for _, one in placed]
    if any(spread):
        axes.errorbar(
            places, means, spread, fmt="none", ecolor=style["color"], capsize=2
        )
    for place, (_, one) in zip(places, placed, strict=True):
        if one.guarantee == NO_GUARANTEE:
            axes.plot(place, one.mean, **style, mfc="white")


def _set_ticks(axes: Any, values: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(values, [_tick(value) for value in values])
    axes.minorticks_off()
    axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)


def _tick(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
