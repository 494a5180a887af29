"""A small Transformer over tokens.

Columns: `tokens`, int32 ids below VOCABULARY, (length,); `label`, 0 or 1.

    dpsgd train --batches batches --eval data/test --out run \\
        --model transformer:transformer --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import keras

VOCABULARY = 1000
SIZE = 16
HEADS = 2
BLOCKS = 1


class Places(keras.layers.Layer):
    """Adds a trained vector for each place in the sequence."""

    def build(self, shape):
        self.places = keras.layers.Embedding(shape[1], shape[2])
        self.places.build(None)

    def call(self, values):
        return values + self.places(keras.ops.arange(values.shape[1]))


def block(values):
    """Attention and a layer for each place, both with a normalised way around."""
    normal = keras.layers.LayerNormalization()(values)
    values += keras.layers.MultiHeadAttention(HEADS, SIZE // HEADS)(normal, normal)
    normal = keras.layers.LayerNormalization()(values)
    hidden = keras.layers.Dense(2 * SIZE, activation="gelu")(normal)
    return values + keras.layers.Dense(SIZE)(hidden)


def transformer(manifest):
    """One logit for each sequence."""
    (length,) = next(c.shape for c in manifest.columns if c.name == "tokens")
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    values = Places()(keras.layers.Embedding(VOCABULARY, SIZE)(tokens))
    for _ in range(BLOCKS):
        values = block(values)
    pooled = keras.layers.GlobalAveragePooling1D()(values)
    return keras.Model(tokens, keras.layers.Dense(1)(pooled))
