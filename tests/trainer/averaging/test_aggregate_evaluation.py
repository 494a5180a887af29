"""Results from kept iterates, for a model of one weight."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from trainer.averaging.iterates import Iterates, PastResults
from trainer.core.tf_compat import keras, tf
from trainer.model.evaluation import Evaluator
from trainer.model.losses import (
    BINARY_CROSS_ENTROPY,
    Loss,
    loss_by_name,
)
from trainer.model.metrics import Metrics, binary_metrics
from trainer.model.trainable_model import TrainableModel
from trainer.settings.aggregation_settings import AggregationSettings

INPUTS = np.array([-2.0, -1.0, 1.0, 3.0])
LABELS = np.array([0, 1, 0, 1])


class _Evaluator(Evaluator):
    """Stands in for held-out files with one column of four numbers."""

    def __init__(self, give: Callable[[], Any], loss: Loss, labels: Any) -> None:
        network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model = TrainableModel(network=network, description={}, loss=loss)
        nothing: Any = None
        super().__init__(held_out=nothing, model=model, predict=nothing)
        object.__setattr__(self, "found", lambda: (labels, give()))

    def outputs(self) -> tuple[Any, Any]:
        return self.found()  # type: ignore[attr-defined]

    def metrics(self) -> Metrics:
        return self.metrics_of(*self.outputs())


@pytest.fixture
def weight() -> Any:
    return tf.Variable(np.float32(0.1))


@pytest.fixture
def iterates(tmp_path: pathlib.Path) -> Iterates:
    kept = Iterates(run=tmp_path, steps=(1, 2, 3))
    for step, value in ((1, -1.0), (2, 0.5), (3, 2.0)):
        kept.keep(step, [np.float32(value)])
    return kept


def _results(
    iterates: Iterates,
    weight: Any,
    loss: Loss = BINARY_CROSS_ENTROPY,
    **settings: Any,
) -> PastResults:
    evaluator = _Evaluator(lambda: float(weight) * INPUTS, loss, LABELS)
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


def _of(give: Callable[[], Any], loss: Loss, labels: Any, kept: Iterates, weight: Any,
        **settings: Any) -> tuple[dict[str, Any], Any]:  # fmt: skip
    chosen = AggregationSettings(keep_last=3, **settings)
    evaluator = _Evaluator(give, loss, labels)
    return PastResults(kept, [weight], evaluator, chosen).evaluate(lambda name: None)


@pytest.mark.parametrize("one_hot", [False, True])
def test_classes_have_a_vote_a_mean_probability_and_an_interval_each(
    one_hot: bool, iterates: Iterates, weight: Any, tmp_path: pathlib.Path
) -> None:
    name = f"{'' if one_hot else 'sparse_'}categorical_crossentropy"
    classes = np.array([0, 1, 2, 2])
    scores = np.outer(INPUTS, [-1.0, 0.0, 1.0]).astype("f4")
    metrics, _ = _of(
        lambda: (weight * scores).numpy(), loss_by_name(name),
        np.eye(3)[classes] if one_hot else classes, iterates, weight, uncertainty=0.9,
    )  # fmt: skip
    logits = [value * scores for value in (-1.0, 0.5, 2.0)]
    each = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in logits]
    opa = np.mean(each, 0)
    loss = -np.log(opa[range(4), classes]).mean()
    assert metrics["opa"]["log_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["opa"]["accuracy"] == (opa.argmax(1) == classes).mean()
    # Two of three iterates say 0, 0, 2, 2.
    assert metrics["omv"]["accuracy"] == 0.75
    table = pq.read_table(tmp_path / "uncertainty.parquet")
    np.testing.assert_allclose(table["prediction"].to_pylist(), opa, rtol=1e-5)
    stddev = np.std(each, 0, ddof=1)
    np.testing.assert_allclose(table["stddev"].to_pylist(), stddev, rtol=1e-4)
    low = np.array(table["low"].to_pylist())
    assert low.min() == 0  # cut off
    assert low.max() > 0
