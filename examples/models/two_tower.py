"""Two towers: does this user like this item?

Columns: `user` and `item`, int32 ids below USERS and ITEMS; `label`, 0 or 1.

    dpsgd train --batches batches --eval data/test --out run \\
        --model two_tower:two_tower --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import keras

USERS = 1000
ITEMS = 500
SIZE = 8


def tower(name, count):
    """An input of ids, and a vector for each."""
    ids = keras.Input((), dtype="int32", name=name)
    values = keras.layers.Embedding(count, SIZE)(ids)
    values = keras.layers.Dense(SIZE, activation="relu")(values)
    return ids, keras.layers.Dense(SIZE)(values)


def two_tower(manifest):
    """One logit: how well the two vectors agree."""
    user, user_vector = tower("user", USERS)
    item, item_vector = tower("item", ITEMS)
    score = keras.layers.Dot(1)([user_vector, item_vector])
    return keras.Model([user, item], keras.layers.Dense(1)(score))
