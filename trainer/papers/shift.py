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
from typing import Any

import numpy as np

from accounting.core.plan import DETERMINISTIC
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.core.run.run_record import CURVE_NAME
from trainer.experiments.comparison.case import Case
from trainer.experiments.comparison.runs import (
    Runs,
    Say,
    settled,
    silent,
    training_data,
)
from trainer.papers import drifting_table
from trainer.papers.settings import ShiftSettings
from trainer.report.metrics_files import read_curve
from trainer.settings.comparison_settings import LAST

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
class Shift:
    """Results of the experiment.

    Attributes:
      settings: Settings of the experiment.
      num_steps: Number of steps in every run.
      courses: The course of the last iterate, then of the averages.
    """

    settings: ShiftSettings
    num_steps: int
    courses: tuple[Course, ...]


def shift(
    settings: ShiftSettings, say: Say = silent, make_batches: str = MAKE_BATCHES
) -> Shift:
    """Orders the rows, makes the runs that are not done yet, and reads their curves.

    Arguments and errors as for `compare`.
    """
    size, period = settings.expected_batch_size, settings.period
    settings = settled(settings)
    num_steps = drifting_table.num_steps_of(
        training_data(settings).num_examples, size, period
    )
    settings.trained.check_steps(num_steps)
    data = settings.out / "data"
    drifting_table.write(
        settings.source, data, column=settings.shift_by, batch_size=size, period=period
    )
    say(NOT_PRIVATE)
    ordered = dataclasses.replace(settings, source=str(data))
    runs = Runs(ordered, say, make_batches)
    curves = [
        _curve(runs, settings, num_steps, seed, say) for seed in range(settings.seeds)
    ]
    return Shift(
        settings=settings, num_steps=num_steps, courses=_courses(settings, curves)
    )


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
