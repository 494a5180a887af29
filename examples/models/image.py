"""A small convolutional network with group normalisation.

Columns: `image`, pixels of 0 to 255, (height, width, channels); `label`, a class.

    dpsgd train --batches batches --eval data/test --out run --model image:cnn \\
        --loss sparse_categorical_crossentropy \\
        --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import tf_keras as keras

CLASSES = 10
FILTERS = (8, 16)


def cnn(manifest):
    """A logit for each class."""
    shape = next(c.shape for c in manifest.columns if c.name == "image")
    image = keras.Input(shape, dtype="float32", name="image")
    values = keras.layers.Rescaling(1 / 255)(image)
    for filters in FILTERS:
        values = keras.layers.Conv2D(filters, 3, strides=2, padding="same")(values)
        values = keras.layers.GroupNormalization(4)(values)
        values = keras.layers.ReLU()(values)
    pooled = keras.layers.GlobalAveragePooling2D()(values)
    return keras.Model(image, keras.layers.Dense(CLASSES)(pooled))
