"""The moving average of the weights, by hand."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from accounting.validation import InputError
from trainer.averaging import MovingAverage, newest_weight
from trainer.tf_privacy import tf


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
    np.testing.assert_allclose(average.variables[0].numpy(), wanted, rtol=1e-5)


def test_swapping_leaves_the_variables_as_they_were() -> None:
    variable = tf.Variable([0.1, 0.2])
    average = MovingAverage([variable], decay=0.5)
    variable.assign([0.3, 0.7])
    with contextlib.suppress(KeyError), average.swapped():
        np.testing.assert_array_equal(variable, np.array([0.1, 0.2], "f4"))
        raise KeyError
    np.testing.assert_array_equal(variable, np.array([0.3, 0.7], "f4"))
