"""Clipped sums against a loop over examples and against TF Privacy."""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.trainer import zoo
from tests.trainer.zoo import (
    EVERY_LAYER,
    FAST,
    NUM_ROWS,
    OTHER,
    arrays,
    assert_close,
    batch,
    both_inputs,
    clipped_total,
    dense_per_position,
    layer_normalization,
    make_model,
    masked_ids,
    naive_gradients,
    naive_sum,
    norm_of,
    numbers,
)
from trainer.core.step import clipping
from trainer.core.tf_compat import keras, tf
from trainer.gradients.model_check import check_model
from trainer.gradients.paths import (
    ONE_PASS,
    SINGLE_EXAMPLES,
    GradientSum,
    choose_path,
    clipped_sum,
    plain_sum,
)
from trainer.model.losses import loss_of_ones_own
from trainer.model.trainable_model import TrainableModel

CLIP = 0.3


def traced(model: TrainableModel, clip: float = CLIP, **more: Any) -> GradientSum:
    """The sum in a graph, as in a step: traced once for each shape of a batch."""
    return tf.function(clipped_sum(model, l2_norm_clip=clip, **more), autograph=False)


def _sums(model: TrainableModel, clip: float = CLIP) -> list[GradientSum]:
    """The same sum on the paths."""
    assert choose_path(model) == ONE_PASS
    is_plain = model.description["make"] in FAST
    paths = (ONE_PASS,) if is_plain else (ONE_PASS, SINGLE_EXAMPLES)
    return [traced(model, clip, path=path) for path in paths]


@pytest.mark.parametrize("make", FAST + EVERY_LAYER)
def test_clipped_sum_equals_a_loop_over_examples(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    columns, weight = batch(data, padding=4)
    gradients = naive_gradients(model, data)
    clip = float(np.median([norm_of(one) for one in gradients]))  # half are clipped
    wanted = clipped_total(gradients, clip)
    for gradient_sum in _sums(model, clip):
        assert_close(arrays(gradient_sum(columns, weight)), wanted)


@pytest.mark.parametrize(
    ("make", "num_values"),
    [(both_inputs, 1), (dense_per_position, 100), (layer_normalization, 1 << 23)],
)
def test_clipped_coordinates_equal_a_loop_over_examples(
    make: Callable[[], Any], num_values: int, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.gradients.gradient_parts._MOST_HELD_VALUES", num_values
    )
    model, data = make_model(make), rows(NUM_ROWS)
    columns, weight = batch(data, padding=4, fill=1e30)
    cap = CLIP / 4
    gradients = naive_gradients(model, data)
    wanted = clipped_total(gradients, CLIP, cap)
    assert any(map(np.any, _differences(wanted, clipped_total(gradients, CLIP))))
    found = traced(model, linf_norm_clip=cap)(columns, weight)
    assert_close(arrays(found), wanted)


def _differences(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
    return [np.abs(a - b) > 1e-3 for a, b in zip(left, right, strict=True)]


@tf.custom_gradient
def _half_slope(values: Any) -> Any:
    return tf.tanh(values), lambda slope: 0.5 * slope


def own_gradient() -> Any:
    integers, values = numbers()
    hidden = keras.layers.Lambda(_half_slope)(keras.layers.Dense(6)(values))
    return keras.Model(integers, keras.layers.Dense(1)(hidden))


def test_a_step_computes_by_the_graph_that_was_checked(
    small_batches: Any, rows: Any
) -> None:
    factor, manifest = [1.0], small_batches.manifest
    square = loss_of_ones_own(
        "square", lambda labels, outputs: factor[0] * tf.square(outputs[:, 0])
    )
    plain = make_model(own_gradient)
    model = dataclasses.replace(plain, columns=manifest.columns, loss=square)
    check_model(model, manifest)
    model = model.described({"of": "a run"})
    data = rows(NUM_ROWS)
    columns, weight = batch(data, padding=manifest.physical_batch_size - NUM_ROWS)
    checked = naive_sum(model, data, CLIP)
    factor[0] = 0.0  # Python changes; what was traced does not
    with mock.patch.object(tf, "vectorized_map") as converts:
        found = clipped_sum(model, l2_norm_clip=CLIP)(columns, weight)
    assert_close(arrays(found), checked)
    assert not converts.called
    factor[0] = 2.0
    model.network.layers[-1].trainable = False  # other variables: another trace
    found = clipped_sum(model, l2_norm_clip=CLIP)(columns, weight)
    assert_close(arrays(found), naive_sum(model, data, CLIP))


@pytest.mark.parametrize("num_rows", [1, 16])
def test_rows_may_come_in_chunks(
    num_rows: int, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make_model(layer_normalization), rows(NUM_ROWS)
    num_values = sum(int(np.prod(v.shape)) for v in model.variables)
    name = "trainer.core.step.clipping.MOST_GRADIENT_VALUES"
    monkeypatch.setattr(name, num_rows * num_values + 1)
    gradient_sum = traced(model, path=SINGLE_EXAMPLES)
    found = gradient_sum(*batch(data, padding=20, fill=math.nan))
    assert_close(arrays(found), naive_sum(model, data, CLIP))


@pytest.mark.parametrize("make", [both_inputs, layer_normalization])
def test_padding_and_rows_without_a_finite_gradient_contribute_nothing(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    spoiled = np.concatenate([data, data[:1]])
    spoiled["label"][-1] = 0
    for gradient_sum in _sums(model):
        wanted = arrays(gradient_sum(*batch(data, padding=4)))
        for fill in (math.nan, math.inf, 1e30):
            found = arrays(gradient_sum(*batch(data, padding=4, fill=fill)))
            assert all(map(np.array_equal, found, wanted))
        alone = gradient_sum(*batch(rows(0), padding=NUM_ROWS + 4, fill=math.nan))
        assert not any(array.any() for array in arrays(alone))
        for bad in (math.inf, 1e38):
            spoiled["integers"][-1] = bad
            found = arrays(gradient_sum(*batch(spoiled, padding=3)))
            assert all(np.isfinite(array).all() for array in found)
            if not math.isfinite(bad):
                assert_close(found, wanted, 1e-6)


def test_an_infinite_clip_leaves_gradients_as_they_are(rows: Any) -> None:
    model, data = make_model(layer_normalization), rows(NUM_ROWS)
    columns, weight = batch(data, padding=4)
    wanted = arrays(plain_sum(model)(columns, weight))
    for gradient_sum in _sums(model, math.inf):
        assert_close(arrays(gradient_sum(columns, weight)), wanted)


# -- tF Privacy's DPModel as an oracle -------------------------------------------------


#: The functions of ``keras.ops`` that models of ``zoo`` call.
_OPS = types.SimpleNamespace(
    concatenate=tf.concat,
    isnan=tf.math.is_nan,
    mean=tf.reduce_mean,
    sum=tf.reduce_sum,
    where=tf.where,
)


def _in_old_keras(make: Callable[[], Any], tf_keras: Any) -> Any:
    """Returns a network of ``zoo``, built in the Keras that TF Privacy knows."""
    names = ("Input", "Model", "Sequential", "layers")
    both = types.SimpleNamespace(**{n: getattr(tf_keras, n) for n in names}, ops=_OPS)
    with mock.patch.object(zoo, "keras", both):
        return make()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [masked_ids, OTHER[0]])
def test_the_clipped_sum_is_the_update_of_dp_model_on_its_vectorised_path(
    make: Callable[[], Any], rows: Any
) -> None:
    """Its update times the batch size, without noise and at learning rate 1."""
    tf_keras = pytest.importorskip("tf_keras")
    pytest.importorskip("tensorflow_privacy.version")
    model, data = zoo.make_model(make), rows(NUM_ROWS)
    # A mean over no id is NaN, which TF Privacy multiplies by a weight of 0.
    columns, weight = batch(data, padding=0 if make is masked_ids else 4)
    with mock.patch.object(tf, "keras", tf_keras):
        dp_keras_model = importlib.import_module(
            "tensorflow_privacy.privacy.keras_models.dp_keras_model"
        )
        network = _in_old_keras(make, tf_keras)
        for variable, value in zip(
            network.trainable_variables, model.variables, strict=True
        ):
            variable.assign(value)
        oracle = dp_keras_model.DPModel(
            l2_norm_clip=CLIP, noise_multiplier=0.0, use_xla=False,
            inputs=network.inputs, outputs=network.outputs,
        )  # fmt: skip
        loss = tf_keras.losses.BinaryCrossentropy(from_logits=True)
        oracle.compile(optimizer=tf_keras.optimizers.SGD(1.0), loss=loss)
        before = [v.numpy() for v in oracle.trainable_variables]
        inputs = {name: columns[name] for name in network.input_names}
        labels, weights = (tf.reshape(x, (-1, 1)) for x in (columns["label"], weight))
        oracle.train_step((inputs, labels, weights))
        after = [v.numpy() for v in oracle.trainable_variables]
    found = [(b - a) * len(weight) for a, b in zip(after, before, strict=True)]
    assert_close(found, zoo.naive_sum(model, data, CLIP))


@pytest.mark.parametrize("clip", [1e-3, 0.3, 1.0, 7e5])
def test_clip_weights_gives_the_same_bits_with_and_without_tf_privacy(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(5).lognormal(0, 8, 10_000)
    norms = tf.constant([0.0, 1e-45, clip, *drawn], tf.float32)
    with_it = clipping.clip_weights(clip, norms)
    monkeypatch.setattr(clipping, "clip_grads", None)
    without = clipping.clip_weights(clip, norms)
    assert with_it.numpy().tobytes() == without.numpy().tobytes()
