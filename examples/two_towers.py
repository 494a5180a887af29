"""Two towers: a user and a film fit as far as their vectors point the same way."""

from __future__ import annotations

from typing import Any

import keras

layers = keras.layers


def towers(manifest: Any) -> Any:
    """Returns one logit: the product of the two towers' vectors.

    Embeddings begin at a size at which the product has a gradient.
    """
    start = keras.initializers.RandomNormal(stddev=0.5, seed=1)
    user, film, genre = (
        keras.Input((), dtype="int32", name=name) for name in ("user", "film", "genre")
    )
    of_user = layers.Embedding(256, 8, embeddings_initializer=start)(user)
    of_film = layers.Embedding(256, 8)(film)
    of_genre = layers.Embedding(32, 8, embeddings_initializer=start)(genre)
    logit = keras.ops.sum(of_user * (of_film + of_genre), 1, keepdims=True)
    return keras.Model({"user": user, "film": film, "genre": genre}, logit)
