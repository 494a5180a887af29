"""Results of a comparison: one line for each case and average of weights.

Formal guarantees:
  - ``summarise`` reports every case, with mean and sample standard deviation over its
    seeds, whatever the result.
  - A target is called proven only if the accountant proves that the noise suffices, or
    the statement of every run is within the target.  All others say "no guarantee".

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from trainer.experiments.comparison.case import Case, is_private
from trainer.model.metrics import LOWER_IS_BETTER
from trainer.report.fitness import warnings
from trainer.settings.comparison_settings import LAST, OPTIMISTIC, OWN
from trainer.settings.train_settings import TrainSettings

PROVEN = "proven"
NO_GUARANTEE = "no guarantee"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the table: runs that differ only in their seed.

    Attributes:
      sampler: Sampler of the batches.
      expected_batch_size: Expected batch size.
      num_epochs: Epochs of the batches; None if their steps were given.
      method: The training method.
      method_settings: The method's own settings.
      learning_rate: Learning rate of the optimizer; None for that of the plan, without
        privacy.
      l2_norm_clip: Bound on the norm of one example's gradient, or "auto"; None without
        privacy.
      weights: "last", or the average of iterates that was evaluated.
      target_epsilon: Target that the noise was chosen for; None without a target.
      delta: Delta of every epsilon here; None without privacy.
      noise_rule: One of ``NOISE_RULES`` or "given"; None without privacy.
      guarantee: Whether the target is met: "proven" or "no guarantee"; None without a
        target.
      noise_multiplier: Noise multiplier of the runs; None without noise.
      epsilon: Epsilon proven for these batches and noise; None if nothing is proven.
      epsilon_lower_bound: Lower bound on any provable epsilon; None if unknown.
      metric: Name of the metric.
      mean: Mean over the seeds.
      stddev: Sample standard deviation over the seeds; None for one seed.
      num_seeds: Number of runs of the case.
      others: Other metrics whose means over the seeds a reader should see.
      warnings: Why a model of the case is not fit for use (see ``report.fitness``).
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
    noise_rule: str | None
    guarantee: str | None
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
    results: Iterable[tuple[Case, dict[str, Any]]], *, metric: str
) -> list[Outcome]:
    """Returns one outcome for each case and average, in order of first occurrence.

    Args:
      results: For each run its case, and what ``Runs.result`` returned.
      metric: Name of the held-out metric, such as "auc".

    Raises:
      InputError: a run has no such metric.
    """
    cases: dict[tuple[str, str], Case] = {}
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


def _outcome(case: Case, weights: str, found: list[_Found], metric: str) -> Outcome:
    settings, batches = case.settings, case.batches
    means = _means([metrics for metrics, _ in found])
    values = [metrics[metric] for metrics, _ in found]
    privacy = found[0][1] if is_private(settings) else {}
    epsilon = _epsilon(case, found) if privacy else None
    return Outcome(
        sampler=batches.sampler,
        expected_batch_size=batches.expected_batch_size,
        num_epochs=batches.num_epochs,
        method=settings.method,
        method_settings=dict(settings.method_settings),
        learning_rate=_rate(settings, privacy),
        l2_norm_clip=settings.l2_norm_clip,
        weights=weights,
        target_epsilon=case.target_epsilon,
        delta=settings.target_delta,
        noise_rule=case.noise_rule,
        guarantee=_guarantee(case, epsilon),
        noise_multiplier=privacy.get("noise_multiplier"),
        epsilon=epsilon,
        epsilon_lower_bound=privacy.get("epsilon_lower_bound"),
        metric=metric,
        mean=statistics.fmean(values),
        stddev=statistics.stdev(values) if len(values) > 1 else None,
        num_seeds=len(values),
        others={n: means[n] for n in LOWER_IS_BETTER if n in means and n != metric},
        warnings=list(warnings({**means, "guessing": found[0][0]["guessing"]})),
    )


def _rate(settings: TrainSettings, privacy: Mapping[str, Any]) -> float | None:
    """Returns the learning rate of private runs; None if it is that of the plan."""
    plan = privacy.get("plan")
    if plan is None:
        return settings.learning_rate
    noise = privacy["noise_multiplier"]
    return settings.for_plan(DpSgdPlan.from_json(plan), noise).learning_rate


def _means(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [n for n in found[0] if all(_is_number(each.get(n)) for each in found)]
    return {name: statistics.fmean(each[name] for each in found) for name in names}


def _epsilon(case: Case, found: list[_Found]) -> float | None:
    """Returns the epsilon that is proven for all runs; None if one has none."""
    stated = [privacy.get("epsilon") for _, privacy in found]
    values = [value for value in stated if value is not None and math.isfinite(value)]
    if len(values) < len(stated):
        return None
    # Own noise was verified at the target itself, where a search for epsilon ends a
    # little above.
    if case.noise_rule == OWN and case.target_epsilon is not None:
        values = [min(value, case.target_epsilon) for value in values]
    return max(values)


def _guarantee(case: Case, epsilon: float | None) -> str | None:
    target = case.target_epsilon
    if target is None:
        return None
    is_met = epsilon is not None and epsilon <= target
    return PROVEN if is_met and case.noise_rule != OPTIMISTIC else NO_GUARANTEE
