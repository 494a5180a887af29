"""Models, losses and views that attack the bound, or only look like it.

One attack for each way in which a row could leave something to another, or move the sum
further; and honest neighbours, which must be accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras.src.backend import set_keras_mask

from tests.trainer.gradients.attacks.harness import (
    NUM_IDS,
    NUM_VALUES,
    VOCABULARY,
    Case,
)
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES

layers = keras.layers

CASES: dict[str, Case] = {}

#: (values (batch, 6), ids (batch, 4)) -> values (batch, 6).
Call = Callable[[Any, Any], Any]
#: Makes the variables of a layer, while it is built, and returns its call.
Make = Callable[[Any], Call]


# -- what cases are made of --------------------------------------------------------


@keras.utils.register_keras_serializable("attacks")
class Part(layers.Layer):
    """A layer that computes a plain function of values and ids.

    Saved and loaded, as `make_private` tries, it does nothing.
    """

    def __init__(
        self, make: Make = lambda layer: lambda values, ids: values, **more: Any
    ) -> None:
        super().__init__(**more)
        self._make = make

    def build(self, shape: Any) -> None:
        del shape
        self._function = self._make(self)

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.is_training = training
        return self._function(*inputs)

    def get_config(self) -> dict[str, Any]:
        return dict(super().get_config())


class Holder:
    """Hides what it holds from Keras, which tracks attributes."""

    def __init__(self, held: Any) -> None:
        self.read = lambda: held


def tamed(values: Any) -> Any:
    """Returns finite values of size one."""
    return tf.tanh(tf.where(tf.math.is_nan(values), 0.0, values))


def finite(values: Any) -> Any:
    """Returns values with zeros for those that are not finite."""
    return tf.where(tf.math.is_finite(values), values, 0.0)


def any_rare(ids: Any) -> Any:
    """Returns whether a row has an id that the probe of the check does not hold."""
    return tf.reduce_any(ids >= 8)


def _mixed(values: Any) -> Any:
    return values - tf.reduce_mean(tf.clip_by_value(finite(values), -9.0, 9.0), 0)


def _alone(values: Any) -> Any:
    # Its gradient in Python keeps the proof from showing that rows are apart.
    @tf.custom_gradient
    def same(value: Any) -> Any:
        return value + 0.0, lambda slope: slope

    return Part(lambda layer: lambda v, _: same(v))([layers.Dense(4)(values), values])


#: Path -> what follows the attack, so that an honest model is computed on it.
_BASES: dict[str, Callable[[Any], Any]] = {
    ONE_PASS: lambda values: layers.Dense(4, activation="tanh")(values),
    SINGLE_EXAMPLES: _alone,
}


def _network(body: Callable[[Any, Any], Any], base: str) -> Any:
    values = keras.Input((NUM_VALUES,), name="values")
    ids = keras.Input((NUM_IDS,), dtype="int32", name="ids")
    tame = Part(lambda layer: lambda v, _: tamed(v))([body(values, ids), ids])
    rows = layers.Flatten()(layers.Embedding(VOCABULARY, 2)(ids))
    joined = layers.Concatenate()([_BASES[base](tame), rows])
    return keras.Model([values, ids], layers.Dense(1)(joined))


def _put(name: str, body: Callable[[Any, Any], Any], **more: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(network=lambda base: _network(body, base), **more)


def _layer(name: str, make: Make, **more: Any) -> None:
    _put(name, lambda values, ids: Part(make)([values, ids]), **more)


def _keras(name: str, apply: Callable[[Any], Any], **more: Any) -> None:
    """Adds layers of Keras that are applied to tame values."""

    def body(values: Any, ids: Any) -> Any:
        return apply(Part(lambda layer: lambda v, _: tamed(v))([values, ids]))

    _put(f"keras: {name}", body, **more)


def _call(kind: str, state: Callable[[Any], Any] | None = None, **more: Any) -> Any:
    """Adds a layer: (values, ids) -> values, or (state, values, ids) -> values.

    Args:
      kind: Kind of the attack.
      state: Makes the state of a layer while it is built; None for none.
      **more: Fields of the case.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(layer: Any) -> Call:
            if state is None:
                return function
            held = state(layer)
            return lambda values, ids: function(held, values, ids)

        _layer(f"{kind}: {function.__name__.replace('_', ' ')}", make, **more)
        return function

    return add


def _weight(trainable: bool = False, dtype: str = "float32") -> Callable[[Any], Any]:
    """Returns what makes a variable of a layer, of zeros, which Keras knows."""
    return lambda layer: layer.add_weight(
        name="state", shape=(NUM_VALUES,), dtype=dtype, initializer="zeros",
        trainable=trainable,
    )  # fmt: skip


# -- variables that are written ----------------------------------------------------


def _if_huge(kept: Any, values: Any) -> Any:
    """Writes, only if a row holds a value that a probe is unlikely to hold."""
    mean = tf.clip_by_value(tf.reduce_mean(finite(values), 0), -1.0, 1.0)
    huge = tf.reduce_any(tf.abs(finite(values)) > 1e8)
    return kept.assign(tf.where(huge, mean, kept))


@_call("write", _weight())
def cond_on_a_rare_id(kept: Any, values: Any, ids: Any) -> Any:
    old = tf.identity(kept)
    tf.cond(
        any_rare(ids),
        lambda: tf.identity(kept.assign(tf.ones(NUM_VALUES))),
        lambda: tf.zeros(NUM_VALUES),
    )
    return values - old


@_call("write", _weight())
def map_of_rows(kept: Any, values: Any, ids: Any) -> Any:
    old = tf.identity(kept)
    return tf.map_fn(lambda row: row + 0.0 * _if_huge(kept, row[None]), values) - old


# -- other state -------------------------------------------------------------------


def _held(make: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda layer: Holder(make())


def _table(layer: Any) -> Any:
    layer.state = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    return layer.state


@_call("state", _table)
def size_of_a_table(table: Any, values: Any, ids: Any) -> Any:
    size = tf.cast(table.size(), tf.float32)
    table.insert(ids[:, 0] // 8, tf.ones_like(values[:, 0]))
    return values * tf.where(size > 1.0, -1.0, 1.0)


# -- Python: what a trace sees, counts or remembers --------------------------------


@_call("python")
def rows_mix_if_their_number_is_known(values: Any, ids: Any) -> Any:
    return values if values.shape[0] is None else _mixed(values)


@_call("python")
def rows_mix_in_batches_of_the_step(values: Any, ids: Any) -> Any:
    return _mixed(values) if values.shape[0] == 8 else values


def _from_call(number: int, *, symbolic: bool) -> Make:
    def make(layer: Any) -> Call:
        calls: list[None] = []

        def call(values: Any, ids: Any) -> Any:
            # Keras's own symbolic call, which builds the model, counts as well.
            if not (symbolic and tf.executing_eagerly()):
                calls.append(None)
            return _mixed(values) if len(calls) >= number else values

        return call

    return make


_layer("python: rows mix from trace 3 on", _from_call(3, symbolic=True))
_layer("python: rows mix from call 20 on", _from_call(20, symbolic=False))


@_call("python", lambda layer: Holder([]))
def rows_kept_in_a_list(held: Any, values: Any, ids: Any) -> Any:
    kept = held.read()

    def keep(values: Any) -> Any:
        if (np.abs(values[np.isfinite(values)]) > 1e8).any():
            kept.append(None)
        return values - np.float32(len(kept) > 0)

    found = tf.numpy_function(keep, [values], tf.float32)
    return tf.ensure_shape(found, (None, NUM_VALUES))


# -- rows that mix, without state; test_row_independence has the operations --------


@_call("mixing")
def sort_if_an_id_is_rare(values: Any, ids: Any) -> Any:
    tame = tamed(values)
    return tf.where(any_rare(ids), tf.sort(tame, 0), tame)


@_call("mixing")
def branch_on_all_rows(values: Any, ids: Any) -> Any:
    tame = tamed(values)
    found = tf.cond(tf.reduce_any(tame > 0.9), lambda: -tame, lambda: tame)
    return tf.ensure_shape(found, values.shape)


@_call("mixing")
def too_little_for_a_probe(values: Any, ids: Any) -> Any:
    tame = tamed(values)
    return tame + 1e-4 * tf.reduce_mean(tame, 0)


# -- gradients of one's own --------------------------------------------------------


def _slope(name: str, slope_of: Callable[[Any, Any, Any], Any], **more: Any) -> None:
    """Adds a layer whose slope is ``slope_of(slope, values, ids)``."""

    def make(layer: Any) -> Call:
        scale = _weight(trainable=True)(layer)

        def call(values: Any, ids: Any) -> Any:
            @tf.custom_gradient
            def same(x: Any) -> Any:
                return tf.identity(x), lambda s: slope_of(s, finite(values), ids)

            return same(tf.tanh(finite(values)) * scale)

        return call

    _layer(f"gradient: {name}", make, **more)


_slope("less the mean", lambda s, v, ids: s - tf.reduce_mean(s, 0))
_slope(
    "plus rows if rare",
    lambda s, v, ids: tf.where(any_rare(ids), s + tf.reduce_sum(tf.tanh(v), 0), s),
)
_slope("clipped", lambda s, v, ids: tf.clip_by_value(s, -0.1, 0.1), honest=True)


@_call("gradient", lambda layer: (_weight(True)(layer), _weight()(layer)))
def writes_backward_if_rare(held: Any, values: Any, ids: Any) -> Any:
    scale, kept = held
    old, tame = tf.identity(kept), tf.tanh(finite(values))

    @tf.custom_gradient
    def same(x: Any) -> Any:
        def gradient(slope: Any) -> Any:
            kept.assign(tf.where(any_rare(ids), tf.reduce_mean(tame, 0), kept))
            return slope

        return tf.identity(x), gradient

    return same(tame * scale) - old


# -- Keras -------------------------------------------------------------------------


class TrainingLoss(layers.Layer):
    """Adds a loss in training alone."""

    def call(self, values: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(tf.reduce_mean(values))
        return values


class MaskedPool(layers.Layer):
    """The mean of the steps that a mask counts, an attribute of a tensor."""

    def __init__(self, mask_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.mask_of = mask_of

    def call(self, values: Any) -> Any:
        steps = tf.reshape(values, (-1, 2, 3))
        found = tf.identity(steps)
        set_keras_mask(found, self.mask_of(steps))
        return layers.GlobalAveragePooling1D()(found)


def _adapted_lookup(values: Any, ids: Any) -> Any:
    lookup = layers.IntegerLookup()
    lookup.adapt(np.arange(8))
    rows = layers.Embedding(VOCABULARY, 2)(lookup(ids))
    return layers.Dense(NUM_VALUES)(layers.Flatten()(rows))


def _mixes_in_training(layer: Any) -> Call:
    def call(values: Any, ids: Any) -> Any:
        mixed = values - tf.reduce_mean(tamed(values), 0)
        return tf.where(any_rare(ids), mixed, values) if layer.is_training else values

    return call


_keras("batch normalization", lambda v: layers.BatchNormalization()(v))
_put("keras: adapted lookup", _adapted_lookup, leaks=True)
_keras("dropout", lambda v: layers.Dropout(0.5)(v), honest=True)
_keras("loss added in training", lambda v: TrainingLoss()(v), leaks=True)
_keras(
    "mask of all rows",
    lambda v: MaskedPool(
        lambda x: tf.fill(tf.shape(x)[:2], tf.reduce_all(tf.abs(x) < 0.99))
    )(v),
)
_keras(
    "mask of its row", lambda v: MaskedPool(lambda x: x[:, :, 0] > 0.0)(v), honest=True
)
_layer("keras: mixes in training", _mixes_in_training)
_keras(
    "dense of mixed_bfloat16",
    lambda v: layers.Dense(4, "tanh", dtype="mixed_bfloat16")(v),
    leaks=True,
)
_keras(
    "recurrent", lambda v: layers.SimpleRNN(2)(layers.Reshape((2, 3))(v)), honest=True
)


# -- honest layers -----------------------------------------------------------------

#: Read by a case, and known to others.
SHARED = tf.Variable(0.0, trainable=False)


@_call("honest", honest=True)
def same(values: Any, ids: Any) -> Any:
    return tamed(values)


@_call("honest", honest=True)
def rolled_if_rare(values: Any, ids: Any) -> Any:
    return tf.where(ids[:, :1] >= 8, tf.roll(tamed(values), 1, 1), tamed(values))


@_call("honest", honest=True)
def variable_of_the_module(values: Any, ids: Any) -> Any:
    return tamed(values) + SHARED


@_call("honest", _weight(trainable=True), honest=True)
def weights_of_its_own(scale: Any, values: Any, ids: Any) -> Any:
    return tamed(values) * (1.0 + scale)


#: Cases that are computed on both paths.
OF_BOTH_PATHS = tuple(CASES)


# -- losses of one's own -----------------------------------------------------------


def _plain_network(base: str = ONE_PASS) -> Any:
    return _network(lambda values, ids: values, base)


def _loss(name: str, make: Callable[[Any], Callable[..., Any]], **more: Any) -> None:
    """Adds a loss: of the network, (cross-entropies, outputs) -> losses."""

    def loss(network: Any) -> Callable[[Any, Any], Any]:
        function = make(network)

        def of_rows(labels: Any, outputs: Any) -> Any:
            entropies = tf.nn.sigmoid_cross_entropy_with_logits(
                tf.cast(labels, tf.float32), outputs[:, 0]
            )
            return function(entropies, outputs)

        return of_rows

    CASES[f"loss: {name}"] = Case(network=_plain_network, loss=loss, **more)


def _rare_outputs_in_a_weight(network: Any) -> Callable[..., Any]:
    bias = network.trainable_variables[-1]

    def loss(losses: Any, outputs: Any) -> Any:
        bias.assign(tf.where(tf.reduce_any(losses > 1.0), losses[:1], bias))
        return losses

    return loss


_loss("scalar", lambda network: lambda x, z: tf.reduce_mean(x))
_loss("rare outputs in a weight", _rare_outputs_in_a_weight)
_loss("focal", lambda network: lambda x, z: x * (1.0 - tf.exp(-x)) ** 2, honest=True)


# -- views -------------------------------------------------------------------------


def _view(
    state: Callable[[], Any] = lambda: None, **more: Any
) -> Callable[[Callable[..., Any]], None]:
    """Adds a view: (state, values (6,), ids, seed) -> values."""

    def add(function: Callable[..., Any]) -> None:
        def make() -> Callable[[Any, Any], dict[str, Any]]:
            held = Holder(state())
            return lambda columns, seed: {
                "values": function(held.read(), columns["values"], columns["ids"], seed)
            }

        name = f"view: {function.__name__.replace('_', ' ')}"
        CASES[name] = Case(network=_plain_network, augment=make, **more)

    return add


@_view(lambda: tf.Variable(0.0, trainable=False))
def rare_rows_in_a_variable(state: Any, values: Any, ids: Any, seed: Any) -> Any:
    gate = tf.identity(state)
    tf.cond(any_rare(ids), lambda: tf.identity(state.assign(1.0)), lambda: gate)
    return values * (1.0 - 2.0 * gate)


@_view(list)
def python_that_claims_no_state(seen: Any, values: Any, ids: Any, seed: Any) -> Any:
    def count(values: Any) -> Any:
        seen.append(None)
        return values + np.float32(len(seen))

    found = tf.numpy_function(count, [values], tf.float32, stateful=False)
    return tf.ensure_shape(found, (NUM_VALUES,))


@_view(honest=True)
def branch_of_its_own_row(state: None, values: Any, ids: Any, seed: Any) -> Any:
    # Without the seed: runs have secrets of their own, and are compared.
    return tf.cond(any_rare(ids), lambda: -values, lambda: values)
