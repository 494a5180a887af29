"""Compares runs that differ in sampler, method, noise or settings, in one table.

    OUT/batches/, OUT/runs/               each made once: ``comparison_runs``
    OUT/comparison.json, .md, .png        the table and its plot

Every seed has its own batches, initial weights and noise.  The noise multipliers are
computed first; then the batches, which runs share, are made; then the runs.  The plot
is over the first of target epsilon, given noise, batch size and epochs that takes
several values; error bars are one standard deviation over the seeds.

All errors that can be found without TensorFlow are raised before any batch is made;
held-out files that do not match the training examples are refused before any noise is
computed.  The same command, or one with longer lists, makes no finished batches or runs
again.  Every case is reported, whatever its result, with mean and sample standard
deviation over its seeds.  Upper bounds are rounded up, and lower bounds down.

Public: what the runs publish.  Choosing among runs on the same data costs privacy that
no statement of a single run covers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError, delta_warning
from pipelines.core.files.locks import locked
from pipelines.files.outputs import check_folder, usable_folder
from trainer.experiments.comparison_runs import (
    ComparisonCase,
    Runs,
    Say,
    check_plans,
    find_cases,
    is_private,
    settled,
    silent,
)
from trainer.model.metrics import LOWER_IS_BETTER, in_words
from trainer.report.report import (
    DASHES,
    MARKERS,
    Report,
    ReportTable,
    drawn,
    over_seeds,
)
from trainer.report.run_files import PLAIN, warnings
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.requests import LAST, ComparisonSettings
from trainer.settings.train_settings import OMV, number_in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the table: runs that differ only in their seed.

    Attributes:
      sampler: Sampler of the batches.
      expected_batch_size: Expected batch size.
      num_epochs: Epochs of the batches; None if their steps were given.
      method: The training method.
      method_settings: The method's own settings.
      learning_rate: Learning rate of the optimizer; None for that of the plan.
      l2_norm_clip: Bound on the norm of one example's gradient, or "auto"; None without
        privacy.
      weights: "last", or the average of iterates that was evaluated.
      target_epsilon: Target that the noise was chosen for; None without a target.
      delta: Delta of every epsilon here; None without privacy.
      noise_multiplier: Noise multiplier of the runs; None without noise.
      epsilon: Epsilon proven for these batches and noise; None if nothing is proven.
      epsilon_lower_bound: Lower bound on any provable epsilon; None if unknown.
      metric: Name of the metric.
      mean: Mean over the seeds.
      stddev: Sample standard deviation over the seeds; None for one seed.
      num_seeds: Number of runs of the case.
      others: Other metrics whose means over the seeds a reader should see.
      warnings: Why a model of the case is not fit for use (see ``run_files.warnings``).
    """

    sampler: str
    expected_batch_size: int
    num_epochs: int | None
    method: str
    method_settings: Mapping[str, Any]
    learning_rate: float | None
    l2_norm_clip: float | str | None
    weights: str
    target_epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    epsilon: float | None
    epsilon_lower_bound: float | None
    metric: str
    mean: float
    stddev: float | None
    num_seeds: int
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)
    warnings: Sequence[str] = ()


#: Metrics of a run, with those of guessing; and its statement.
_Found = tuple[dict[str, Any], dict[str, Any]]


def summarise(
    results: Iterable[tuple[ComparisonCase, dict[str, Any]]], *, metric: str
) -> list[Outcome]:
    """Returns one outcome for each case and average, in order of first occurrence.

    Args:
      results: For each run its case, and what ``Runs.result`` returned.
      metric: Name of the held-out metric, such as "auc".

    Raises:
      InputError: a run has no such metric.
    """
    cases: dict[tuple[str, str], ComparisonCase] = {}
    found: dict[tuple[str, str], list[_Found]] = {}
    for case, result in results:
        metrics = result["metrics"]
        for weights, values in {LAST: metrics, **metrics["aggregates"]}.items():
            if not _is_number(values.get(metric)):
                # A vote has no probabilities: no log loss, for one.
                if weights != LAST:
                    continue
                raise InputError(
                    f"Expected metric={metric!r} among those of {case.name}: "
                    f"{', '.join(k for k, v in values.items() if _is_number(v))}."
                )
            key = case.name, weights
            cases[key] = case
            every = {**values, "guessing": metrics.get("guessing")}
            found.setdefault(key, []).append((every, result["privacy"]))
    return [_outcome(cases[key], key[1], found[key], metric) for key in found]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _outcome(
    case: ComparisonCase, weights: str, found: list[_Found], metric: str
) -> Outcome:
    settings, batches = case.settings, case.batches
    means = _means([metrics for metrics, _ in found])
    values = [metrics[metric] for metrics, _ in found]
    privacy = found[0][1] if is_private(settings) else {}
    return Outcome(
        sampler=batches.sampler,
        expected_batch_size=batches.expected_batch_size,
        num_epochs=batches.num_epochs,
        method=settings.method,
        method_settings=dict(settings.method_settings),
        learning_rate=settings.learning_rate,
        l2_norm_clip=settings.l2_norm_clip,
        weights=weights,
        target_epsilon=case.target_epsilon,
        delta=settings.target_delta,
        noise_multiplier=privacy.get("noise_multiplier"),
        epsilon=_epsilon(case, found) if privacy else None,
        epsilon_lower_bound=privacy.get("epsilon_lower_bound"),
        metric=metric,
        mean=statistics.fmean(values),
        stddev=statistics.stdev(values) if len(values) > 1 else None,
        num_seeds=len(values),
        others={n: means[n] for n in LOWER_IS_BETTER if n in means and n != metric},
        warnings=list(warnings({**means, "guessing": found[0][0]["guessing"]})),
    )


def _means(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [n for n in found[0] if all(_is_number(each.get(n)) for each in found)]
    return {name: statistics.fmean(each[name] for each in found) for name in names}


def _epsilon(case: ComparisonCase, found: list[_Found]) -> float | None:
    """Returns the epsilon that is proven for all runs; None if one has none."""
    stated = [privacy.get("epsilon") for _, privacy in found]
    values = [value for value in stated if value is not None and math.isfinite(value)]
    if len(values) < len(stated):
        return None
    # Noise was verified at the target itself, where a search for epsilon ends a little
    # above.
    if case.target_epsilon is not None:
        values = [min(value, case.target_epsilon) for value in values]
    return max(values)


#: Variables of the horizontal axis, in order of preference -> value; None for none.
_AXES: Mapping[str, Callable[[Outcome], float | None]] = {
    "epsilon": lambda one: one.target_epsilon,
    "noise multiplier": lambda one: (
        one.noise_multiplier if one.target_epsilon is None else None
    ),
    "batch size": lambda one: one.expected_batch_size,
    "epochs": lambda one: one.num_epochs,
}


def _values_of(axis: str, outcomes: Sequence[Outcome]) -> list[float]:
    """Returns the values that a variable takes, in increasing order.

    Args:
      axis: A key of ``_AXES``.
      outcomes: Lines of the table.
    """
    found = {_AXES[axis](outcome) for outcome in outcomes}
    return sorted(value for value in found if value is not None)


def _axis_of(outcomes: Sequence[Outcome]) -> str:
    """Returns the variable to draw over: the first that varies, or that has a value."""
    known = [axis for axis in _AXES if _values_of(axis, outcomes)]
    return next(
        (each for each in known if len(_values_of(each, outcomes)) > 1), known[0]
    )


def _plot(
    lines: Mapping[str, Sequence[Outcome]], axis: str, path: pathlib.Path, *, title: str
) -> None:
    """Draws the held-out metric over one variable.

    Runs without privacy have no epsilon: over epsilon they are horizontal lines.

    Args:
      lines: Entry of the legend -> outcomes of the line.
      axis: Variable on the horizontal axis, a key of ``_AXES``.
      path: Path of the PNG.
      title: Title of the picture.
    """
    shown = [outcome for line in lines.values() for outcome in line]
    size = (7.5, 4.6 + 0.22 * len(lines))
    title = f"{title}\n{over_seeds(shown[0].num_seeds)}"
    value = _AXES[axis]
    with drawn(path, size, title) as (figure, [axes]):
        for index, (label, line) in enumerate(lines.items()):
            style: dict[str, Any] = {"color": f"C{index % 10}", "lw": 1.2}
            style["ls"] = DASHES[index % len(DASHES)]
            # Shifted slightly, so that error bars do not hide each other.
            shift = 1.015 ** (index - (len(lines) - 1) / 2)
            placed = [(x, one) for one in line if (x := value(one)) is not None]
            for one in line:
                if value(one) is None:
                    named = "" if placed else label
                    axes.axhline(one.mean, **style, label=named)
            points = sorted((x * shift, one.mean, one.stddev or 0) for x, one in placed)
            if points:
                style |= {"marker": MARKERS[index % len(MARKERS)], "label": label}
                axes.errorbar(*zip(*points, strict=True), capsize=2, **style)
        values = _values_of(axis, shown)
        axes.set_xscale("log")
        axes.set_xticks(values, [_tick(value) for value in values])
        axes.minorticks_off()
        axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)
        axes.set_xlabel(axis)
        axes.set_ylabel(f"held-out {in_words(shown[0].metric)}")
        figure.legend(loc="outside lower center", fontsize="small", handlelength=4)


def _tick(value: float) -> str:
    """Returns the text of a value of an axis."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


TITLE = "Ways of batching and training"
COSTS = (
    "Choosing among runs on the same data costs privacy that no statement of a single "
    "run covers."
)
#: Columns of text, which are on the left; the first two need no name in a legend.
_TEXTS = ("batches", "method", "weights")
#: Variables of the plot -> columns of their values.
_COLUMN_OF = {"epsilon": "target", "batch size": "size", "epochs": "epochs"}
#: Heading -> text of a line.
_Columns = dict[str, Callable[[Outcome], str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Report):
    """The report of a comparison.

    Attributes:
      outcomes: Lines of the table.
    """

    outcomes: Sequence[Outcome]


def report(outcomes: Sequence[Outcome]) -> Comparison:
    """Returns the report of a comparison."""
    settings = _settings(outcomes)
    columns = {**settings, **_results(outcomes)}
    axis = _axis_of(outcomes)
    shared = ", ".join(_in_common(outcomes))
    # Votes have few levels and a low AUC, which would compress all other lines.
    shown = [outcome for outcome in outcomes if outcome.weights != OMV]
    table = ReportTable(
        headings=list(columns),
        rows=[[text(one) for text in columns.values()] for one in outcomes],
        left=[place for place, name in enumerate(columns) if name in _TEXTS],
    )
    return Comparison(
        stem="comparison",
        title=TITLE,
        tables=[table],
        above=[shared],
        notes=_notes(outcomes),
        fields=[dataclasses.asdict(outcome) for outcome in outcomes],
        draw={
            "comparison.png": functools.partial(
                _plot, _lines(shown, axis), axis, title=f"{TITLE}\n{shared}"
            )
        },
        outcomes=outcomes,
    )


def _in_common(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns those of epsilon, delta, batch size and epochs that all lines share."""
    found = []
    for axis in _AXES:
        values = _values_of(axis, outcomes)
        if len(values) == 1:
            text = f"{axis} {_tick(values[0])}"
            found.append("1 epoch" if text == "epochs 1" else text)
    deltas = {outcome.delta for outcome in outcomes} - {None}
    return found + [f"delta {delta!r}" for delta in deltas]


def _lines(outcomes: Sequence[Outcome], axis: str) -> dict[str, list[Outcome]]:
    """Returns the lines of the plot over a variable: outcomes of equal settings.

    Args:
      outcomes: What to draw.
      axis: A key of ``_AXES``, by whose values outcomes of a line differ.

    Returns:
      The outcomes of each combination of the other settings, by its words.
    """
    settings = _settings(outcomes)
    settings.pop(_COLUMN_OF.get(axis, ""), None)
    found = defaultdict[str, list[Outcome]](list)
    for one in outcomes:
        texts = [
            text(one) if name in _TEXTS[:2] else f"{name} {text(one)}"
            for name, text in settings.items()
            if text(one) != "-"
        ]
        found[", ".join(texts)].append(one)
    return dict(found)


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    unfit = [one.warnings[0] for one in outcomes if one.warnings]
    warned = [
        f"warning: {len(unfit)} of {len(outcomes)} lines: {each}" for each in unfit[:1]
    ]
    return [
        "eps ≤ is proven for these batches at the noise multiplier in column "
        "noise; no proof can give less than eps ≥. The columns after it are for "
        f"held-out examples: {over_seeds(outcomes[0].num_seeds)}.",
        *([PLAIN] if any(one.method == NON_PRIVATE for one in outcomes) else []),
        *warned,
        COSTS,
    ]


def _settings(outcomes: Sequence[Outcome]) -> _Columns:
    """Returns the columns of settings: the sampler, and whatever differs."""
    own = dict.fromkeys(name for one in outcomes for name in one.method_settings)
    every: _Columns = {
        "batches": lambda one: one.sampler,
        "size": lambda one: f"{one.expected_batch_size:,}",
        "epochs": lambda one: _or_dash(one.num_epochs),
        "method": lambda one: one.method,
        "rate": lambda one: number_in_words(one.learning_rate),
        "clip": lambda one: _or_dash(one.l2_norm_clip),
        **{name: _own_setting(name) for name in own},
        "weights": lambda one: one.weights,
        "target": lambda one: _or_dash(one.target_epsilon),
    }
    return {
        heading: text
        for heading, text in every.items()
        if heading == "batches" or len({text(one) for one in outcomes} - {"-"}) > 1
    }


def _results(outcomes: Sequence[Outcome]) -> _Columns:
    return {
        "noise": lambda one: _number(one.noise_multiplier),
        "eps ≤": lambda one: rounded(one.epsilon, math.ceil),
        "eps ≥": lambda one: rounded(one.epsilon_lower_bound, math.floor),
        in_words(outcomes[0].metric): _value,
        **{in_words(name): _other(name) for name in outcomes[0].others},
    }


def _own_setting(name: str) -> Callable[[Outcome], str]:
    return lambda one: _or_dash(one.method_settings.get(name))


def _other(name: str) -> Callable[[Outcome], str]:
    return lambda one: _number(one.others.get(name))


def rounded(epsilon: float | None, direction: Callable[[float], int]) -> str:
    """Returns a bound on epsilon; upper ones are rounded up, lower ones down.

    Args:
      epsilon: The bound; None if there is none.
      direction: ``math.ceil`` or ``math.floor``.
    """
    return "-" if epsilon is None else f"{direction(epsilon * 100) / 100:.2f}"


def _value(outcome: Outcome) -> str:
    spread = "" if outcome.stddev is None else f" ±{outcome.stddev:.4f}"
    return f"{outcome.mean:.4f}{spread}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _or_dash(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def compare(settings: ComparisonSettings, say: Say = silent) -> Comparison:
    """Makes all batches and runs that are not done yet; writes and returns the table.

    Args:
      settings: Settings of the experiment.
      say: Called with each line of progress.

    Raises:
      InputError: before any batch is made, if the trainer would refuse a run; later, if
        existing batches or runs have other settings.
    """
    check_folder(settings.out, "--out")
    settings, dataset = settled(settings)
    num_examples = dataset.num_examples
    check_plans(settings, num_examples)
    for delta in settings.deltas:
        if warning := delta_warning(delta, num_examples):
            say(warning)
    cases = find_cases(settings, num_examples, say, dataset.bounded)
    with contextlib.ExitStack() as held:
        with usable_folder(settings.out, "--out"):
            settings.out.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(settings.out, settings.out))
        found = report(_outcomes(settings, cases, num_examples, say))
        found.write(settings.out)
    return found


def _outcomes(
    settings: ComparisonSettings,
    cases: list[ComparisonCase],
    num_examples: int,
    say: Say,
) -> list[Outcome]:
    """Makes what is left, and returns the lines of the table."""
    runs = Runs(settings, say)
    asked = list(itertools.product(cases, range(settings.seeds)))
    for case, seed in asked:
        plan = case.batches.plan(num_examples)
        runs.make_batches(case.name_of_batches(seed), case.batches, plan)
    left = [runs.unfinished(case.trial(seed)) for case, seed in asked]
    say(f"{len(left) - left.count(None)} of {len(left)} runs are left")
    results = [(case, runs.run(case.trial(seed))) for case, seed in asked]
    return summarise(results, metric=settings.metric)
