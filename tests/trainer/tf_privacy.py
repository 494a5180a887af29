"""TF Privacy's models, registry and optimizers as oracles, with the Keras they know.

They take models of ``tf_keras`` alone.  A model of ``zoo`` is built a second time in
that Keras, with the same weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.trainer import zoo
from trainer.core.step.per_example import GradientSum, clip_scale, keep_rows, real_rows
from trainer.core.tf_compat import tf
from trainer.model.trainable_model import TrainableModel

#: The functions of ``keras.ops`` that models of ``zoo`` call.
_OPS = types.SimpleNamespace(
    concatenate=tf.concat,
    isnan=tf.math.is_nan,
    mean=tf.reduce_mean,
    sum=tf.reduce_sum,
    where=tf.where,
)


@contextlib.contextmanager
def old_keras() -> Iterator[Any]:
    """Makes ``tf.keras`` the Keras that TF Privacy is written for within a context."""
    tf_keras = pytest.importorskip("tf_keras")
    pytest.importorskip("tensorflow_privacy.version")
    with mock.patch.object(tf, "keras", tf_keras):
        yield tf_keras


def module(name: str) -> Any:
    """Returns a module of TF Privacy, within ``old_keras``."""
    return importlib.import_module(f"tensorflow_privacy.privacy.{name}")


def _same_network(model: TrainableModel, tf_keras: Any) -> Any:
    """Returns the network of a model of ``zoo``, built in ``tf_keras``."""
    both = types.SimpleNamespace(
        Input=tf_keras.Input,
        Model=tf_keras.Model,
        Sequential=tf_keras.Sequential,
        layers=tf_keras.layers,
        ops=_OPS,
    )
    with mock.patch.object(zoo, "keras", both):
        network = model.description["make"]()
    pairs = zip(network.trainable_variables, model.variables, strict=True)
    for variable, value in pairs:
        variable.assign(value)
    return network


def _in_old_keras(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        with old_keras() as tf_keras:
            return function(tf_keras, *arguments)

    return called


@_in_old_keras
def dp_model_sum(
    tf_keras: Any,
    model: TrainableModel,
    columns: dict[str, Any],
    weight: Any,
    clip: float,
) -> list[np.ndarray]:
    """The update of TF Privacy's DPModel on its vectorised path, times the batch."""
    network = _same_network(model, tf_keras)
    oracle = module("keras_models.dp_keras_model").DPModel(
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        use_xla=False,
        inputs=network.inputs,
        outputs=network.outputs,
    )
    loss = tf_keras.losses.BinaryCrossentropy(from_logits=True)
    oracle.compile(optimizer=tf_keras.optimizers.SGD(1.0), loss=loss)
    before = [v.numpy() for v in oracle.trainable_variables]
    label = tf.reshape(columns["label"], (-1, 1))
    oracle.train_step((_inputs(network, columns), label, tf.reshape(weight, (-1, 1))))
    after = [v.numpy() for v in oracle.trainable_variables]
    return [(b - a) * len(weight) for a, b in zip(after, before, strict=True)]


def _inputs(network: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: columns[name] for name in network.input_names}


def registry_sum(model: TrainableModel, l2_norm_clip: float) -> GradientSum:
    """TF Privacy's norms by layer, and a second pass through the weighted loss.

    Lee and Kifer (2020), arXiv:2009.03106.
    """
    with old_keras() as tf_keras:
        network = _same_network(model, tf_keras)

    # Unwrapped: TensorFlow binds the arguments by the signature.
    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        with old_keras():
            return in_old_keras(columns, weight)

    def in_old_keras(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        layer_registry = module("fast_gradient_clipping.layer_registry")
        real = real_rows(model, columns, weight)
        safe = keep_rows(columns, real)
        norms = module("fast_gradient_clipping.clip_grads").compute_gradient_norms(
            network,
            layer_registry.make_default_layer_registry(),
            _inputs(network, safe),
            model.labels(safe),
            per_example_loss_fn=lambda y, z, _: model.loss.per_example(y, z),
        )
        counted, scale = clip_scale(norms, real, l2_norm_clip)
        # 0 times the derivative of a loss that is not finite would be NaN.
        safe = keep_rows(columns, counted)
        with tf.GradientTape() as tape:
            losses = model.losses(safe)
            total = tf.reduce_sum(tf.where(counted, losses * scale, 0.0))
        return tape.gradient(total, model.variables)

    return gradient_sum
