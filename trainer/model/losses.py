"""Losses per example, and the labels that each loss takes.

A user's loss is ``--loss module:function``, where ``function(labels, outputs)`` returns
one number per example:

    def absolute_error(labels, outputs):
        return tf.abs(tf.cast(labels, tf.float32) - outputs[:, 0])

``labels`` is the column ``label``, or for a dict of outputs the dict of the columns
with the same names.

Formal guarantees:
  - ``accepts`` decides for every row, from this row alone, whether the loss is defined
    for its label.  (Other rows contribute nothing: see ``per_example``.)
  - ``check_range`` refuses probabilities under a loss on logits, whatever op or layer
    computes them, and logits under a loss on probabilities.  It does not know which of
    them a user's loss takes.
  - A loss known by name is a function of the row alone.  ``model_check`` tests this for
    a user's loss.

Sensitive: labels, outputs, losses.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError, check_choice
from trainer.model.metrics import BINARY, CLASSES, LOSSES, OTHER
from trainer.model.swapped_weights import weights_of
from trainer.tf_compat import keras, tf

LOGITS = "logits"
PROBABILITIES = "probabilities"

#: Standard deviations of the random weights of ``check_range``: logits that are small,
#: or that saturate, leave [0, 1] at one of them.
_SCALES = (0.3, 3.0, 30.0)
#: Draws per scale.  A logit is negative with probability 1/2, so that logits pass for
#: probabilities with probability at most 2^-15, even if all rows have the same logit.
_MODELS_PER_SCALE = 5
#: Rounding error of a sum of probabilities.
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss per example.

    Attributes:
      name: Keras's name, or "module:function".
      task: "binary", "classes" or "other".
      per_example: (labels, outputs) -> float losses (batch,).
      accepts: (labels, number of classes) -> bool (batch,); dicts for several outputs.
      allowed: Accepted labels in words; "{last}" stands for the last class.
      predict: Outputs of the network -> outputs of the exported model.
      ones_own: Whether a user's function computes it.
      takes: LOGITS, PROBABILITIES, or None if neither or unknown.
    """

    name: str
    task: str
    per_example: Callable[[Any, Any], Any]
    accepts: Callable[[Any, Any], Any]
    allowed: str
    predict: Callable[[Any], Any] = lambda outputs: outputs
    ones_own: bool = False
    takes: str | None = None


def loss_by_name(name: str) -> Loss:
    """Returns the loss with the Keras name ``name``; cross-entropies take logits.

    Raises:
      InputError: no such loss.
    """
    check_choice("loss", name, tuple(LOSSES))
    return _KNOWN.get(name) or _keras_loss(name)


def loss_of_ones_own(name: str, function: Callable[[Any, Any], Any]) -> Loss:
    """Returns the loss that a user's function computes.

    Args:
      name: "module:function".
      function: (labels, outputs) -> one number per example, (batch,).
    """
    return Loss(
        name=name,
        task=OTHER,
        per_example=lambda labels, outputs: tf.cast(
            function(labels, outputs), tf.float32
        ),
        accepts=_finite,
        allowed="finite",
        ones_own=True,
    )


def loss_of_keras(loss: Any, weights: Mapping[str, float] | None = None) -> Loss:
    """Returns the loss of ``compile(loss=..., loss_weights=...)``.

    Args:
      loss: A name, an instance or a function, which returns one number per example, or
        several to be averaged; for a dict of outputs a dict of them, which add up.
      weights: Name of an output -> factor of its loss; None for 1.

    Raises:
      InputError: a loss that depends on the whole batch, or weights of other outputs.
    """
    if isinstance(loss, Mapping):
        return _sum_of_losses(
            {n: loss_of_keras(one) for n, one in loss.items()}, weights
        )
    if weights is not None:
        raise InputError(
            "Expected loss_weights only beside a dict of losses, one for each output. "
            "Multiply a single loss in a function of your own."
        )
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if not callable(loss):
        raise InputError(
            "Expected one loss in compile, or for several outputs a dict of losses by "
            "the names of the outputs."
        )
    is_object = isinstance(loss, keras.losses.Loss)
    if is_object and type(loss).__call__ is not keras.losses.Loss.__call__:
        raise InputError(
            f"Expected a loss whose call says all; __call__ of {type(loss).__name__}, "
            "which is for a whole batch, is not used. Put what it does into call."
        )
    if str(getattr(loss, "__module__", "")).partition(".")[0] == "tf_keras":
        raise InputError(
            f"Expected a loss of Keras 3; {loss!r} is of tf_keras. Take the one of the "
            "same name from keras.losses."
        )
    name = type(loss).__name__ if is_object else getattr(loss, "__name__", "loss")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if "hinge" in name:
        raise InputError(
            f"Expected a loss of each example; Keras's {name} converts labels by a "
            "look at the whole batch. Choose another, such as binary_crossentropy."
        )
    function = loss.call if is_object else loss
    known = _KNOWN.get(name)
    return Loss(
        name=name,
        task=known.task if known else OTHER,
        per_example=lambda labels, outputs: _mean_of_row(
            tf.cast(function(_beside(labels, outputs), outputs), tf.float32)
        ),
        accepts=known.accepts if known else _finite,
        allowed=known.allowed if known else "finite",
        ones_own=not (is_object or getattr(keras.losses, name, None) is loss),
        takes=_takes(loss),
    )


def _sum_of_losses(
    losses: Mapping[str, Loss], weights: Mapping[str, float] | None
) -> Loss:
    """Returns the weighted sum of the losses of several outputs, by their names."""
    factors = dict.fromkeys(losses, 1.0) if weights is None else dict(weights)
    if set(factors) != set(losses):
        raise InputError(
            f"Expected loss_weights of the outputs that have a loss, "
            f"{', '.join(sorted(losses))}; got {', '.join(sorted(factors))}."
        )

    def per_example(labels: Any, outputs: Any) -> Any:
        found = [
            factors[name] * one.per_example(labels[name], outputs[name])
            for name, one in losses.items()
        ]
        return tf.add_n(found)

    def accepts(labels: Any, num_classes: Mapping[str, int]) -> Any:
        found = [
            one.accepts(labels[name], num_classes[name]) for name, one in losses.items()
        ]
        return tf.reduce_all(tf.stack(found), 0)

    return Loss(
        name=" + ".join(f"{name}: {one.name}" for name, one in losses.items()),
        task=OTHER,
        per_example=per_example,
        accepts=accepts,
        allowed="those that its losses take",
        ones_own=True,
    )


def _takes(loss: Any) -> str | None:
    """Returns whether Keras's ``from_logits`` asks for logits or probabilities."""
    if isinstance(loss, keras.losses.Loss):
        from_logits = loss.get_config().get("from_logits")
    else:
        try:
            parameter = inspect.signature(loss).parameters.get("from_logits")
        except (TypeError, ValueError):  # a callable without a signature
            parameter = None
        from_logits = None if parameter is None else parameter.default
    if isinstance(from_logits, bool):
        return LOGITS if from_logits else PROBABILITIES
    return None


def _beside(labels: Any, outputs: Any) -> Any:
    """Returns labels (batch,) as (batch, 1) if outputs are, as Keras's fit does."""
    if tf.nest.is_nested(outputs) or tf.nest.is_nested(labels):
        return labels
    if len(labels.shape) == 1 and tuple(outputs.shape[1:]) == (1,):
        return tf.expand_dims(labels, 1)
    return labels


def _all_of_row(value: Any) -> Any:
    """Returns whether all booleans of a row are true: (batch, ...) -> (batch,)."""
    return tf.reduce_all(tf.reshape(value, (tf.shape(value)[0], -1)), 1)


def _mean_of_row(value: Any) -> Any:
    return tf.reduce_mean(tf.reshape(value, (tf.shape(value)[0], -1)), 1)


def _finite(labels: Any, num_classes: int) -> Any:
    del num_classes  # any number is accepted
    finite = [
        _all_of_row(tf.math.is_finite(tf.cast(leaf, tf.float64)))
        for leaf in tf.nest.flatten(labels)
    ]
    return tf.reduce_all(tf.stack(finite), 0)


def _zero_or_one(labels: Any, num_classes: int) -> Any:
    del num_classes  # two
    return tf.logical_or(tf.equal(labels, 0), tf.equal(labels, 1))


def _class(labels: Any, num_classes: int) -> Any:
    # In double precision, which compares 8-bit labels with 1000 and does not truncate
    # a label of 0.5.
    number = tf.cast(labels, tf.float64)
    within = (number >= 0) & (number < num_classes) & tf.equal(tf.floor(number), number)
    return _all_of_row(within)


def _distribution(labels: Any, num_classes: int) -> Any:
    del num_classes  # the last axis has it
    values = tf.cast(labels, tf.float64)
    total = tf.reduce_sum(values, -1, keepdims=True)
    return _all_of_row((values >= 0) & (tf.abs(total - 1) < 1e-3))


def _binary(labels: Any, logits: Any) -> Any:
    return tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(labels, tf.float32), tf.cast(tf.reshape(logits, (-1,)), tf.float32)
    )


def _sparse(labels: Any, logits: Any) -> Any:
    classes = tf.cast(labels, tf.int32)
    return _mean_of_row(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
    )


def _one_hot(labels: Any, logits: Any) -> Any:
    # Not TensorFlow's own, whose last bits tell a row's place in the batch.
    wanted = tf.cast(labels, logits.dtype)
    return _mean_of_row(-tf.reduce_sum(wanted * tf.nn.log_softmax(logits), -1))


def _keras_loss(name: str) -> Loss:
    function = keras.losses.get(name)

    def per_example(labels: Any, outputs: Any) -> Any:
        # Keras takes the mean over the last axis only.
        rows = (tf.shape(outputs)[0], -1)
        flat = (tf.reshape(value, rows) for value in (labels, outputs))
        return function(*(tf.cast(value, tf.float32) for value in flat))

    return Loss(
        name=name,
        task=OTHER,
        per_example=per_example,
        accepts=_finite,
        allowed="finite",
    )


BINARY_CROSS_ENTROPY = Loss(
    name="binary_crossentropy",
    task=BINARY,
    per_example=_binary,
    accepts=_zero_or_one,
    allowed="0 or 1",
    predict=lambda logits: tf.reshape(tf.sigmoid(logits), (-1, 1)),
    takes=LOGITS,
)
_KNOWN = {
    loss.name: loss
    for loss in (
        BINARY_CROSS_ENTROPY,
        Loss(
            name="sparse_categorical_crossentropy",
            task=CLASSES,
            per_example=_sparse,
            accepts=_class,
            allowed="integers from 0 to {last}",
            predict=tf.nn.softmax,
            takes=LOGITS,
        ),
        Loss(
            name="categorical_crossentropy",
            task=CLASSES,
            per_example=_one_hot,
            accepts=_distribution,
            allowed="numbers of at least 0 that add up to 1",
            predict=tf.nn.softmax,
            takes=LOGITS,
        ),
    )
}


def check_shapes(loss: Loss, labels: Any, outputs: Any) -> None:
    """Checks the shapes of labels and outputs for a loss known by name.

    Args:
      loss: The minimised loss.
      labels: Labels (batch, ...), or a dict of them.
      outputs: Outputs of the model, (batch, ...), or a dict of them.

    Raises:
      InputError: several outputs, or a shape that does not suit the labels.
    """
    if tf.nest.is_nested(outputs):
        raise InputError(
            f"Expected one output of the model for loss={loss.name!r}. For several "
            "give --loss module:function, which takes dicts."
        )
    wanted, shape = tuple(labels.shape[1:]), tuple(outputs.shape[1:])
    fits = {
        "binary_crossentropy": wanted == () and shape in ((), (1,)),
        "sparse_categorical_crossentropy": wanted == shape[:-1] and shape[-1:] > (1,),
        "categorical_crossentropy": wanted == shape and shape[-1:] > (1,),
    }
    if not fits.get(loss.name, wanted == shape or (wanted, shape) == ((), (1,))):
        unit = {BINARY: "one logit", CLASSES: "one logit per class"}
        raise InputError(
            f"Expected the model to give {unit.get(loss.task, 'one output per label')} "
            f"per example for loss={loss.name!r}; the shape of a label is {wanted}, "
            f"that of an output {shape}."
        )


def check_range(
    loss: Loss, outputs: Callable[[], Any], variables: Sequence[Any]
) -> None:
    """Checks that the model outputs what the loss takes: logits or probabilities.

    Args:
      loss: The minimised loss.
      outputs: Returns the outputs for some rows at the current weights.
      variables: Trainable variables of the model, which keep their values.

    Raises:
      InputError: the loss takes logits and all outputs at random weights are in [0, 1],
        or it takes probabilities and one is outside.
    """
    within = None if loss.takes is None else _stays_in_unit_range(outputs, variables)
    if within and loss.takes == LOGITS:
        raise InputError(
            f"Expected the model to give logits for loss={loss.name!r}; its outputs "
            "stay between 0 and 1, whatever its weights, as those of a sigmoid or "
            "softmax. Remove that activation; in compile, a loss with "
            "from_logits=False takes it."
        )
    if within is False and loss.takes == PROBABILITIES:
        raise InputError(
            f"Expected the model to give probabilities for loss={loss.name!r}; with "
            "some weights its outputs leave [0, 1]. Give a loss with from_logits=True, "
            "such as keras.losses.BinaryCrossentropy(from_logits=True), or end the "
            "model in a sigmoid or softmax."
        )


def _stays_in_unit_range(
    outputs: Callable[[], Any], variables: Sequence[Any]
) -> bool | None:
    """Returns whether outputs stay in [0, 1] at random weights; None if none finite."""
    random, found = np.random.default_rng(0), None
    for _, scale in itertools.product(range(_MODELS_PER_SCALE), _SCALES):
        drawn = [
            scale * random.standard_normal(variable.shape, np.float32)
            for variable in variables
        ]
        with weights_of(variables, drawn):
            arrays = [np.ravel(value) for value in tf.nest.flatten(outputs())]
        values = np.concatenate(arrays).astype(np.float64)
        values = values[np.isfinite(values)]
        if ((values < -_TOLERANCE) | (values > 1 + _TOLERANCE)).any():
            return False
        found = True if values.size else found
    return found
