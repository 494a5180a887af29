"""Metrics, models and intervals from the kept iterates of a finished run.

Formal guarantees:
  - Every kept iterate is read at most twice, one at a time, oldest first: memory does
    not depend on their number (a user's aggregate gets all at once, read a third time).
    A few numbers are kept per held-out example, output and class.
  - The weights of the model are left unchanged, bit for bit.

Public: all results, if the held-out examples need no protection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.averaging.aggregates import (
    Outputs,
    OutputsByName,
    WeightedMean,
    ema_weights,
    uniform_weights,
)
from trainer.averaging.custom_aggregate import CustomAggregate
from trainer.averaging.iterates import Iterates
from trainer.averaging.uncertainty import PREDICTION, write_uncertainty
from trainer.model.evaluation import Evaluator
from trainer.model.metrics import BINARY, Metrics, auc, correct
from trainer.model.swapped_weights import weights_of
from trainer.model.target import Target
from trainer.report.run_files import UNCERTAINTY_NAME
from trainer.settings.aggregation_settings import (
    OMV,
    OPA,
    PAST_CUSTOM,
    PAST_EMA,
    UPA,
    AggregationSettings,
)


class PastResults:
    """Evaluates the kept iterates of a finished run.

    Args:
      iterates: At least one.
      weights: The trainable variables of the model.
      evaluator: Evaluates the model on the held-out examples; None without any.
      settings: Settings of averages, intervals and exports.
    """

    def __init__(
        self,
        iterates: Iterates,
        weights: list[Any],
        evaluator: Evaluator | None,
        settings: AggregationSettings,
    ) -> None:
        self._iterates = iterates
        self._weights = weights
        self._evaluator = evaluator
        self._settings = settings

    def evaluate(
        self, export: Callable[[str], None]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Returns name -> metrics of every aggregate, and a summary of the intervals.

        Without an evaluator, there are none, and averages are only exported.
        ``export`` is called with each average to export, while the model has its
        weights.
        """
        evaluator, metrics = self._evaluator, {}
        for name, values in self._weight_averages().items():
            with weights_of(self._weights, values):
                if evaluator is not None:
                    metrics[name] = evaluator.metrics()
                if name in self._settings.export:
                    export(name)
        if evaluator is None:
            return {}, None
        labels, outputs = self._outputs(evaluator)
        metrics[OPA] = evaluator.metrics_of(labels, outputs.outputs)
        for vote in outputs.votes:
            metrics[OMV] = majority_metrics(labels, vote)
        return metrics, self._intervals(outputs, evaluator.target)

    def _intervals(
        self, outputs: OutputsByName, target: Target | None
    ) -> dict[str, Any] | None:
        level = self._settings.uncertainty
        if level is None:
            return None
        path = self._iterates.run / UNCERTAINTY_NAME
        return write_uncertainty(
            path, outputs, steps=self._iterates.steps, level=level, target=target
        )

    def _weight_averages(self) -> dict[str, list[np.ndarray]]:
        count = len(self._iterates.steps)
        means = {
            PAST_EMA: WeightedMean(ema_weights(count, self._settings.keep_decay)),
            UPA: WeightedMean(uniform_weights(count)),
        }
        for iterate in self._iterates:
            for mean in means.values():
                mean.add(iterate)
        found = {name: mean.values() for name, mean in means.items()}
        if self._settings.aggregate is not None:
            # All at once, since the user's function may need any of them.
            custom = CustomAggregate(self._settings.aggregate)
            found[PAST_CUSTOM] = custom(list(self._iterates))
        return found

    def _outputs(self, evaluator: Evaluator) -> tuple[Any, OutputsByName]:
        loss = evaluator.model.loss
        labels, outputs = None, OutputsByName(loss.task, PREDICTION)
        for iterate in self._iterates:
            with weights_of(self._weights, iterate):
                labels, found = evaluator.outputs()
            outputs.add(found)
        return labels, outputs


def majority_metrics(labels: np.ndarray, outputs: Outputs) -> Metrics:
    """Returns the metrics of the majority vote.

    The AUC is that of the share of votes, which has only k + 1 levels: examples tie,
    and ties count half.  A share of 0 or 1 is no probability: there is no log loss.

    Args:
      labels: 0 or 1, shape (examples,); or classes or one-hot, as of ``correct``.
      outputs: Outputs of k iterates for the same examples.
    """
    share, num_examples = outputs.vote_share, len(labels)
    if outputs.task == BINARY:
        right = outputs.majority == (labels > 0)
        found: Metrics = {"auc": auc(labels, share), "log_loss": None}
    else:
        right, found = correct(labels, share), {"log_loss": None}
    return {**found, "accuracy": float(right.mean()), "num_examples": num_examples}
