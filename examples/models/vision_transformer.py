"""A small vision transformer: attention between the patches of an image.

Columns: `image`, pixels of 0 to 255, (height, width, channels); `label`, a class.

    dpsgd train --batches batches --eval data/test --out run \\
        --model vision_transformer:vit --loss sparse_categorical_crossentropy \\
        --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import keras

CLASSES = 10
PATCH = 2
SIZE = 32
HEADS = 4
BLOCKS = 2


class Places(keras.layers.Layer):
    """Adds a trained vector for each patch."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(stddev=0.02)
        self.places = self.add_weight(shape[1:], initializer=start, name="places")

    def call(self, values):
        return values + self.places


def block(values):
    """Attention and a layer for each patch, both with a normalised way around."""
    normal = keras.layers.LayerNormalization()(values)
    values += keras.layers.MultiHeadAttention(HEADS, SIZE // HEADS)(normal, normal)
    normal = keras.layers.LayerNormalization()(values)
    hidden = keras.layers.Dense(2 * SIZE, activation="gelu")(normal)
    return values + keras.layers.Dense(SIZE)(hidden)


def vit(manifest):
    """A logit for each class."""
    shape = next(c.shape for c in manifest.columns if c.name == "image")
    image = keras.Input(shape, dtype="float32", name="image")
    values = keras.layers.Rescaling(1 / 127.5, -1)(image)
    values = keras.layers.Conv2D(SIZE, PATCH, strides=PATCH)(values)
    values = Places()(keras.layers.Reshape((-1, SIZE))(values))
    for _ in range(BLOCKS):
        values = block(values)
    pooled = keras.layers.GlobalAveragePooling1D()(
        keras.layers.LayerNormalization()(values)
    )
    return keras.Model(image, keras.layers.Dense(CLASSES)(pooled))
