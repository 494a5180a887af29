"""An LSTM in both directions over tokens, in which 0 fills short texts up.

Columns: `tokens`, int32 ids below VOCABULARY, (length,); `label`, 0 or 1.

    dpsgd train --batches batches --eval data/test --out run \\
        --model text:reader --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import keras

VOCABULARY = 1000
SIZE = 8


def reader(manifest):
    """One logit for each text."""
    (length,) = next(c.shape for c in manifest.columns if c.name == "tokens")
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    values = keras.layers.Embedding(VOCABULARY, SIZE, mask_zero=True)(tokens)
    state = keras.layers.Bidirectional(keras.layers.LSTM(SIZE))(values)
    return keras.Model(tokens, keras.layers.Dense(1)(state))
