"""Compares the last iterate with averages on a stream that shifts periodically.

The last weights follow the most recent examples; averages over a period do not.  All
weights are evaluated on the same held-out examples at many steps.

    OUT/data/                   the ordered rows: see ``drifting_table``
    OUT/batches/, OUT/runs/     see ``compare``
    OUT/shift.json, .md, .png   the results

Formal guarantees:
  - The batches are deterministic: step t has the rows of time t.
  - Batches and runs are made as in a comparison: a stopped experiment resumes with the
    same settings, and finished ones are used only if made with these settings.

Public: everything; the settings must declare the rows public.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, section 4 (periodic distribution shift).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from accounting.core.plan import DETERMINISTIC
from pipelines.job.batch_settings import BatchSettings
from trainer.experiments.comparison.case import Case
from trainer.experiments.comparison.runs import (
    Runs,
    Say,
    mark,
    settled,
    silent,
    training_data,
)
from trainer.model.metrics import in_words
from trainer.papers import drifting_table
from trainer.papers.settings import ShiftSettings
from trainer.report.metrics_files import read_curve
from trainer.report.plots import DASHES, drawn, over_seeds, setting_in_words
from trainer.report.report import Report, Table
from trainer.report.run_files import CURVE_NAME
from trainer.settings.comparison_settings import LAST

TITLE = "A distribution that shifts periodically"
NOT_PRIVATE = (
    "NOT PRIVATE: the order of the rows is made from all of them. The data was "
    "declared public, and no epsilon is claimed."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """A held-out metric over time.

    Attributes:
      weights: "last", or the name of an average.
      steps: Number of steps before each evaluation, shape (points,).
      values: Metric, shape (seeds, points).
      period: Period in steps.
    """

    weights: str
    steps: np.ndarray
    values: np.ndarray
    period: int

    @property
    def mean(self) -> np.ndarray:
        """Mean over the seeds, shape (points,)."""
        return self.values.mean(0)

    @property
    def stddev(self) -> np.ndarray:
        """Sample standard deviation over the seeds, (points,); 0 for one seed."""
        if len(self.values) == 1:
            return np.zeros_like(self.mean)
        return self.values.std(0, ddof=1)

    @property
    def last_period(self) -> np.ndarray:
        """The values of ``mean`` in the last period."""
        return self.mean[self.steps > self.steps[-1] - self.period]

    def to_json(self) -> dict[str, Any]:
        """Returns the course and its summary, JSON-serialisable."""
        last = self.last_period
        return {
            "weights": self.weights,
            "steps": self.steps.tolist(),
            "values": self.values.tolist(),
            "last_period_mean": float(last.mean()),
            "last_period_least": float(last.min()),
            "last_period_most": float(last.max()),
            "last_period_swing": float(last.max() - last.min()),
            "final": float(self.mean[-1]),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift(Report):
    """The report of the experiment.

    Attributes:
      courses: The course of the last iterate, then of the averages.
    """

    courses: Sequence[Course]


def shift(settings: ShiftSettings, say: Say = silent) -> Shift:
    """Orders the rows, makes the runs that are not done yet, and reads their curves.

    Arguments and errors as for `compare`.
    """
    size, period = settings.expected_batch_size, settings.period
    settings = settled(settings)
    num_steps = drifting_table.num_steps_of(
        training_data(settings).num_examples, size, period
    )
    settings.trained.check_steps(num_steps)
    mark(settings)
    data = settings.out / "data"
    drifting_table.write(
        settings.source, data, column=settings.shift_by, batch_size=size, period=period
    )
    say(NOT_PRIVATE)
    ordered = dataclasses.replace(settings, source=str(data))
    runs = Runs(ordered, say)
    curves = [
        _curve(runs, settings, num_steps, seed, say) for seed in range(settings.seeds)
    ]
    return report(settings, num_steps, _courses(settings, curves))


def _curve(
    runs: Runs, settings: ShiftSettings, num_steps: int, seed: int, say: Say
) -> list[dict[str, Any]]:
    batches = BatchSettings(
        sampler=DETERMINISTIC,
        expected_batch_size=settings.expected_batch_size,
        num_epochs=1,
    )
    num_examples = num_steps * settings.expected_batch_size
    case = Case(batches=batches, settings=settings.trained)
    trial = case.trial(seed)
    runs.make_batches(trial.batches, batches, batches.plan(num_examples))
    say(f"[{seed + 1}/{settings.seeds}] {trial.name}")
    runs.run(trial)
    return read_curve(runs.request(trial).run / CURVE_NAME, ())


def _courses(
    settings: ShiftSettings, curves: list[list[dict[str, Any]]]
) -> tuple[Course, ...]:
    names = (LAST, *curves[0][0]["aggregates"])
    return tuple(
        Course(
            weights=name,
            steps=np.array([point["step"] for point in curves[0]]),
            values=np.array(
                [[_value(p, name, settings.metric) for p in curve] for curve in curves]
            ),
            period=settings.period,
        )
        for name in names
    )


def _value(point: dict[str, Any], weights: str, metric: str) -> float:
    found = point if weights == LAST else point["aggregates"][weights]
    value = found[metric]
    return float("nan") if value is None else float(value)


# -- report ----------------------------------------------------------------------------


def report(settings: ShiftSettings, num_steps: int, courses: Sequence[Course]) -> Shift:
    """Returns the report of an experiment.

    Args:
      settings: Settings of the experiment.
      num_steps: Number of steps in every run.
      courses: As in ``Shift``.
    """
    notes = [NOT_PRIVATE, _note(settings, num_steps)]
    headings = ("weights", "mean", "least", "most", "swing", "at the end")
    return Shift(
        stem="shift",
        title=TITLE,
        tables=[Table(headings=headings, rows=list(map(_cells, courses)))],
        notes=notes,
        fields={
            "metric": settings.metric,
            "period": settings.period,
            "shift_by": settings.shift_by,
            "num_steps": num_steps,
            "seeds": settings.seeds,
            "courses": [course.to_json() for course in courses],
            "notes": notes,
        },
        draw={"shift.png": functools.partial(_plot, settings, num_steps, courses)},
        courses=courses,
    )


def _note(settings: ShiftSettings, num_steps: int) -> str:
    return (
        f"Held-out {in_words(settings.metric)} in the last of "
        f"{num_steps // settings.period} periods of {settings.period} steps, mean over "
        f"{settings.seeds} seeds. In training, small and large values of "
        f"{settings.shift_by} alternate; the held-out examples do not change."
    )


def _cells(course: Course) -> list[str]:
    fields = course.to_json()
    names = ("mean", "least", "most", "swing")
    values = [*(fields[f"last_period_{name}"] for name in names), fields["final"]]
    return [course.weights, *(f"{value:.4f}" for value in values)]


def _plot(
    settings: ShiftSettings,
    num_steps: int,
    courses: Sequence[Course],
    path: pathlib.Path,
) -> None:
    """Draws the metric over the steps and, below it, the share of large values."""
    setting = setting_in_words(
        settings.expected_batch_size, num_steps, [settings.trained]
    )
    title = f"{TITLE}\n{setting}\n{over_seeds(settings.seeds)}"
    with drawn(path, (7.5, 4.4), title) as (_, [axes]):
        for index, course in enumerate(courses):
            style = DASHES[index % len(DASHES)]
            axes.plot(course.steps, course.mean, label=course.weights, ls=style)
            ends = course.mean - course.stddev, course.mean + course.stddev
            axes.fill_between(course.steps, *ends, alpha=0.15, lw=0)
        axes.set_ylabel(f"held-out {in_words(settings.metric)}")
        axes.set_xlabel("step")
        # The first steps change the metric so much that later changes would be
        # invisible.
        later = [c.mean[c.steps >= settings.period] for c in courses]
        least, most = min(map(min, later)), max(map(max, later))
        margin = 0.1 * (most - least) or 0.01
        axes.set_ylim(least - 3 * margin, most + margin)
        axes.legend(loc="lower right", fontsize="small", handlelength=4)
        beside = axes.twinx()
        share = drifting_table.shares(num_steps, settings.period)
        beside.fill_between(range(num_steps), share, color="gray", alpha=0.2, lw=0)
        beside.set_ylim(0, 5)
        beside.set_yticks([0, 1])
        label = f"share of large {settings.shift_by}"
        beside.set_ylabel(label, loc="bottom", fontsize="small")
