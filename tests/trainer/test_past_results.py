"""What is made of kept iterates, on a model of one weight."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from trainer.aggregation_settings import AggregationSettings
from trainer.held_out import metrics_of
from trainer.iterates import Iterates
from trainer.past_results import PastResults
from trainer.tf_privacy import tf

INPUTS = np.array([-2.0, -1.0, 1.0, 3.0])
LABELS = np.array([0, 1, 0, 1])


class _HeldOut:
    """Stands for the files: one column of four numbers."""

    def predictions(self, predict: Any) -> tuple[np.ndarray, np.ndarray]:
        return LABELS, predict({"x": INPUTS})

    def evaluate(self, predict: Any) -> Any:
        return metrics_of(*self.predictions(predict))


@pytest.fixture
def weight() -> Any:
    return tf.Variable(np.float32(0.1))


@pytest.fixture
def iterates(tmp_path: pathlib.Path) -> Iterates:
    kept = Iterates(run=tmp_path, run_key=bytes(32), steps=(1, 2, 3))
    for step, value in ((1, -1.0), (2, 0.5), (3, 2.0)):
        kept.keep(step, [np.float32(value)])
    return kept


def _results(iterates: Iterates, weight: Any, **settings: Any) -> PastResults:
    held_out: Any = _HeldOut()
    return PastResults(
        iterates, [weight], lambda rows: float(weight) * rows["x"], held_out,
        AggregationSettings(keep_last=3, **settings),
    )  # fmt: skip


def test_every_aggregate_by_hand(iterates: Iterates, weight: Any) -> None:
    results = _results(iterates, weight, keep_decay=0.5)
    metrics, uncertainty = results.evaluate(lambda name: None)
    assert uncertainty is None
    # UPA: weight 1/2.  EMA: (-1 + 2 * 0.5 + 4 * 2) / 7 = 8/7.
    assert metrics["upa"] == metrics_of(LABELS, INPUTS / 2).to_json()
    loss = metrics_of(LABELS, INPUTS * 8 / 7).log_loss
    assert metrics["past_ema"]["log_loss"] == pytest.approx(loss, rel=1e-6)
    each = [1 / (1 + np.exp(-value * INPUTS)) for value in (-1.0, 0.5, 2.0)]
    opa = np.mean(each, 0)
    loss = -np.log(np.where(LABELS, opa, 1 - opa)).mean()
    assert metrics["opa"]["log_loss"] == pytest.approx(loss, rel=1e-6)
    # Votes for label 1: 1, 1, 2, 2 of 3.
    assert metrics["omv"]["accuracy"] == 0.5
    assert metrics["omv"]["auc"] == (0.5 + 1 + 0 + 0.5) / 4


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
