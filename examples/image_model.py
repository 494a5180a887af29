"""A small CNN, and the views of an image that it is trained on.

Batch normalisation mixes examples and is refused; groups do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

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


def moved(columns: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """Returns a view of one image: moved by at most a pixel, for --augment.

    Args:
      columns: Of one example, without a batch axis.
      seed: All that is random follows from it.
    """
    image = tf.pad(tf.reshape(columns["pixels"], (8, 8, 1)), [[1, 1], [1, 1], [0, 0]])
    crop = tf.image.stateless_random_crop(image, (8, 8, 1), seed)
    return {"pixels": tf.reshape(crop, (64,))}
