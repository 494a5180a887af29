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
    OUT/variance.json, .md, .png, .parquet      the results; the Parquet file has both
                                                standard deviations of every example

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

from accounting.core.plan import DpSgdPlan
from pipelines.job.batch_settings import MAKE_BATCHES
from trainer.averaging.uncertainty import PREDICTION, column_names
from trainer.core.run.run_record import UNCERTAINTY_NAME
from trainer.experiments.comparison.case import Case, Trial
from trainer.experiments.comparison.runs import (
    Runs,
    Say,
    settled,
    silent,
    training_data,
)
from trainer.export.serving import PROBABILITIES, PROBABILITY
from trainer.papers.settings import VarianceSettings
from trainer.prediction.named_classes import PREDICTED
from trainer.prediction.predict import predict
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
class Variances:
    """Results of the experiment.

    Attributes:
      settings: Settings of the experiment.
      spreads: One for each output of the model.
      metrics: Held-out metric of every run.
      num_steps: Number of steps in every run.
      privacy: Privacy statement of one run, as JSON.
    """

    settings: VarianceSettings
    spreads: tuple[Spread, ...]
    metrics: tuple[float, ...]
    num_steps: int
    privacy: dict[str, Any]

    @property
    def epsilon_of_all(self) -> tuple[float, float] | None:
        """Epsilon and delta of all runs together; None if a run has none."""
        epsilon, delta = self.privacy.get("epsilon"), self.privacy.get("delta")
        if epsilon is None or delta is None:
            return None
        return self.settings.seeds * epsilon, self.settings.seeds * delta


def variance(
    settings: VarianceSettings, say: Say = silent, make_batches: str = MAKE_BATCHES
) -> Variances:
    """Makes all batches and runs that are not done yet, and compares both spreads.

    Arguments and errors as for `compare`.
    """
    settings = settled(settings)
    plan = settings.batches.plan(training_data(settings).num_examples)
    _check(settings, plan)
    runs = Runs(settings, say, make_batches)
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
    return Variances(
        settings=settings,
        spreads=spreads(last, stddevs, num_iterates=settings.training.keep_last),
        metrics=tuple(float(one["metrics"][settings.metric]) for one in results),
        num_steps=plan.num_steps,
        privacy=results[0]["privacy"],
    )


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
