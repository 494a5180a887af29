"""Small convolutional networks with group normalisation.

`cnn` has plain convolutions. `standardized_cnn` has standardised weights and dilated
windows, as the networks of De et al. (2022), arXiv:2204.13650, and of TAN (Sander et
al. 2023, arXiv:2210.03403), without their depth; its gradients are computed one example
at a time.

Columns: `image`, pixels of 0 to 255, (height, width, channels); `label`, a class.

    dpsgd train --batches batches --eval data/test --out run --model image:cnn \\
        --loss sparse_categorical_crossentropy \\
        --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import keras

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


class StandardizedConv2D(keras.layers.Conv2D):
    """A convolution by weights of mean 0 and variance 1 over the inputs of a filter.

    Nothing of the examples enters the mean and the variance: rows stay apart.
    """

    def call(self, images):
        mean, variance = keras.ops.moments(self.kernel, [0, 1, 2], keepdims=True)
        height, width, channels, _ = self.kernel.shape
        fan_in = height * width * channels
        kernel = (self.kernel - mean) * keras.ops.rsqrt(fan_in * variance + 1e-4)
        found = keras.ops.conv(
            images, kernel, self.strides, self.padding, dilation_rate=self.dilation_rate
        )
        return found + self.bias


def standardized_cnn(manifest):
    """A logit for each class: every block sees twice as far, at the same resolution."""
    shape = next(c.shape for c in manifest.columns if c.name == "image")
    image = keras.Input(shape, dtype="float32", name="image")
    values = keras.layers.Rescaling(1 / 255)(image)
    for block, filters in enumerate((8, 16, 16)):
        convolution = StandardizedConv2D(
            filters, 3, padding="same", dilation_rate=2**block
        )
        values = convolution(values)
        values = keras.layers.GroupNormalization(4)(values)
        values = keras.layers.ReLU()(values)
    pooled = keras.layers.AveragePooling2D(2)(values)
    logits = keras.layers.Dense(CLASSES)(keras.layers.Flatten()(pooled))
    return keras.Model(image, logits)
