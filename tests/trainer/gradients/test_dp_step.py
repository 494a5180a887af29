"""The private step: noise once, constant divisor, and SGD as its limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pipelines.sampling.keys import insecure_key
from trainer.gradients.clipping import clipped_sum, plain_sum
from trainer.gradients.dp_step import Step
from trainer.gradients.noise import step_noise
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

CLIP = 0.5


def _model(seed: int = 0) -> TrainableModel:
    keras.utils.set_random_seed(seed)
    integers = keras.Input((13,), name="integers")
    values = tf.where(tf.math.is_nan(integers), 0.0, integers)
    values = keras.layers.Dense(5, activation="tanh")(values)
    network = keras.Model(integers, keras.layers.Dense(1)(values))
    return TrainableModel(network=network, description={})


def _batch(rows: np.ndarray, size: int = 16) -> tuple[dict[str, Any], Any]:
    padding = np.zeros(size - len(rows), rows.dtype)
    data = np.concatenate([rows, padding])
    weight = (np.arange(size) < len(rows)).astype("f4")
    columns = {name: tf.constant(data[name]) for name in rows.dtype.names}
    return columns, tf.constant(weight)


def _step(
    model: TrainableModel, divisor: int = 8, clip: float = CLIP, **more: Any
) -> Step:
    return Step(
        model.variables,
        more.get("gradient_sum") or clipped_sum(model, l2_norm_clip=clip),
        more.get("optimizer") or keras.optimizers.SGD(1.0),
        expected_batch_size=divisor,
    )


def _run(step: Step, noise: list[np.ndarray], batches: list[Any]) -> None:
    step.begin(noise)
    for columns, weight in batches:
        step.add(columns, weight)
    step.finish()


def _change(model: TrainableModel, act: Any) -> list[np.ndarray]:
    before = [v.numpy() for v in model.variables]
    act()
    return [b - v.numpy() for b, v in zip(before, model.variables, strict=True)]


@pytest.mark.parametrize("num_real", [0, 1, 16])
def test_divisor_is_constant_whatever_the_step_holds(num_real: int, rows: Any) -> None:
    model = _model()
    step, batch = _step(model, divisor=8), _batch(rows(num_real))
    wanted = clipped_sum(model, l2_norm_clip=CLIP)(*batch)
    zeros = step_noise(b"", 0, step.shapes, 0.0)
    found = _change(model, lambda: _run(step, zeros, [batch]))
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right / 8, atol=2e-7)


@pytest.mark.parametrize("num_real", [0, 1, 16])
def test_noise_is_divided_by_the_same_constant(num_real: int, rows: Any) -> None:
    key, changes = insecure_key(3), []
    for stddev in (0.0, 100.0):
        model = _model()
        step = _step(model, divisor=8)
        noise = step_noise(key, 5, step.shapes, stddev)
        batch = _batch(rows(num_real))
        act = lambda s=step, n=noise, b=batch: _run(s, n, [b])  # noqa: E731
        changes.append(_change(model, act))
    for plain, noisy, values in zip(*changes, noise, strict=True):
        np.testing.assert_allclose((noisy - plain) * 8, values, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_noise_is_added_once_per_step_whatever_the_number_of_batches(
    num_parts: int, rows: Any
) -> None:
    data = rows(16)
    parts = [_batch(part, size=16) for part in np.array_split(data, num_parts)]
    results = []
    for batches in ([_batch(data)], parts, [*parts, _batch(data[:0])]):
        model = _model()
        step = _step(model)
        noise = step_noise(insecure_key(4), 0, step.shapes, 30.0)
        results.append(_change(model, lambda s=step, b=batches, n=noise: _run(s, n, b)))
    for changes in results[1:]:
        for left, right in zip(changes, results[0], strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_step_forgets_the_step_before(num_parts: int, rows: Any) -> None:
    model = _model()
    step, empty = _step(model), _batch(rows(0))
    noise = step_noise(insecure_key(4), 0, step.shapes, 1.0)
    _run(step, noise, [_batch(rows(16))] * num_parts)
    zeros = step_noise(b"", 0, step.shapes, 0.0)
    for change in _change(model, lambda: _run(step, zeros, [empty] * num_parts)):
        np.testing.assert_array_equal(change, 0)


def test_nothing_is_compiled_again_after_the_first_steps(rows: Any) -> None:
    step, batches = _step(_model()), [_batch(rows(16, seed)) for seed in range(3)]
    counts = []
    for index in range(4):
        for parts in (1, 2, 3):
            noise = step_noise(insecure_key(4), index, step.shapes, 1.0)
            _run(step, noise, batches[:parts])
            counts.append(step.num_traces)
    # One batch; then adding to sums and applying them.
    assert counts == [1, *[3] * 11]


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_infinite_clip_and_zero_noise_is_ordinary_training(
    name: str, rows: Any
) -> None:
    private, ordinary = _model(), _model()
    batches = [_batch(rows(16, seed)) for seed in range(5)]
    step = _step(
        private,
        divisor=16,
        clip=math.inf,
        optimizer=getattr(keras.optimizers, name)(0.05),
    )
    optimizer = getattr(keras.optimizers, name)(0.05)
    for columns, weight in batches:
        _run(step, step_noise(b"", 0, step.shapes, 0.0), [(columns, weight)])
        with tf.GradientTape() as tape:
            losses = ordinary.losses(columns)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, ordinary.variables)
        optimizer.apply_gradients(zip(gradients, ordinary.variables, strict=True))
    for left, right in zip(private.variables, ordinary.variables, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-4, atol=1e-5)


def test_clipping_changes_the_step(rows: Any) -> None:
    # Without this, the test above could pass because clipping does nothing.
    model, batch = _model(), _batch(rows(16))
    clipped = clipped_sum(model, l2_norm_clip=0.01)(*batch)
    plain = plain_sum(model)(*batch)
    assert not np.allclose(clipped[0], plain[0], rtol=0.1)
