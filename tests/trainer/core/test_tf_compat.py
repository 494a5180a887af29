"""Settings of TensorFlow and Keras, and arrays and tensors that share memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from trainer.core import tf_compat
from trainer.core.step.noise import aligned
from trainer.core.tf_compat import tf


@pytest.mark.thorough
def test_another_backend_of_keras_is_refused_and_not_overridden() -> None:
    """Seen to fail: Keras ran on TensorFlow, whatever was asked for."""
    command = [sys.executable, "-c", "import trainer.core.tf_compat"]
    chosen = {**os.environ, "KERAS_BACKEND": "jax"}
    ended = subprocess.run(
        command, env=chosen, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "KERAS_BACKEND=jax. Set KERAS_BACKEND=tensorflow" in ended.stderr


# -- shared memory ---------------------------------------------------------------------


def _read_only() -> np.ndarray:
    values = np.arange(40)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "values",
    [
        np.array(2.5),
        np.zeros((0, 3), np.float32),
        np.arange(100)[1:],
        np.arange(24).reshape(4, 6)[:, ::2],
        _read_only(),
        aligned((2, 5), np.zeros),
        aligned(()),
    ],
)
def test_a_tensor_has_the_values_of_its_array(values: np.ndarray) -> None:
    found = tf_compat.tensor_of(values)
    assert found.shape == values.shape
    assert found.dtype.as_numpy_dtype == values.dtype
    # TensorFlow aborts the process if values that it reads are not aligned.
    assert np.array_equal(tf.reshape(found, -1) + 0, values.ravel())


def test_nothing_writes_to_an_array_of_which_a_tensor_was_made() -> None:
    values = aligned((4, 2), np.zeros)
    variable = tf.Variable(tf.zeros((4, 2), tf.int64))
    variable.assign(tf_compat.tensor_of(values))
    variable.scatter_add(tf.IndexedSlices(tf.ones((1, 2), tf.int64), [1]))
    variable.assign_add(tf.ones((4, 2), tf.int64))
    assert variable.numpy()[1].tolist() == [2, 2]
    assert not values.any()
