"""Converts an exported Keras 2 model to Keras 3, which cannot read Keras 2's files.

    from dpsgd import to_keras_3
    to_keras_3("run/model.keras").save("keras_3.keras")  # keras.models.load_model

Every layer becomes the Keras 3 layer of the same class, with its weights; TensorFlow
functions between layers become ``keras.ops``.  The result needs neither TensorFlow nor
this package, and runs on any backend of Keras 3.

Formal guarantees:
  - The result agrees with the model on made-up rows, some with missing numbers.
  - A layer or function without a known counterpart is refused by name.

Other models load as ``keras.layers.TFSMLayer("run/saved_model")``.

Public: the model.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from accounting.validation import InputError
from trainer.tf_compat import keras as keras_2
from trainer.tf_compat import tf

# To compare both models here; the conversion can be loaded on any other backend.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras as keras_3
from keras import ops

#: Number of rows on which both models are compared, and relative tolerance.
_PROBE_ROWS = 16
_TOLERANCE = 1e-4

#: Ends of the names in a layer's configuration that matter only for training.
_TRAINING_ONLY = ("_initializer", "_regularizer", "_constraint")

_RECURRENT = (keras_3.layers.RNN, keras_3.layers.Bidirectional)


def _elementwise(name: str) -> Callable[..., Any]:
    """Returns a function of ``keras.ops`` that takes tensors and lists of numbers."""

    def call(*values: Any) -> Any:
        kinds = [v.dtype for v in values if hasattr(v, "dtype") and v.dtype != "bool"]
        arrays = (
            np.asarray(v, kinds[0]) if isinstance(v, list | tuple) else v
            for v in values
        )
        return getattr(ops, name)(*arrays)

    return call


def _item(values: Any, keys: Any, _variable: Any) -> Any:
    """Returns a part of a tensor; in a graph of Keras 2, slices are dicts."""
    keys = keys if isinstance(keys, list | tuple) else (keys,)
    parts = (
        slice(key["start"], key["stop"], key["step"])
        if isinstance(key, Mapping)
        else key
        for key in keys
    )
    return values[tuple(parts)]


#: Name of a TensorFlow function, without "math." and "nn." -> the function of Keras 3
#: with the same arguments in the same order.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__operators__.add": _elementwise("add"),
    "__operators__.getitem": _item,
    "cast": ops.cast,
    "clip_by_value": ops.clip,
    "concat": ops.concatenate,
    "expand_dims": ops.expand_dims,
    "is_nan": ops.isnan,
    "reduce_max": ops.max,
    "reduce_mean": ops.mean,
    "reduce_sum": ops.sum,
    "reshape": ops.reshape,
    "softmax": lambda x, axis: ops.softmax(x, -1 if axis is None else axis),
    "truediv": _elementwise("divide"),
    "zeros_like": lambda x, dtype, *_: ops.zeros_like(x, dtype),
    **{
        name: _elementwise(name)
        for name in (
            "abs", "add", "divide", "equal", "exp", "greater", "less", "log", "log1p",
            "logical_and", "logical_not", "logical_or", "maximum", "minimum",
            "multiply", "negative", "not_equal", "relu", "sigmoid", "sign", "sqrt",
            "square", "subtract", "tanh", "where",
        )
    },
}  # fmt: skip


def to_keras_3(model: Any) -> Any:
    """Returns the Keras 3 model that is equivalent to a Keras 2 model.

    Args:
      model: A functional ``tf_keras.Model``, or the path of one in a ``.keras`` file.

    Raises:
      InputError: a layer or a function has no known counterpart, or the models differ.
    """
    if isinstance(model, str | os.PathLike):
        if not pathlib.Path(model).is_file():
            raise InputError(
                f"Expected {model} to be a .keras file, as the model.keras of a run."
            )
        model = keras_2.models.load_model(model, compile=False)
    converted = _Conversion(model).model()
    _check_same(model, converted)
    return converted


def _refuse(what: str) -> InputError:
    return InputError(
        f"Expected layers that Keras 3 has, too; {what}. Load the SavedModel as "
        "keras.layers.TFSMLayer(path)."
    )


class _Conversion:
    """Calls the counterparts of all layers of a functional model, in order."""

    def __init__(self, network: Any) -> None:
        if not isinstance(network, keras_2.Model) or not network._is_graph_network:
            raise _refuse(f"{type(network).__name__} is no functional model")
        self._network = network
        self._layers: dict[int, Any] = {}
        self._tensors: dict[int, Any] = {}

    def model(self) -> Any:
        """Returns the converted model."""
        inputs = tf.nest.map_structure(self._input, self._network._nested_inputs)
        outputs = self._replay()
        return keras_3.Model(inputs, outputs, name=self._network.name)

    def call(self, inputs: Any) -> Any:
        """Returns the outputs for inputs of another model."""
        own = self._network._nested_inputs
        if isinstance(own, Mapping) and not isinstance(inputs, Mapping):
            raise _refuse(f"the inputs of {self._network.name} are called otherwise")
        pairs = zip(tf.nest.flatten(own), tf.nest.flatten(inputs), strict=True)
        self._tensors = {id(mine): theirs for mine, theirs in pairs}
        return self._replay()

    def _input(self, tensor: Any) -> Any:
        name = tensor.node.layer.name
        made = keras_3.Input(
            tuple(tensor.shape[1:]), dtype=tensor.dtype.name, name=name
        )
        self._tensors[id(tensor)] = made
        return made

    def _replay(self) -> Any:
        for _, nodes in sorted(self._network._nodes_by_depth.items(), reverse=True):
            for node in nodes:
                if not node.is_input:
                    self._replay_node(node)
        return self._mapped(self._network._nested_outputs)

    def _replay_node(self, node: Any) -> None:
        given = {k: v for k, v in node.call_kwargs.items() if v is not None}
        arguments, named = self._mapped(node.call_args), self._mapped(given)
        found = self._called(node.layer, arguments, named)
        pairs = zip(tf.nest.flatten(node.outputs), tf.nest.flatten(found), strict=True)
        self._tensors |= {id(mine): theirs for mine, theirs in pairs}

    def _mapped(self, structure: Any) -> Any:
        return tf.nest.map_structure(
            lambda leaf: self._tensors.get(id(leaf), leaf), structure
        )

    def _called(self, layer: Any, arguments: Any, named: dict[str, Any]) -> Any:
        if isinstance(layer, keras_2.Model):
            return _Conversion(layer).call(*arguments)
        if getattr(layer, "symbol", None) is not None:
            return _call_function(layer, arguments, named)
        made = self._layers.get(id(layer))
        if made is None:
            made = self._layers[id(layer)] = _counterpart(layer)
        result = _call_layer(made, arguments, named)
        made.set_weights(layer.get_weights())
        return result


def _call_layer(layer: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Calls a layer of Keras 3 with what its counterpart of Keras 2 was given."""
    if isinstance(layer, _RECURRENT) and isinstance(arguments[0], list):
        # Keras 2 keeps the first state behind the sequences.
        (sequences, *state), *rest = arguments
        arguments, named = (sequences, *rest), {**named, "initial_state": state}
    with _refused_if_it_fails(layer):
        return layer(*arguments, **named)


@contextlib.contextmanager
def _refused_if_it_fails(layer: Any) -> Iterator[None]:
    """Quotes what Keras 3 says of a layer.  A model is public."""
    try:
        yield
    except Exception as error:
        text = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise _refuse(
            f"of {layer.name}, a {type(layer).__name__}, it says: {text}"
        ) from None


def _call_function(layer: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Calls the Keras 3 counterpart of a TensorFlow function between layers."""
    symbol = layer.symbol.removeprefix("tf.")
    name = symbol.removeprefix("math.").removeprefix("nn.")
    if name not in _FUNCTIONS:
        raise _refuse(f"the function tf.{symbol} is not known")
    bound = inspect.signature(layer.function).bind(*arguments, **named)
    bound.apply_defaults()
    bound.arguments.pop("name", None)
    with _refused_if_it_fails(layer):
        return _FUNCTIONS[name](*bound.arguments.values())


def _counterpart(layer: Any) -> Any:
    """Returns a layer of Keras 3 with the class and settings of ``layer``."""
    for part in layer._flatten_layers():
        own = type(part)
        if not own.__module__.startswith("tf_keras."):
            raise _refuse(f"{part.name} is a {own.__name__} of {own.__module__}")
    name = type(layer).__name__
    kind = getattr(keras_3.layers, name, None)
    if kind is None:
        raise _refuse(f"{layer.name} is a {name}")
    with _refused_if_it_fails(layer):
        return kind.from_config(_settings(kind, layer.get_config()))


def _settings(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of a layer that its class ``kind`` has in Keras 3."""
    known = {
        name
        for base in kind.__mro__
        for name in inspect.signature(base.__init__).parameters
    }
    return {
        key: _setting(value)
        for key, value in config.items()
        if key in known and not key.endswith(_TRAINING_ONLY)
    }


def _setting(value: Any) -> Any:
    """Returns a setting; of a wrapped layer, the settings that Keras 3 has."""
    if isinstance(value, list):
        return [_setting(each) for each in value]
    if not isinstance(value, Mapping) or value.get("module") != "keras.layers":
        return value
    kind = getattr(keras_3.layers, value["class_name"])
    return {
        "module": "keras.layers",
        "class_name": value["class_name"],
        "config": _settings(kind, value["config"]),
        "registered_name": None,
    }


def _check_same(model: Any, converted: Any) -> None:
    """Refuses two models that differ on made-up rows."""
    random = np.random.default_rng(0)
    rows = tf.nest.map_structure(lambda t: _probe(t, random), model.input)
    wanted, found = (tf.nest.flatten(one(rows)) for one in (model, converted))
    for a, b in zip(wanted, found, strict=True):
        same = np.shape(a) == np.shape(b) and np.allclose(
            np.asarray(a), np.asarray(b), rtol=_TOLERANCE, atol=1e-6, equal_nan=True
        )
        if not same:
            raise _refuse("both models give different predictions")


def _probe(tensor: Any, random: np.random.Generator) -> np.ndarray:
    """Returns rows of small integers, or of numbers, some of them missing."""
    shape = (_PROBE_ROWS, *tensor.shape[1:])
    dtype = tensor.dtype.as_numpy_dtype
    if not tensor.dtype.is_floating:
        return random.integers(0, 2, shape).astype(dtype)
    values = random.normal(0, 3, shape)
    values[0] = np.nan
    return values.astype(dtype)
