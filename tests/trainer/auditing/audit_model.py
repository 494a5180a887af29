"""The models that the audit trains: own weights and a known gradient per canary.

A canary has a weight of its own in each of four layers: two Dense layers, a small
embedding table and a large one.  Its loss is linear, so that its gradient does not
depend on the weights: ``label - 1`` in its own weights and 0 elsewhere.  A canary has
labels far from 1, and is clipped; a ghost has labels of 1 and no gradient.

To reveal more faults:
  - Canaries are of five kinds (see ``directions``): the gradient is equal in all
    layers, or nearly all of it is in one.  This shows a layer that the norm omits.
  - With many canaries, which are spread over the large table, a flush of it takes
    several chunks.
  - An example reads its row of the large table twice.
  - A row of zeros, such as padding, has a huge gradient in weights of no canary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pipelines.core.batches.manifest import Manifest
from trainer.core.tf_compat import keras, tf

ops = keras.ops

#: Column of the number of an example's canary; 0 is padding.
CANARY = "canary"
#: Key of the data set's own description; a canary may have several rows.
NUM_CANARIES = "num_canaries"
FIRST, SECOND, SMALL, LARGE = "first", "second", "small", "large"
#: The layers, in the order of labels and outputs.
LAYERS = (FIRST, SECOND, SMALL, LARGE)
LARGE_DIM = 10
#: Rows of the large table: one and a half chunks of a flush.
_LARGE_ROWS = (3 << 19) // LARGE_DIM
#: Largest number of its rows per canary; few canaries are computed one by one.
_MOST_ROWS_EACH = 512
#: Share of a gradient in every other layer, for canaries of one layer.
_SMALL_SHARE = 0.1
#: Gradient of a row of zeros, beyond any clip norm.
_PADDING_SLOPE = float(1 << 20)


def num_kinds() -> int:
    """Returns the number of kinds of canaries."""
    return 1 + len(LAYERS)


def directions(num_canaries: int) -> np.ndarray:
    """Returns the unit gradient of each canary, shape (canaries, layers).

    Canary ``i`` (in row ``i - 1``) is of kind ``i % num_kinds()``.  Signs differ, so
    that noise that two layers share cancels for some canaries.
    """
    size = len(LAYERS)
    shares = np.full((num_kinds(), size), _SMALL_SHARE)
    np.fill_diagonal(shares[1:], np.sqrt(1 - (size - 1) * _SMALL_SHARE**2))
    shares[0] = 1 / np.sqrt(size)
    canary = np.arange(1, num_canaries + 1)
    signs = 1 - 2 * (canary[:, None] // num_kinds() >> np.arange(size) & 1)
    return shares[canary % num_kinds()] * signs


def places(layer: str, canaries: np.ndarray, num_canaries: int) -> np.ndarray:
    """Returns the indices of canaries' weights in the flat weights of a layer.

    Args:
      layer: One of ``LAYERS``.
      canaries: Numbers of the canaries; 0 for padding.
      num_canaries: Number of canaries of the run.
    """
    if layer != LARGE:
        return canaries
    return canaries * _stride(num_canaries) * LARGE_DIM


def large_rows(num_canaries: int) -> int:
    """Returns the number of rows of the large table."""
    return min(_LARGE_ROWS, _MOST_ROWS_EACH * (num_canaries + 1))


def _stride(num_canaries: int) -> int:
    return large_rows(num_canaries) // (num_canaries + 1)


def weights(manifest: Manifest) -> Any:
    """Returns the model with weights of zero: ``--model`` of the audit."""
    return _model(manifest)


def unproven_weights(manifest: Manifest) -> Any:
    """Returns the same model with an operation that no proof knows.

    Its gradients are computed one example at a time.
    """
    return _model(manifest, _Diagonals(name="diagonals"))


class _Diagonals(keras.layers.Layer):
    """Returns its inputs."""

    def call(self, values: Any) -> Any:
        return tf.linalg.diag_part(tf.linalg.diag(values))


def _model(manifest: Manifest, change: Callable[[Any], Any] | None = None) -> Any:
    count = manifest.dataset[NUM_CANARIES]
    canary = keras.Input((), dtype="int32", name=CANARY)
    own = ops.one_hot(canary, count + 1)
    rows = ops.stack([canary * _stride(count)] * 2, axis=1)
    outputs = [
        _dense(FIRST)(own),
        _dense(SECOND)(own),
        _embedding(count + 1, 1, SMALL)(canary),
        ops.mean(_embedding(large_rows(count), LARGE_DIM, LARGE)(rows)[:, :, :1], 1),
    ]
    slope = ops.where(ops.equal(canary, 0), _PADDING_SLOPE, 1.0)
    joined = ops.concatenate(outputs, 1)
    changed = joined if change is None else change(joined)
    return keras.Model(canary, changed * slope[:, None])


def _dense(name: str) -> Any:
    return keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)


def _embedding(rows: int, dim: int, name: str) -> Any:
    return keras.layers.Embedding(rows, dim, embeddings_initializer="zeros", name=name)


def layer_of(variable: Any) -> str:
    """Returns the layer of a Keras variable, one of ``LAYERS``."""
    return variable.path.split("/")[0]


def linear(labels: Any, outputs: Any) -> Any:
    """Returns one minus labels, times outputs, summed: ``--loss`` of the audit.

    Args:
      labels: Shape (rows, layers).
      outputs: Outputs of the same shape.
    """
    return tf.reduce_sum((1 - labels) * outputs, 1)
