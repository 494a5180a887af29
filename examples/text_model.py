"""A small Transformer: embeddings of words and places, attention, a layer, a mean."""

from __future__ import annotations

from typing import Any

import keras

layers, ops = keras.layers, keras.ops


def transformer(manifest: Any) -> Any:
    """Returns one logit of a review; its words are hashed to ids, 0 after the last."""
    words = keras.Input((8,), dtype="int32", name="review")
    places = layers.Embedding(8, 16)(ops.zeros_like(words) + ops.arange(8))
    values = layers.Embedding(1000, 16)(words) + places
    values += layers.MultiHeadAttention(2, 8)(values, values)
    values = layers.LayerNormalization()(values)
    values += layers.Dense(16)(layers.Dense(32, activation="relu")(values))
    present = ops.cast(words > 0, "float32")[:, :, None]
    count = ops.maximum(ops.sum(present, 1), 1.0)
    mean = ops.sum(values * present, 1) / count
    return keras.Model(words, layers.Dense(1)(mean))
