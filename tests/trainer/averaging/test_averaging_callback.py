"""The averages in ``model.fit``, against those of the same updates by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.averaging.averaging_callback import AverageWeights
from trainer.settings.aggregation_settings import AggregationSettings
from trainer.tf_compat import keras


def _model(**compile_options: Any) -> Any:
    """One weight w and the loss (w - 2)^2 / 4: w -> w / 2 + 1 at rate 1."""
    model = keras.Sequential(
        [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.build((None, 1))
    optimizer = keras.optimizers.SGD(1.0)
    loss = lambda wanted, found: (found - wanted) ** 2 / 4  # noqa: E731
    model.compile(optimizer, loss=loss, **compile_options)
    return model


def _fit(model: Any, callback: AverageWeights, steps: int) -> None:
    inputs, labels = np.ones((steps, 1)), np.full((steps, 1), 2.0)
    model.fit(inputs, labels, batch_size=1, callbacks=[callback], verbose=0)


def test_the_tail_average_of_a_fit_by_hand() -> None:
    # Weights 0, 1, 3/2, 7/4, 15/8; a second fit goes on.
    model, callback = _model(), AverageWeights(AggregationSettings(tail=3))
    for steps in (3, 1):
        _fit(model, callback, steps)
    assert model.weights[0].numpy().item() == 1.875
    with callback.swapped("uta"):
        assert model.weights[0].numpy().item() == pytest.approx(
            (1.5 + 1.75 + 1.875) / 3
        )
    assert model.weights[0].numpy().item() == 1.875


def test_a_fit_over_the_tail_average_by_hand() -> None:
    # As in test_averaging: from step 2 on 13/8, 57/32; average 109/64.
    settings = AggregationSettings(tail=2, train_over="uta", aggregate_from=2)
    model, callback = _model(), AverageWeights(settings)
    _fit(model, callback, 4)
    assert model.weights[0].numpy().item() == pytest.approx(57 / 32)
    with callback.swapped("uta"):
        assert model.weights[0].numpy().item() == pytest.approx(109 / 64)


def test_averages_begin_with_their_first_fit() -> None:
    # Weights 0, 1 before, which are not averaged; then 1, 3/2, 7/4.
    model, callback = _model(), AverageWeights(AggregationSettings(tail=9))
    model.fit(np.ones((1, 1)), np.full((1, 1), 2.0), verbose=0)
    _fit(model, callback, 2)
    with callback.swapped("uta"):
        assert model.weights[0].numpy().item() == pytest.approx((1 + 1.5 + 1.75) / 3)


class _EverySecond(keras.optimizers.SGD):
    """Updates at every second batch."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.seen = 0

    def apply_gradients(self, pairs: Any, **more: Any) -> Any:
        self.seen += 1
        return None if self.seen % 2 else super().apply_gradients(pairs, **more)


def test_a_step_may_take_several_batches() -> None:
    model, callback = (
        _model(run_eagerly=True),
        AverageWeights(AggregationSettings(tail=2, train_over="uta", aggregate_from=2)),
    )
    model.compile(_EverySecond(), loss=model.loss, run_eagerly=True)
    _fit(model, callback, 8)
    assert model.weights[0].numpy().item() == pytest.approx(57 / 32)


def test_several_steps_between_two_calls_are_refused() -> None:
    model = _model(steps_per_execution=2)
    with pytest.raises(InputError, match="steps_per_execution=1"):
        _fit(model, AverageWeights(AggregationSettings(tail=2)), 4)


@pytest.mark.parametrize(
    "settings",
    [
        AggregationSettings(),
        AggregationSettings(tail=2, keep_last=2),
        AggregationSettings(tail=2, evaluate_averages=True),
    ],
)
def test_what_a_callback_does_not_do_is_refused(settings: AggregationSettings) -> None:
    with pytest.raises(InputError, match="keep_last"):
        AverageWeights(settings)


def test_there_is_no_average_before_the_fit() -> None:
    callback = AverageWeights(AggregationSettings(tail=2))
    with pytest.raises(InputError, match="begun"), callback.swapped("uta"):
        pass
