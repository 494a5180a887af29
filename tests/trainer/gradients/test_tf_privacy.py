"""What TF Privacy is used for, and its ``DPModel`` as an oracle of clipped sums.

Why its registry of layers is not used: docs/your_model.md.  test_keras_model has the
refusal of its models and optimizers.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.trainer import zoo
from tests.trainer.gradients.test_clipping import CLIP
from tests.trainer.zoo import NUM_ROWS, OTHER, assert_close, batch, masked_ids
from trainer.core.step import clipping
from trainer.core.tf_compat import tf

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
