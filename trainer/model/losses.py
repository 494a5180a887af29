"""Losses per example, and the labels that each loss takes.

A user's loss is ``--loss module:function``, where ``function(labels, outputs)`` returns
one number per example:

    def absolute_error(labels, outputs):
        return tf.abs(tf.cast(labels, tf.float32) - outputs[:, 0])

``labels`` is the column ``label``, or for a dict of outputs the dict of the columns
with the same names.

A loss of positions is a mean within the row: over the positions that Keras's mask of
the output counts (``Embedding(mask_zero=True)``, ``Masking``), if it has one.  Keras
gives the same loss for a batch of this row alone.  (For a batch of several rows,
Keras's ``fit`` and ``evaluate`` take one mean over the positions of all rows: a long
row counts more, and the loss of a row depends on the others.)  A user's function
applies the mask itself, if it needs one.

``accepts`` decides for every row, from this row alone, whether the loss is defined for
its label; other rows contribute nothing (see ``core.step.clipping``).  ``check_range``
refuses probabilities under a loss on logits, whatever op or layer computes them, and
logits under a loss on probabilities.  It does not know which of them a user's loss
takes.  ``model_check`` tests that a user's loss is a function of the row alone.

Sensitive: labels, outputs, losses.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError, check_choice
from trainer.core.tf_compat import (
    LossFunctionWrapper,
    get_keras_mask,
    keras,
    set_keras_mask,
    tf,
)
from trainer.model.metrics import BINARY, CLASSES, LOSSES, OTHER
from trainer.model.weights import weights_of

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

    def of_arrays(self, labels: Any, outputs: Any) -> np.ndarray:
        """Returns the losses of evaluated rows, (rows,).

        Args:
          labels: An array (rows, ...), or a dict of them; a masked array where
            positions do not count.
          outputs: Outputs of the network, of the same structure.
        """
        if isinstance(labels, Mapping):
            outputs = {n: _remasked(labels[n], one) for n, one in outputs.items()}
            labels = {name: np.ma.getdata(one) for name, one in labels.items()}
        else:
            labels, outputs = np.ma.getdata(labels), _remasked(labels, outputs)
        return np.asarray(self.per_example(labels, outputs))


def _remasked(labels: Any, outputs: Any) -> Any:
    """Returns outputs with the mask of their labels as Keras's mask."""
    if not isinstance(labels, np.ma.MaskedArray):
        return outputs
    counted = ~np.ma.getmaskarray(labels)
    counted = counted if labels.ndim < outputs.ndim else counted[..., 0]
    tensor = tf.convert_to_tensor(outputs)
    set_keras_mask(tensor, tf.constant(counted))
    return tensor


def loss_by_name(name: str) -> Loss:
    """Returns the loss with the Keras name ``name``; cross-entropies take logits.

    Raises:
      InputError: there is no such loss.
    """
    check_choice("loss", name, tuple(LOSSES))
    return _KNOWN.get(name) or _single(name)


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


def loss_of_keras(
    loss: Any, weights: Mapping[str, float] | None = None, output: Any = None
) -> Loss:
    """Returns the loss of ``compile(loss=..., loss_weights=...)``.

    The loss of a row is what Keras computes for a batch of this row alone, whatever its
    ``reduction``: a mean over the positions that count, or their sum for "sum" and for
    None, with which Keras adds up gradients.

    Args:
      loss: A name, an instance or a function, which returns one number per example, or
        one per position; for a dict of outputs a dict of them, which add up, or one
        that all have.
      weights: Name of an output -> factor of its loss; None for 1.
      output: The output of the network, or a dict of several.

    Raises:
      InputError: a loss that depends on the whole batch, or losses or weights of other
        outputs.
    """
    outputs = tuple(output) if isinstance(output, Mapping) else ()
    if outputs and not isinstance(loss, Mapping | list | tuple):
        loss = dict.fromkeys(outputs, loss)  # as Keras does
    if isinstance(loss, Mapping):
        _check_names(loss, outputs)
        return _sum_of_losses({n: _single(one) for n, one in loss.items()}, weights)
    if weights is not None:
        raise InputError(
            "Expected loss_weights only beside a dict of losses, one for each output. "
            "Multiply a single loss in a function of your own."
        )
    return _single(loss)


def _check_names(losses: Mapping[str, Any], outputs: Collection[str]) -> None:
    if not outputs:
        raise InputError(
            "Expected one loss in compile, not a dict: the model has one output, "
            "without a name. Give the loss alone."
        )
    if not losses or not set(losses) <= set(outputs):
        raise InputError(
            "Expected losses by the names of the model's outputs, "
            f"{', '.join(sorted(outputs))}; got {', '.join(sorted(losses))}."
        )


def _single(loss: Any) -> Loss:
    """Returns the loss that ``compile`` got for one output."""
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
    name = type(loss).__name__ if is_object else getattr(loss, "__name__", "loss")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    known = _KNOWN.get(name)
    accepts = known.accepts if known else _finite
    ignored = getattr(loss, "ignore_class", None)
    return Loss(
        name=name,
        task=known.task if known else OTHER,
        # Keras wraps a function in the same way.
        per_example=functools.partial(
            _by_keras, loss if is_object else LossFunctionWrapper(loss, name=name)
        ),
        accepts=accepts if ignored is None else _or_ignored(accepts, ignored),
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


def _by_keras(loss: Any, labels: Any, outputs: Any) -> Any:
    """Returns the loss of each row, as Keras computes it for a batch of this row.

    Args:
      loss: Loss of Keras.
      labels: Labels (batch, ...).
      outputs: Output of the network, (batch, ...), with a mask or without.
    """
    mask = get_keras_mask(outputs)
    labels, outputs = (tf.cast(value, loss.dtype) for value in (labels, outputs))
    if len(outputs.shape) == 1:
        # Keras's losses are means over the last axis, which must not be the batch.
        outputs = tf.expand_dims(outputs, 1)
    if len(labels.shape) == 1 and tuple(outputs.shape[1:]) == (1,):
        labels = tf.expand_dims(labels, 1)
    values = loss.call(labels, outputs)
    masks = [one for one in (mask, get_keras_mask(values)) if one is not None]
    values = tf.cast(values, tf.float32)
    if values.shape.rank == 0:
        raise InputError(
            f"Expected loss={loss.name!r} to give one number per example; it gives one "
            "for a batch. Take its mean over the last axis alone, as in "
            "keras.ops.mean(..., axis=-1)."
        )
    return _of_row(values, masks, adds=loss.reduction in ("sum", "none", None))


def _of_row(values: Any, masks: Sequence[Any], *, adds: bool = False) -> Any:
    """Returns the mean of each row over the positions that count, (batch,).

    Args:
      values: Losses (batch, ...).
      masks: Which positions count, each (batch, ...); none for all.
      adds: Whether to return the sum instead.
    """
    if values.shape.rank == 1 and not masks:
        return values
    positions = values.shape[1:]
    rows = tf.reshape(values, (tf.shape(values)[0], -1))
    if not masks:
        return tf.reduce_sum(rows, 1) if adds else tf.reduce_mean(rows, 1)
    weight = tf.ones_like(rows)
    for mask in masks:
        size = mask.shape[1:].num_elements()
        if size is None or size != positions.num_elements():
            raise InputError(
                "Expected a loss of each position that the mask of the output counts, "
                f"{tuple(mask.shape[1:])}; the loss gives {tuple(positions)} for an "
                "example. Give labels the shape of the output, a last axis of 1 "
                "included; or end the model in a layer that drops the mask, such as "
                "keras.layers.Reshape(output.shape[1:])."
            )
        weight *= tf.cast(tf.reshape(mask, tf.shape(rows)), tf.float32)
    total = tf.reduce_sum(rows * weight, 1)
    if adds:
        return total
    return tf.math.divide_no_nan(total, tf.reduce_sum(weight, 1))


def _masks(outputs: Any) -> list[Any]:
    """Returns the mask of an output of a network, if it has one."""
    mask = get_keras_mask(outputs)
    return [] if mask is None else [mask]


def _all_of_row(value: Any) -> Any:
    """Returns whether all booleans of a row are true: (batch, ...) -> (batch,)."""
    return tf.reduce_all(tf.reshape(value, (tf.shape(value)[0], -1)), 1)


def _finite(labels: Any, num_classes: int) -> Any:
    del num_classes  # any number is accepted
    finite = [
        _all_of_row(tf.math.is_finite(tf.cast(leaf, tf.float64)))
        for leaf in tf.nest.flatten(labels)
    ]
    return tf.reduce_all(tf.stack(finite), 0)


def _zero_or_one(labels: Any, num_classes: int) -> Any:
    del num_classes  # two
    return _all_of_row(tf.logical_or(tf.equal(labels, 0), tf.equal(labels, 1)))


def _class(labels: Any, num_classes: int) -> Any:
    # In double precision, which compares 8-bit labels with 1000 and does not truncate
    # a label of 0.5.
    number = tf.cast(labels, tf.float64)
    within = (number >= 0) & (number < num_classes) & tf.equal(tf.floor(number), number)
    return _all_of_row(within)


def _or_ignored(
    accepts: Callable[[Any, Any], Any], ignored: int
) -> Callable[[Any, Any], Any]:
    """Returns what accepts the class that a loss ignores, too."""

    def accepted(labels: Any, num_classes: Any) -> Any:
        other = tf.zeros_like(labels)
        return accepts(tf.where(tf.equal(labels, ignored), other, labels), num_classes)

    return accepted


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
    values = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=classes, logits=logits
    )
    return _of_row(values, _masks(logits))


def _one_hot(labels: Any, logits: Any) -> Any:
    # Not TensorFlow's own, whose last bits tell a row's place in the batch.
    wanted = tf.cast(labels, logits.dtype)
    values = -tf.reduce_sum(wanted * tf.nn.log_softmax(logits), -1)
    return _of_row(values, _masks(logits))


BINARY_CROSS_ENTROPY = Loss(
    name="binary_crossentropy",
    task=BINARY,
    per_example=_binary,
    accepts=_zero_or_one,
    allowed="0 or 1",
    predict=lambda logits: tf.reshape(tf.sigmoid(logits), (-1, 1)),
    takes=LOGITS,
)
_SPARSE = Loss(
    name="sparse_categorical_crossentropy",
    task=CLASSES,
    per_example=_sparse,
    accepts=_class,
    allowed="integers from 0 to {last}",
    predict=tf.nn.softmax,
    takes=LOGITS,
)
_ONE_HOT = dataclasses.replace(
    _SPARSE,
    name="categorical_crossentropy",
    per_example=_one_hot,
    accepts=_distribution,
    allowed="numbers of at least 0 that add up to 1",
)
_KNOWN = {loss.name: loss for loss in (BINARY_CROSS_ENTROPY, _SPARSE, _ONE_HOT)}


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
