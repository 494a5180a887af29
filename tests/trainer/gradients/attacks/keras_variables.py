"""Variables of Keras: written in scopes, by seeds, by precision; and unknown ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer.gradients.attacks.catalogue import Case, Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    batch_mean,
    known,
    layers,
    new_weight,
    tamed,
)
from trainer.core.tf_compat import keras, tf

CASES = Cases("variable")
_of_values = CASES.of_values

_SHAPE = (NUM_VALUES,)


# -- written in scopes of Keras ----------------------------------------------------


@CASES.state(new_weight(_SHAPE, trainable=False))
def written_after_a_stateless_scope(mean: Any, values: Any, ids: Any) -> Any:
    old = tf.identity(mean)
    with keras.StatelessScope() as scope:
        mean.assign(batch_mean(values))
    mean.assign(scope.get_current_value(mean))
    return values - old


@CASES.state(new_weight(_SHAPE, trainable=False), honest=True)
def rows_within_a_stateless_scope(scale: Any, values: Any, ids: Any) -> Any:
    with keras.StatelessScope():
        scale.assign(tf.ones(NUM_VALUES))
        return tamed(values) * scale.value


# -- seeds -------------------------------------------------------------------------


@CASES.state(known(lambda: keras.random.SeedGenerator(1)))
def seed_counted_by_rare_ids(seeds: Any, values: Any, ids: Any) -> Any:
    state = seeds.state
    rare = tf.reduce_sum(tf.cast(ids >= 8, state.dtype))
    state.assign(state + tf.stack([tf.zeros_like(rare), rare]))
    return values + tf.random.stateless_normal(_SHAPE, state.value)


@CASES.call
def uniform_of_the_global_generator(values: Any, ids: Any) -> Any:
    return tamed(values) * keras.random.uniform(())


# -- variables that Keras does not know --------------------------------------------


@CASES.state(known(lambda: tf.Variable(tf.ones(NUM_VALUES))), leaks=True)
def weight_of_tensorflow(scale: Any, values: Any, ids: Any) -> Any:
    # It would neither be trained nor saved.
    return tamed(values) * scale


# -- attributes of variables -------------------------------------------------------


def _with_variable(name: str, change: Callable[[Any], None], **more: Any) -> None:
    def make(layer: Any) -> Call:
        scale = layer.add_weight(name="scale", shape=_SHAPE, initializer="ones")
        change(scale)
        return lambda values, ids: tamed(values) * scale

    make.__name__ = name
    CASES.layer(make, **more)


def _regularized(variable: Any) -> None:
    variable.regularizer = keras.regularizers.L2(0.1)


def _constrained(variable: Any) -> None:
    variable.constraint = keras.constraints.NonNeg()


def _overwritten(variable: Any) -> None:
    variable.overwrite_with_gradient = True


_with_variable("regularizer of a variable", _regularized, leaks=True)
_with_variable("constraint of a variable", _constrained, honest=True)
_with_variable("overwritten with its gradient", _overwritten, leaks=True)


# -- precision ---------------------------------------------------------------------

for _dtype in ("mixed_bfloat16", "float16", "float64"):
    _of_values(
        f"dense of {_dtype}",
        lambda v, d=_dtype: layers.Dense(4, "tanh", dtype=d)(v),
        leaks=True,
    )


def _global_policy(name: str) -> Callable[[], Any]:
    def network() -> Any:
        old = keras.config.dtype_policy()
        keras.config.set_dtype_policy(name)
        try:
            values = keras.Input((NUM_VALUES,), name="values")
            return keras.Model(values, layers.Dense(1)(layers.Dense(3)(values)))
        finally:
            keras.config.set_dtype_policy(old)

    return network


CASES.put("policy", Case(whole=_global_policy("mixed_bfloat16"), leaks=True))


@CASES.state(new_weight(_SHAPE, trainable=True, dtype="float16"))
def float_16_weight(scale: Any, values: Any, ids: Any) -> Any:
    return tamed(values) * (1.0 + tf.cast(scale, tf.float32))


# -- quantized and adapted layers --------------------------------------------------


def _changed_dense(name: str, change: Callable[[Any], Any], **more: Any) -> None:
    def apply(values: Any) -> Any:
        dense = layers.Dense(4)
        dense.build((None, NUM_VALUES))
        change(dense)
        return dense(values)

    _of_values(name, apply, **more)


_changed_dense("int4", lambda dense: dense.quantize("int4"))
_changed_dense("float8", lambda dense: dense.quantize("float8"), leaks=True)
_changed_dense("lora", lambda dense: dense.enable_lora(2), honest=True)
