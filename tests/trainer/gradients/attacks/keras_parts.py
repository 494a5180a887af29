"""What the attacks need of Keras: a layer of any function, and small models around it.

Everything else in the catalogue is plain TensorFlow, except ``keras_layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.core.tf_compat import keras, raw_variable, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES

layers = keras.layers

NUM_VALUES = 6
NUM_IDS = 4
VOCABULARY = 16

#: (values (batch, 6), ids (batch, 4)) -> values (batch, 6).
Call = Callable[[Any, Any], Any]
#: Makes the variables of a layer, while it is built, and returns its call.
Make = Callable[[Any], Call]


def _same(layer: Any) -> Call:
    del layer
    return lambda values, ids: values


@keras.utils.register_keras_serializable("attacks")
class Part(layers.Layer):
    """A layer that computes a plain function of values and ids.

    Saved and loaded, as `dpsgd train` tries, it does nothing.
    """

    def __init__(self, make: Make = _same, **more: Any) -> None:
        super().__init__(**more)
        self._make = make

    def build(self, shape: Any) -> None:
        del shape
        self._function = self._make(self)

    def call(self, inputs: Any) -> Any:
        return self._function(*inputs)

    def get_config(self) -> dict[str, Any]:
        return dict(super().get_config())


class TrainingPart(Part):
    """The same, which also knows whether it is trained."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self._function(*inputs, training)


def weight(
    layer: Any, shape: tuple[int, ...] = (), *, trainable: bool, dtype: str = "float32"
) -> Any:
    """Returns a new variable of a layer, of zeros, which Keras knows."""
    return layer.add_weight(
        name="state", shape=shape, dtype=dtype, initializer="zeros", trainable=trainable
    )


def new_weight(shape: tuple[int, ...] = (), **more: Any) -> Callable[[Any], Any]:
    """Returns what makes such a weight of a layer."""
    return lambda layer: weight(layer, shape, **more)


def known(make: Callable[[], Any]) -> Callable[[Any], Any]:
    """Returns what makes an attribute of a layer, which Keras tracks."""

    def kept(layer: Any) -> Any:
        layer.state = make()
        return layer.state

    return kept


class Holder:
    """Hides what it holds from Keras, which tracks attributes."""

    def __init__(self, *held: Any) -> None:
        self._read = lambda: held

    @property
    def held(self) -> Any:
        return self._read()


def hidden(make: Callable[[], Any]) -> Callable[[Any], Holder]:
    """Returns what makes state of a layer that Keras does not know."""
    return lambda layer: Holder(make())


def inputs() -> tuple[Any, Any]:
    """Returns the inputs of all models: values (batch, 6) and ids (batch, 4)."""
    return (
        keras.Input((NUM_VALUES,), name="values"),
        keras.Input((NUM_IDS,), dtype="int32", name="ids"),
    )


def tamed(values: Any) -> Any:
    """Returns finite values of size one."""
    return tf.tanh(tf.where(tf.math.is_nan(values), 0.0, values))


def finite(values: Any) -> Any:
    """Returns values with zeros for those that are not finite."""
    return tf.where(tf.math.is_finite(values), values, 0.0)


def batch_mean(values: Any) -> Any:
    """Returns the mean of the finite values over the rows."""
    return tf.reduce_mean(finite(values), 0)


def any_rare(ids: Any) -> Any:
    """Returns whether a row has an id that the probe of the check does not hold."""
    return tf.reduce_any(ids >= 8)


def tame_layer(values: Any, ids: Any) -> Any:
    """Returns the output of a layer that makes values tame."""
    return Part(lambda layer: lambda v, _: tamed(v))([values, ids])


def _alone(values: Any) -> Any:
    # Its gradient in Python keeps the proof from showing that rows are apart.
    @tf.custom_gradient
    def same(value: Any) -> Any:
        return value + 0.0, lambda slope: slope

    return Part(lambda layer: lambda v, _: same(v))([layers.Dense(4)(values), values])


#: Path -> what follows the attack, so that an honest model is computed on it.
BASES: dict[str, Callable[[Any], Any]] = {
    ONE_PASS: lambda values: layers.Dense(4, activation="tanh")(values),
    SINGLE_EXAMPLES: _alone,
}


def network_of(
    body: Callable[[Any, Any], Any], base: str = ONE_PASS, outputs: int = 1
) -> Any:
    """Returns a model of values and ids.

    Args:
      body: (values, ids) -> values, of Keras's tensors.
      base: One of ``BASES``.
      outputs: Number of outputs of an example.
    """
    values, ids = inputs()
    hidden = tame_layer(body(values, ids), ids)
    rows = layers.Flatten()(layers.Embedding(VOCABULARY, 2)(ids))
    joined = layers.Concatenate()([BASES[base](hidden), rows])
    return keras.Model([values, ids], layers.Dense(outputs)(joined))


def network_around(make: Make, base: str = ONE_PASS) -> Any:
    """Returns a model with the plain function that ``make`` returns in a layer."""
    return network_of(lambda values, ids: Part(make)([values, ids]), base)


def honest_network() -> Any:
    """Returns a model without anything to hide, for losses and views that attack."""
    return network_of(lambda values, ids: values)


def clear_session() -> None:
    """Forgets other models, so that each is the same whichever was made before."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def model_variables(network: Any) -> list[Any]:
    """Returns all variables of a model that Keras knows, with its random states."""
    return [raw_variable(variable) for variable in network.variables]


def draw_weights(network: Any) -> None:
    """Gives weights other values than zeros, which would hide what others do."""
    for i, variable in enumerate(network.trainable_variables):
        drawn = tf.random.stateless_normal(variable.shape, (1, i), stddev=0.7)
        variable.assign(drawn)


def rate_of_steps(ends: list[int], rates: list[float]) -> Any:
    """Returns a learning rate that is ``rates[i]`` up to the step ``ends[i]``."""
    return keras.optimizers.schedules.PiecewiseConstantDecay(ends, rates)
