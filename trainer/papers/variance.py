"""Compares the spread of one run's iterates with the spread of independent runs.

    s_x     standard deviation over R runs of the last weights' prediction for x
    S_rx    standard deviation of the prediction for x over the k kept iterates of run
            r; see ``averaging.uncertainty``

One run gives S_rx at no cost; s_x takes R runs.  If both estimated one variance from
independent normal predictions, S^2 / s^2 would follow Fisher's F distribution with
k - 1 and R - 1 degrees of freedom.  The theory predicts this for iterates that are late
and far apart.  Iterates that are too close together make S too small; iterates of a run
that has not converged make it too large.

    OUT/batches/, OUT/runs/     see ``compare``
    OUT/variance.json, .md      the results

Formal guarantees:
  - Every run has its own batches and noise; all start from the same weights.
  - Batches and runs are made as in a comparison: a stopped experiment resumes with the
    same settings, and finished ones are used only if made with these settings.
  - The epsilon reported for all runs together is that of basic composition.

Public: what the runs publish, if the held-out examples need no protection.  Every run
is a separate release: together they cost the sum of their epsilons and of their deltas.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, section 5.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import f as fisher

from accounting.core import deltas
from accounting.core.intervals import upper_text
from accounting.core.plan import DpSgdPlan
from trainer.averaging.uncertainty import PREDICTION, column_names
from trainer.experiments.comparison.case import Case, Trial
from trainer.experiments.comparison.runs import (
    Runs,
    Say,
    mark,
    settled,
    silent,
    training_data,
)
from trainer.export.serving import PROBABILITIES, PROBABILITY
from trainer.model.metrics import in_words
from trainer.papers.settings import VarianceSettings
from trainer.prediction.named_classes import PREDICTED
from trainer.prediction.predict import predict
from trainer.report.report import Report, Table
from trainer.report.run_files import UNCERTAINTY_NAME
from trainer.run import privacy
from trainer.settings.method_settings import NON_PRIVATE

#: In the paper, both kinds of widths are within this factor of each other.
FACTOR = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Both standard deviations for one output of the model.

    Attributes:
      output: Name of the output.
      over_runs: s, shape (examples, ...).
      of_iterates: S of every run, shape (runs, examples, ...).
      num_iterates: k.
    """

    output: str
    over_runs: np.ndarray
    of_iterates: np.ndarray
    num_iterates: int

    @property
    def ratios(self) -> np.ndarray:
        """S / s of all runs and examples, except examples without any variation."""
        varies = self.over_runs > 0
        ratios: np.ndarray = self.of_iterates[:, varies] / self.over_runs[varies]
        return ratios.ravel()

    @property
    def variance_ratios(self) -> list[float]:
        """For every run, mean S^2 over mean s^2, where means are over the examples."""
        mean = float((self.over_runs**2).mean())
        return [float((one**2).mean()) / mean for one in self.of_iterates]

    @property
    def share_within(self) -> float:
        """The share of ``ratios`` within ``FACTOR`` of 1."""
        ratios = self.ratios
        return float(((ratios >= 1 / FACTOR) & (ratios <= FACTOR)).mean())

    @property
    def expected_share(self) -> float:
        """Expected ``share_within`` if both estimated one variance."""
        degrees = self.num_iterates - 1, len(self.of_iterates) - 1
        ends = fisher.cdf([FACTOR**-2, FACTOR**2], *degrees)
        return float(ends[1] - ends[0])

    def to_json(self) -> dict[str, Any]:
        """Returns the summary, JSON-serialisable."""
        quartiles = np.quantile(self.ratios, [0.25, 0.5, 0.75])
        return {
            "output": self.output,
            "num_examples": len(self.over_runs),
            "mean_stddev_over_runs": float(self.over_runs.mean()),
            "mean_stddev_of_iterates": float(self.of_iterates.mean()),
            "variance_ratios": self.variance_ratios,
            "mean_variance_ratio": statistics.fmean(self.variance_ratios),
            "stddev_ratio_quartiles": quartiles.tolist(),
            "factor": FACTOR,
            "share_within_factor": self.share_within,
            "expected_share_within_factor": self.expected_share,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variances(Report):
    """The report of the experiment.

    Attributes:
      spreads: One for each output of the model.
    """

    spreads: Sequence[Spread]


def variance(settings: VarianceSettings, say: Say = silent) -> Variances:
    """Makes all batches and runs that are not done yet, and compares both spreads.

    Arguments and errors as for `compare`.
    """
    settings = settled(settings)
    plan = settings.batches.plan(training_data(settings).num_examples)
    _check(settings, plan)
    mark(settings)
    runs = Runs(settings, say)
    case = Case(batches=settings.batches, settings=settings.trained)
    say(f"{settings.seeds} runs, each of which costs its own epsilon")
    last, stddevs, results = [], [], []
    for seed in range(settings.seeds):
        trial = Trial(
            name=f"{case.name}-seed{seed}",
            batches=case.name_of_batches(seed),
            settings=settings.trained,
        )
        runs.make_batches(trial.batches, settings.batches, plan)
        say(f"[{seed + 1}/{settings.seeds}] {trial.name}")
        results.append(runs.run(trial))
        run = runs.request(trial).run
        last.append(_predictions(run, settings.held_out))
        stddevs.append(_stddevs(run / UNCERTAINTY_NAME, list(last[0])))
    assert settings.training.keep_last is not None  # checked by the settings
    found = spreads(last, stddevs, num_iterates=settings.training.keep_last)
    return report(settings, found, results)


def spreads(
    last: Sequence[Mapping[str, np.ndarray]],
    stddevs: Sequence[Mapping[str, np.ndarray]],
    *,
    num_iterates: int,
) -> tuple[Spread, ...]:
    """Returns both standard deviations of every output.

    Args:
      last: For every run, output -> prediction of its last weights, (examples, ...).
      stddevs: For every run, output -> standard deviation over its kept iterates.
      num_iterates: Number of iterates that each run kept.
    """
    return tuple(
        Spread(
            output=name,
            over_runs=np.stack([one[name] for one in last]).std(0, ddof=1),
            of_iterates=np.stack([one[name] for one in stddevs]),
            num_iterates=num_iterates,
        )
        for name in last[0]
    )


def _check(settings: VarianceSettings, plan: DpSgdPlan) -> None:
    """Refuses settings that every run would refuse, as far as known in advance."""
    training = settings.training
    training.check_steps(plan.num_steps)
    if training.target_delta is not None:
        of_all = settings.seeds * training.target_delta
        deltas.check(of_all, allow_large=training.allow_large_delta)
    if training.method == NON_PRIVATE or training.target_epsilon is None:
        return
    assert training.target_delta is not None  # checked by the settings
    privacy.noise_multiplier(
        plan,
        epsilon=training.target_epsilon,
        delta=training.target_delta,
        theorem=privacy.theorem_of_settings(training),
    )


def _predictions(run: pathlib.Path, held_out: pathlib.Path) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory(prefix="dpsgd-") as folder:
        out = pathlib.Path(folder) / "predictions.parquet"
        predict(run, held_out, out)
        found = _arrays(out, but=PREDICTED)
    of_classes = [v for name, v in found.items() if name.startswith(f"{PROBABILITY}_")]
    # The spread is that of one output, as in the file of the uncertainty.
    return {PROBABILITIES: np.stack(of_classes, -1)} if of_classes else found


def _stddevs(path: pathlib.Path, outputs: list[str]) -> dict[str, np.ndarray]:
    found = _arrays(path)
    # A single output has another name among predictions.
    names = column_names(outputs if len(outputs) > 1 else [PREDICTION])
    columns = [columns[1] for columns in names.values()]
    return {o: found[column] for o, column in zip(outputs, columns, strict=True)}


def _arrays(path: pathlib.Path, but: str | None = None) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    names = [name for name in table.column_names if name != but]
    return {n: np.array(table[n].to_pylist(), np.float64) for n in names}


# -- report ----------------------------------------------------------------------------


def report(
    settings: VarianceSettings,
    found: Sequence[Spread],
    results: Sequence[Mapping[str, Any]],
) -> Variances:
    """Returns the report of an experiment.

    Args:
      settings: Settings of the experiment.
      found: One for each output of the model.
      results: Metrics and privacy of every run.
    """
    metrics = [float(one["metrics"][settings.metric]) for one in results]
    stated = results[0]["privacy"]
    of_one = [stated.get(name) for name in ("epsilon", "delta")]
    epsilon, delta = (None if None in of_one else settings.seeds * x for x in of_one)
    notes = [
        *_notes(settings, found),
        f"Held-out {in_words(settings.metric)} of the last weights over runs: mean "
        f"{statistics.fmean(metrics):.4f}, standard deviation "
        f"{statistics.stdev(metrics):.4f}.",
        _privacy_note(settings.seeds, epsilon, delta),
    ]
    headings = (
        "output", "over runs", "of iterates", "variance ratio", f"within x{FACTOR:g}",
        "if exact",
    )  # fmt: skip
    return Variances(
        stem="variance",
        title="Iterates of one run against independent runs",
        tables=[Table(headings=headings, rows=list(map(_cells, found)))],
        notes=notes,
        fields={
            "num_runs": settings.seeds,
            "num_iterates": found[0].num_iterates,
            "metric": settings.metric,
            "values": metrics,
            "outputs": [one.to_json() for one in found],
            "privacy_of_one_run": stated,
            "epsilon_of_all_runs": epsilon,
            "delta_of_all_runs": delta,
            "notes": notes,
        },
        spreads=found,
    )


def _notes(settings: VarianceSettings, found: Sequence[Spread]) -> list[str]:
    """Returns what explains the table."""
    return [
        f"Over runs: standard deviation of the last weights' predictions over "
        f"{settings.seeds} independent runs, mean over {len(found[0].over_runs):,} "
        "held-out examples. Of iterates: standard deviation over "
        f"{found[0].num_iterates} kept iterates of one run, mean over examples and "
        "runs. Variance ratio: mean variance of iterates over mean variance of runs; "
        f"mean and range over runs. Within x{FACTOR:g}: share of examples whose two "
        "standard deviations are within this factor, and the share expected if both "
        "estimated one variance.",
        "All runs start from the same weights and use the same examples: only noise "
        "and sampling differ.",
    ]


def _privacy_note(runs: int, epsilon: float | None, delta: float | None) -> str:
    cost = "none is stated for one run"
    if epsilon is not None and delta is not None:
        cost = f"together {upper_text(epsilon)} at delta {delta!r}, by addition"
    return (
        f"Each of the {runs} runs is a release and costs its own epsilon: {cost}. The "
        "iterates of a run cost nothing in addition. Held-out examples are not "
        "protected."
    )


def _cells(one: Spread) -> list[str]:
    ratios = one.variance_ratios
    return [
        one.output,
        f"{one.over_runs.mean():.4g}",
        f"{one.of_iterates.mean():.4g}",
        f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{100 * one.share_within:.0f} %",
        f"{100 * one.expected_share:.0f} %",
    ]
