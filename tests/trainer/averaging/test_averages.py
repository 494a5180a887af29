"""Averages of the weights during training, by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from trainer.averaging.averages import (
    MovingAverage,
    TailAverage,
    TrainingAverages,
    newest_weight,
    weights_of,
)
from trainer.core.tf_compat import tf
from trainer.settings.aggregation_settings import AggregationSettings


def test_warm_up_by_hand() -> None:
    # 9/11, 9/12, ... until 1 - decay is larger.
    assert newest_weight(1, 0.9) == pytest.approx(9 / 11)
    assert newest_weight(2, 0.9) == pytest.approx(9 / 12)
    assert newest_weight(79, 0.9) == pytest.approx(9 / 89)
    assert newest_weight(81, 0.9) == pytest.approx(0.1)
    assert newest_weight(1, 0.0) == 1.0
    for decay in (-0.1, 1.0):
        with pytest.raises(InputError):
            newest_weight(1, decay)


def test_the_average_follows_its_formula() -> None:
    variable = tf.Variable([2.0, -1.0])
    average = MovingAverage([variable], decay=0.7)
    wanted = np.array([2.0, -1.0])
    for step in range(1, 40):
        value = np.array([np.sin(step), step])
        variable.assign(value.astype("f4"))
        average.update(step)
        beta = max(0.3, 9 / (10 + step))
        wanted = (1 - beta) * wanted + beta * value
    np.testing.assert_allclose(average.values()[0].numpy(), wanted, rtol=1e-5)


def test_the_tail_average_of_three_by_hand() -> None:
    # theta_0, ..., theta_4 = 1, 4, 7, 1, 2 and twice that.
    weights = [tf.Variable(1.0), tf.Variable([[2.0]])]
    average = TailAverage(weights, tail=3)
    found = [float(average.values()[0])]
    for step, value in enumerate((4.0, 7.0, 1.0, 2.0), 1):
        weights[0].assign(value)
        weights[1].assign([[2 * value]])
        average.update(step)
        found.append(float(average.values()[0]))
        assert float(average.values()[1][0, 0]) == pytest.approx(2 * found[-1])
    # 1, (1+4)/2, (1+4+7)/3, (4+7+1)/3, (7+1+2)/3
    assert found == pytest.approx([1, 2.5, 4, 4, 10 / 3])


@pytest.mark.parametrize("tail", [1, 2, 5])
def test_the_tail_average_is_the_mean_of_exactly_the_last_iterates(tail: int) -> None:
    # A value of 1e30 that has left the tail must leave no trace: a running sum of
    # single or double precision would have lost the digits of all others for good.
    random = np.random.default_rng(tail)
    iterates = random.normal(0, 1, (40, 4)).astype("f4")
    iterates[13] = 1e30
    weight = tf.Variable(iterates[0])
    average = TailAverage([weight], tail)
    for step in range(1, 40):
        weight.assign(iterates[step])
        average.update(step)
        if step < 13 or step >= 13 + 2 * tail:
            wanted = iterates[max(0, step - tail + 1) : step + 1].astype("f8").mean(0)
            np.testing.assert_array_equal(average.values()[0], wanted.astype("f4"))


def test_swapping_leaves_the_variables_as_they_were() -> None:
    variable = tf.Variable([0.1, 0.2])
    averages = TrainingAverages([variable], AggregationSettings(ema_decay=0.5))
    variable.assign([0.3, 0.7])
    with contextlib.suppress(KeyError), averages.swapped("ema"):
        np.testing.assert_array_equal(variable, np.array([0.1, 0.2], "f4"))
        raise KeyError
    np.testing.assert_array_equal(variable, np.array([0.3, 0.7], "f4"))
    with weights_of([variable], [np.array([5, 6], "f4")]):
        np.testing.assert_array_equal(variable, [5, 6])
    np.testing.assert_array_equal(variable, np.array([0.3, 0.7], "f4"))


def _train(settings: AggregationSettings, steps: int) -> list[float]:
    """Returns theta_0, ... of theta -> theta / 2 + 1, and the final average."""
    weight = tf.Variable(0.0)
    averages = TrainingAverages([weight], settings)
    iterates = [0.0]
    for step in range(steps):
        averages.before_step(step)
        weight.assign(weight / 2 + 1)
        averages.after_step(step + 1)
        iterates.append(float(weight))
    return [*iterates, *(float(averages[name].values()[0]) for name in averages)]


def test_training_over_the_tail_average_by_hand() -> None:
    # Ordinary: 0, 1, 3/2, 7/4, 15/8.
    plain = _train(AggregationSettings(tail=2), 4)
    assert plain == pytest.approx([0, 1, 1.5, 1.75, 1.875, (1.75 + 1.875) / 2])
    # From step 2 on: averages 0, 1/2, 5/4; theta_3 = 13/8, average 25/16; theta_4 =
    # 57/32, average 109/64.
    settings = AggregationSettings(tail=2, train_over="uta", aggregate_from=2)
    assert _train(settings, 4) == pytest.approx([0, 1, 1.5, 13 / 8, 57 / 32, 109 / 64])


def test_training_over_the_moving_average_by_hand() -> None:
    # decay 0.5: beta_1 = 9/11, beta_2 = 3/4, beta_3 = 9/13.  From step 1 on: averages
    # 0, 9/11; theta_2 = 31/22, average 111/88; theta_3 = 287/176; then the average.
    settings = AggregationSettings(ema_decay=0.5, train_over="ema", aggregate_from=1)
    last = 4 / 13 * (111 / 88) + 9 / 13 * (287 / 176)
    assert _train(settings, 3) == pytest.approx([0, 1, 31 / 22, 287 / 176, last])


def test_the_state_of_the_averages_is_in_their_variables() -> None:
    settings = AggregationSettings(ema_decay=0.9, tail=3)
    weights: list[Any] = [tf.Variable([1.0, 2.0]) for _ in range(2)]
    left, right = (TrainingAverages([w], settings) for w in weights)
    for step in range(1, 9):
        weights[0].assign(np.array([np.sin(step), np.cos(step)], "f4"))
        left.after_step(step)
        if step == 4:
            for old, new in zip(left.variables, right.variables, strict=True):
                new.assign(old.numpy())
        if step > 4:
            weights[1].assign(weights[0])
            right.after_step(step)
        # At once: the sums of the tail are formed anew after some steps.
        for name in left if step >= 4 else ():
            for a, b in zip(left[name].values(), right[name].values(), strict=True):
                np.testing.assert_array_equal(a, b)
