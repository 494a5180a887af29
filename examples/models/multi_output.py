"""One model, two labels: did a visitor click, and for how many seconds did they stay?

Columns: `features`, floats (count,); `clicked`, 0 or 1; `seconds`, a float.  Outputs
are named as the columns that they are held against; one function adds the losses up:

    dpsgd train --batches batches --eval data/test --out run \\
        --model multi_output:visits --loss multi_output:loss \\
        --epsilon 3 --delta 1e-6 --l2-norm-clip 1
"""

import keras
import tensorflow as tf


def visits(manifest):
    """A logit, and the logarithm of the seconds."""
    (count,) = next(c.shape for c in manifest.columns if c.name == "features")
    features = keras.Input((count,), name="features")
    hidden = keras.layers.Dense(16, activation="relu")(features)
    outputs = {
        "clicked": keras.layers.Dense(1)(hidden),
        "seconds": keras.layers.Dense(1)(hidden),
    }
    return keras.Model(features, outputs)


def loss(labels, outputs):
    """One number for each example."""
    clicked = tf.nn.sigmoid_cross_entropy_with_logits(
        labels=tf.cast(labels["clicked"], tf.float32), logits=outputs["clicked"][:, 0]
    )
    seconds = tf.math.log1p(tf.nn.relu(labels["seconds"]))
    return clicked + tf.square(outputs["seconds"][:, 0] - seconds)
