"""Models: the click model for Criteo-format columns, and models that users bring.

A model maps a dict of columns to outputs: for the default loss one logit per example,
whose binary cross-entropy with the column ``label`` is minimised; see ``losses`` for
others.  Preprocessing is part of the model, so that the exported model takes columns as
they are.

A model of one's own is ``--model module:function``, where ``function(manifest)``
returns such a Keras model, functional or subclassed (then of all columns but
``label``):

    def small(manifest):
        integers = keras.Input((13,), name="integers")
        return keras.Model(integers, keras.layers.Dense(1)(integers))

Formal guarantees:
  - A model is checked before it is returned: see ``model_check``.
  - Any column value gives a finite logit of the click model with finite weights:
    missing, negative and infinite integers and ids out of range included.

References:
  Chua et al. (2024), arXiv:2411.04205, section 5: embeddings, log of the integers,
  fully connected layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from accounting.validation import InputError, check_int
from pipelines.batches.manifest import Manifest
from trainer.gradients.model_check import check_model
from trainer.model.losses import (
    BINARY_CROSS_ENTROPY,
    Loss,
    loss_by_name,
    loss_of_ones_own,
)
from trainer.model.metrics import LABEL
from trainer.model.trainable_model import TrainableModel
from trainer.model.user_code import load_function, one_line_errors
from trainer.tf_compat import check_plain, keras, tf

INTEGERS = "integers"
CATEGORIES = "categories"
NUM_INTEGERS = 13
NUM_CATEGORIES = 26


#: Brings the logarithms of counts to the size of the other inputs.
_LOG_SCALE = 0.25


def criteo_model(
    manifest: Manifest, *, embedding_dim: int, hidden: Sequence[int]
) -> Any:
    """Returns the click model: embeddings, logarithms, and fully connected layers.

    One table holds the embeddings of all features, each feature in rows of its own:
    one gather instead of 26.

    Raises:
      InputError: batches of other columns, or impossible sizes.
    """
    num_buckets = criteo_num_buckets(manifest)
    check_int("embedding_dim", embedding_dim, at_least=1)
    for size in hidden:
        check_int("hidden", size, at_least=1)
    integers = keras.Input((NUM_INTEGERS,), dtype="float32", name=INTEGERS)
    categories = keras.Input((NUM_CATEGORIES,), dtype="int32", name=CATEGORIES)
    values = keras.layers.Concatenate(name="features")(
        [*_encode_integers(integers), _embed(categories, num_buckets, embedding_dim)]
    )
    for index, size in enumerate(hidden):
        layer = keras.layers.Dense(size, activation="relu", name=f"hidden_{index}")
        values = layer(values)
    # Zero logits at first: the clipped steps are not spent on undoing a random start.
    logit = keras.layers.Dense(1, kernel_initializer="zeros", name="logit")(values)
    return keras.Model({INTEGERS: integers, CATEGORIES: categories}, logit, name="pctr")


def _encode_integers(integers: Any) -> list[Any]:
    """Returns signed log1p of the integers, scaled, and which of them are missing."""
    missing = tf.math.is_nan(integers)
    limit = np.finfo(np.float32).max
    known = tf.clip_by_value(tf.where(missing, 0.0, integers), -limit, limit)
    logarithm = tf.sign(known) * tf.math.log1p(tf.abs(known))
    # A constant scale, no statistic of the data: counts of thousands come out near 2,
    # so that no input dominates the norm that is clipped.
    return [_LOG_SCALE * logarithm, tf.cast(missing, tf.float32)]


def _embed(categories: Any, num_buckets: Sequence[int], dim: int) -> Any:
    last = [count - 1 for count in num_buckets]
    offsets = np.cumsum([0, *num_buckets[:-1]]).tolist()
    ids = tf.minimum(tf.maximum(categories, 0), last) + offsets
    table = keras.layers.Embedding(sum(num_buckets), dim, name="embeddings")
    return keras.layers.Reshape((len(last) * dim,), name="embedded")(table(ids))


def criteo_num_buckets(manifest: Manifest) -> list[int]:
    """Returns the number of buckets of each categorical column.

    Raises:
      InputError: the batches are not of Criteo-format data.
    """
    num_buckets = manifest.dataset.get("num_buckets")
    if (
        manifest.dataset.get("name") != "criteo"
        or not isinstance(num_buckets, list)
        or len(num_buckets) != NUM_CATEGORIES
    ):
        raise InputError(
            "Expected batches of data that `dpsgd prepare --format criteo-tsv` wrote. "
            "For other data give --model module:function."
        )
    for count in num_buckets:
        check_int("num_buckets", count, at_least=1)
    found = {column.name: (column.dtype, column.shape) for column in manifest.columns}
    wanted = {
        LABEL: ("int8", ()),
        INTEGERS: ("float32", (NUM_INTEGERS,)),
        CATEGORIES: ("int32", (NUM_CATEGORIES,)),
    }
    for name, kind in wanted.items():
        if found.get(name) != kind:
            raise InputError(
                f"Expected column {name} of type {kind[0]} and shape {kind[1]}. "
                "Make the batches from what `dpsgd prepare` wrote."
            )
    return num_buckets


def make_loss(name: str) -> Loss:
    """Returns the loss with a Keras name, or the one that ``module:function`` computes.

    Raises:
      InputError: no such loss.
    """
    if ":" in name:
        return loss_of_ones_own(name, load_function(name, "loss"))
    return loss_by_name(name)


def make_model(
    manifest: Manifest,
    *,
    model: str = "criteo",
    embedding_dim: int,
    hidden: Sequence[int],
    loss: Loss = BINARY_CROSS_ENTROPY,
) -> TrainableModel:
    """Returns the model that ``model`` names, checked.

    Args:
      manifest: What the batches hold.
      model: "criteo", or "module:function".
      embedding_dim: Size of an embedding of the click model.
      hidden: Sizes of the hidden layers of the click model.
      loss: What is minimised.

    Raises:
      InputError: no such model, or one that cannot be trained privately.
    """
    description: dict[str, Any] = {"name": model, "loss": loss.name}
    if model == "criteo":
        network = criteo_model(manifest, embedding_dim=embedding_dim, hidden=hidden)
        description |= {"embedding_dim": embedding_dim, "hidden": list(hidden)}
    else:
        network = _call(model, manifest)
    sizes = [int(np.prod(v.shape)) for v in network.trainable_variables]
    description["num_parameters"] = sum(sizes)
    trainable = TrainableModel(
        network=network, description=description, loss=loss, columns=manifest.columns
    )
    check_model(trainable, manifest)
    return trainable


def _call(spec: str, manifest: Manifest) -> Any:
    """Returns the model that a function of the user's makes, as a functional one."""
    function = load_function(spec)
    with one_line_errors(f"model={spec!r}"):
        network = function(manifest)
        if not isinstance(network, keras.Model):
            raise InputError(f"Expected model={spec!r} to return a tf_keras.Model.")
        return as_functional(network, manifest)


def as_functional(network: Any, manifest: Manifest) -> Any:
    """Returns a model with named inputs: itself, or what takes all but ``label``.

    Raises:
      InputError: TF Privacy's own noise is part of it.
    """
    check_plain(network)
    if network.inputs is not None:
        return network
    inputs = {
        column.name: keras.Input(column.shape, dtype=column.dtype, name=column.name)
        for column in manifest.columns
        if column.name != LABEL
    }
    return keras.Model(inputs, network(inputs), name=network.name)


def identity(model: TrainableModel) -> str:
    """Returns a text that differs where sizes, weights or vocabularies do.

    What layers compute is not looked at: ``origin`` has the traced step.
    """
    shapes = [(v.dtype.name, tuple(v.shape)) for v in model.network.variables]
    weights = hashlib.sha256()
    for variable in model.network.variables:
        weights.update(np.ascontiguousarray(variable.numpy()).tobytes())
    for layer in model.network._flatten_layers():
        if hasattr(layer, "get_vocabulary"):
            weights.update(repr(layer.get_vocabulary()).encode())
    return f"{model.description} {shapes} {weights.hexdigest()}"
