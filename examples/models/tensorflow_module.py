"""A factorization machine in plain TensorFlow: a tf.Module, no Keras layer.

Columns: `user` and `item`, int32 ids below USERS and ITEMS; `label`, 0 or 1.

    dpsgd train --batches batches --eval data/test --out run \\
        --model tensorflow_module:machine --epsilon 3 --delta 1e-6 --l2-norm-clip 1

In Python, `make_private(FactorizationMachine(), ...)` takes the module, and
`FunctionModel(function, variables)` any function of a dict of columns.
"""

import tensorflow as tf

USERS = 1000
ITEMS = 500
SIZE = 8


class FactorizationMachine(tf.Module):
    """The logit of a pair: a bias, and the product of two vectors."""

    def __init__(self):
        super().__init__(name="factorization_machine")
        random = tf.random.Generator.from_seed(0)
        self.users = tf.Variable(random.normal((USERS, SIZE), stddev=0.3), name="users")
        self.items = tf.Variable(random.normal((ITEMS, SIZE), stddev=0.3), name="items")
        self.bias = tf.Variable(0.0, name="bias")

    def __call__(self, columns):
        users = tf.gather(self.users, columns["user"])
        items = tf.gather(self.items, columns["item"])
        return tf.reduce_sum(users * items, 1, keepdims=True) + self.bias


def machine(manifest):
    """One logit for each pair."""
    return FactorizationMachine()
