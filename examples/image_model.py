"""A small CNN.  Batch normalisation mixes examples and is refused; groups do not."""

from __future__ import annotations

from typing import Any

import tf_keras as keras

layers = keras.layers


def cnn(manifest: Any) -> Any:
    """Returns four logits of an image of 8 x 8 pixels in [0, 1].

    The input is named as the column of the batches.
    """
    pixels = keras.Input((64,), name="pixels")
    values = layers.Reshape((8, 8, 1))(pixels - 0.5)
    values = layers.Conv2D(8, 3, padding="same")(values)
    values = layers.GroupNormalization(4)(values)
    values = layers.MaxPooling2D()(layers.ReLU()(values))
    values = layers.Conv2D(16, 3, activation="relu")(values)
    return keras.Model(pixels, layers.Dense(4)(layers.Flatten()(values)))
