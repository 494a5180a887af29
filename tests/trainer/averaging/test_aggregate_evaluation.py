"""What is made of kept iterates, on a model of one weight."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from trainer.averaging.aggregate_evaluation import PastResults
from trainer.averaging.iterates import Iterates
from trainer.model.losses import BINARY_CROSS_ENTROPY, Loss, loss_by_name
from trainer.model.metrics import Metrics, binary_metrics
from trainer.model.trainable_model import TrainableModel
from trainer.settings.aggregation_settings import AggregationSettings
from trainer.tf_compat import tf

INPUTS = np.array([-2.0, -1.0, 1.0, 3.0])
LABELS = np.array([0, 1, 0, 1])


class _Evaluator:
    """Stands for held-out files with one column of four numbers."""

    def __init__(self, weight: Any, loss: Loss) -> None:
        self._weight = weight
        self.model = TrainableModel(network=None, description={}, loss=loss)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return LABELS, float(self._weight) * INPUTS

    def metrics(self) -> Metrics:
        return binary_metrics(*self.logits())


@pytest.fixture
def weight() -> Any:
    return tf.Variable(np.float32(0.1))


@pytest.fixture
def iterates(tmp_path: pathlib.Path) -> Iterates:
    kept = Iterates(run=tmp_path, run_key=bytes(32), steps=(1, 2, 3))
    for step, value in ((1, -1.0), (2, 0.5), (3, 2.0)):
        kept.keep(step, [np.float32(value)])
    return kept


def _results(
    iterates: Iterates,
    weight: Any,
    loss: Loss = BINARY_CROSS_ENTROPY,
    **settings: Any,
) -> PastResults:
    evaluator: Any = _Evaluator(weight, loss)
    chosen = AggregationSettings(keep_last=3, **settings)
    return PastResults(iterates, [weight], evaluator, chosen)


def test_every_aggregate_by_hand(iterates: Iterates, weight: Any) -> None:
    results = _results(iterates, weight, keep_decay=0.5)
    metrics, uncertainty = results.evaluate(lambda name: None)
    assert uncertainty is None
    # UPA: weight 1/2.  EMA: (-1 + 2 * 0.5 + 4 * 2) / 7 = 8/7.
    assert metrics["upa"] == binary_metrics(LABELS, INPUTS / 2)
    loss = binary_metrics(LABELS, INPUTS * 8 / 7)["log_loss"]
    assert metrics["past_ema"]["log_loss"] == pytest.approx(loss, rel=1e-6)
    each = [1 / (1 + np.exp(-value * INPUTS)) for value in (-1.0, 0.5, 2.0)]
    opa = np.mean(each, 0)
    loss = -np.log(np.where(LABELS, opa, 1 - opa)).mean()
    assert metrics["opa"]["log_loss"] == pytest.approx(loss, rel=1e-6)
    # Votes for label 1: 1, 1, 2, 2 of 3.
    assert metrics["omv"]["accuracy"] == 0.5
    assert metrics["omv"]["auc"] == (0.5 + 1 + 0 + 0.5) / 4


def test_only_weights_are_averaged_of_a_model_without_probabilities(
    iterates: Iterates, weight: Any
) -> None:
    results = _results(iterates, weight, loss_by_name("huber"))
    assert set(results.evaluate(lambda name: None)[0]) == {"past_ema", "upa"}


def test_what_is_asked_for_is_exported_with_its_weights_and_the_model_is_left_as_it_was(
    iterates: Iterates, weight: Any
) -> None:
    exported = {}
    results = _results(iterates, weight, export=("upa",))
    results.evaluate(lambda name: exported.update({name: float(weight)}))
    assert exported == {"upa": 0.5}
    assert float(weight) == np.float32(0.1)


def test_every_iterate_is_read_twice_and_one_at_a_time(
    iterates: Iterates, weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    load = Iterates.load

    def spy(self: Iterates, step: int) -> Any:
        read.append(step)
        return load(self, step)

    monkeypatch.setattr(Iterates, "load", spy)
    _results(iterates, weight, uncertainty=0.9).evaluate(lambda name: None)
    assert read == [1, 2, 3, 1, 2, 3]
    assert next(iter(iterates)) and read[6:] == [1]  # noqa: PT018
