"""Clipped sums with one forward and one backward pass, for Dense and Embedding layers.

Of a dense layer ``z = x W + b`` the gradient of example i is ``x_i^T d_i`` and ``d_i``,
where ``d_i`` is the derivative of its loss by ``z_i``; of an embedding it is ``d_i`` on
the row that was looked up.  Back-propagation to the ``z`` of all layers gives every
``d``, from which follow both the norm of each example's gradient and, after scaling,
the sum of the clipped gradients:

    n_i^2 = sum over layers of  (||x_i||^2 + 1) ||d_i||^2     (dense)
                                ||d_i||^2                     (one id in one table)
    s_i   = min(1, C / n_i)
    sum   = X^T (s * D)         (dense),   rows s_i d_i       (embedding)

No per-example gradient is ever held and nothing is back-propagated twice.  But for a
clip of single coordinates, of which a product of matrices is not the sum: then those of
a dense layer are held, of as many examples at a time as fit a fixed memory, and the
rows of an embedding.

The same inner products give the outputs of a layer after the weights of each example
have moved along this example's own gradient, without a copy of the weights per example.
To inputs ``x'`` a move by ``c_i`` times the gradient adds

    c_i (<x'_i, x_i> + 1) d_i     (dense),     c_i d_i     (embedding)

where an example's derivatives add up over the positions of a dense layer, and over
equal ids of an embedding.  ``bam`` back-propagates a second time through such outputs.

Formal guarantees: those of ``clipping``, for models that ``is_exact`` accepts.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799, for the norms; Bu et al. (2023),
  arXiv:2210.00038, for the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.models import TrainableModel
from trainer.rows import (
    align,
    cap_coordinates,
    clip_scale,
    keep_rows,
    real_rows,
    sum_in_chunks,
    zero_others,
)
from trainer.tf_privacy import gradient_clipping_utils, keras, tf

#: Ids of an example in one table up to which all pairs are compared for equality.
_MOST_PAIRED_IDS = 64

#: Values of a dense layer's gradients that are held where coordinates are clipped.
_MOST_HELD_VALUES = 1 << 23

#: Inputs of a layer -> what an example's own weights add to its outputs.
_Move = Callable[[Any], Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Use:
    """One layer's part in a forward pass.

    Attributes:
      watched: The tensor by which the loss is differentiated.
      outputs: What the layer gives.
      squared_norms: Derivative -> squared norm of each example's gradient.
      gradients: (derivative times scale, kept rows) -> gradient of each variable.
      capped: The same, and a bound on each coordinate of an example's gradient.
      change: (derivative times scale, inputs) -> what is added to the outputs for these
        inputs when each example's weights move by its gradient times its scale.
    """

    watched: Any
    outputs: Any
    squared_norms: Callable[[Any], Any]
    gradients: Callable[[Any, Any], list[tuple[Any, Any]]]
    capped: Callable[[Any, Any, float], list[tuple[Any, Any]]]
    change: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """The layers' uses in one pass, and the derivatives of the losses by their outputs.

    Everything is per example, in the rows of the batch.  Sensitive.
    """

    model: TrainableModel
    uses: list[_Use]
    slopes: list[Any]

    def norms(self) -> Any:
        """Returns the L2 norm of each example's gradient, shape (batch,)."""
        pairs = zip(self.uses, self.slopes, strict=True)
        return tf.sqrt(tf.add_n([use.squared_norms(slope) for use, slope in pairs]))

    def moves(self, kept: Any, scale: Any) -> list[Callable[[Any], Any]]:
        """Returns, of each use, inputs -> change of outputs, for ``backward``.

        Each kept example's weights move by ``scale`` times its gradient.
        """
        return [
            functools.partial(use.change, slope)
            for use, slope in zip(self.uses, self._scaled(kept, scale), strict=True)
        ]

    def clipped_sum(
        self, real: Any, l2_norm_clip: float, linf_norm_clip: float | None = None
    ) -> list[Any]:
        """Returns the sum of the clipped gradients of real rows, for each variable."""
        counted, scale = clip_scale(self.norms(), real, l2_norm_clip)
        found = {}
        for use, scaled in zip(self.uses, self._scaled(counted, scale), strict=True):
            pairs = (
                use.gradients(scaled, counted)
                if linf_norm_clip is None or math.isinf(linf_norm_clip)
                else use.capped(scaled, counted, linf_norm_clip)
            )
            for variable, gradient in pairs:
                found[variable.ref()] = gradient
        return [found[variable.ref()] for variable in self.model.variables]

    def _scaled(self, kept: Any, scale: Any) -> list[Any]:
        return [zero_others(d, kept) * align(scale, d) for d in self.slopes]


def is_exact(model: TrainableModel) -> bool:
    """Whether every layer with weights is known here and is used once.

    Of a layer that is used twice the squared norms of the two uses would be added,
    which may fall short of the squared norm of their sum.
    """
    network = model.network
    if not gradient_clipping_utils.has_internal_compute_graph(network):
        return False
    layers = [layer for layer in network.layers if layer.weights]
    known = all(type(layer) in _USES for layer in layers)
    used_once = all(len(layer._inbound_nodes) == 1 for layer in layers)
    references = [v.ref() for layer in layers for v in layer.trainable_variables]
    unshared = len(set(references)) == len(references) == len(model.variables)
    frozen = any(layer.non_trainable_variables for layer in layers)
    # Masks travel beside the tensors that are intercepted here.
    masked = any(getattr(layer, "mask_zero", False) for layer in layers)
    return known and used_once and unshared and not frozen and not masked


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableReads:
    """Which rows of the embedding tables a physical batch reads.

    Attributes:
      tables: The variables of the Embedding layers.
      num_ids: Of each table, the rows that one example reads.
      ids: (columns, weight) -> flat int32 ids of each table, those of padding included.
        Sensitive.
    """

    tables: tuple[Any, ...]
    num_ids: tuple[int, ...]
    ids: Callable[[Mapping[str, Any], Any], list[Any]]


def table_reads(model: TrainableModel) -> TableReads | None:
    """Returns the reads of a model that ``is_exact`` accepts.

    None if there is no Embedding layer, or if some ids depend on weights, or their
    number on the example.
    """
    found = [x for x in model.network.layers if type(x) is keras.layers.Embedding]
    sizes = [layer.input.shape[1:].num_elements() for layer in found]
    if not found or None in sizes:
        return None
    lookups = keras.Model(
        model.network.input, [layer.input for layer in found], name="lookups"
    )
    if lookups.weights:
        return None

    def ids(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        values = lookups(model.inputs(keep_rows(columns, real)))
        return [
            tf.reshape(tf.cast(value, tf.int32), (-1,))
            for value in tf.nest.flatten(values)
        ]

    return TableReads(
        tables=tuple(layer.embeddings for layer in found),
        num_ids=tuple(sizes),
        ids=ids,
    )


def bookkeeping_sum(
    model: TrainableModel,
    l2_norm_clip: float,
    linf_norm_clip: float | None = None,
) -> Callable[[Mapping[str, Any], Any], list[Any]]:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Accepted by ``is_exact``.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      linf_norm_clip: Of single coordinates, afterwards; None for none.
    """

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        found = backward(model, keep_rows(columns, real))
        return found.clipped_sum(real, l2_norm_clip, linf_norm_clip)

    return gradient_sum


def backward(
    model: TrainableModel,
    columns: Mapping[str, Any],
    moves: Sequence[Callable[[Any], Any]] | None = None,
) -> BackwardPass:
    """Returns one forward and backward pass.

    Args:
      model: Accepted by ``is_exact``.
      columns: Rows that may not contribute hold values as good as any.
      moves: From another pass over the same rows: the example's own weights.
    """
    tape = tf.GradientTape(watch_accessed_variables=False)
    # Layers are called in the same order in every pass.
    left = iter(moves) if moves is not None else itertools.repeat(None)

    def call(layer: Any, args: Any, kwargs: Any) -> tuple[Any, _Use | None]:
        if not layer.weights:
            return layer(*args, **kwargs), None
        use = _USES[type(layer)](layer, args[0], next(left), tape)
        return use.outputs, use

    with tape:
        outputs, found = gradient_clipping_utils.model_forward_pass(
            model.network, model.inputs(columns), call
        )
        loss = tf.reduce_sum(model.losses(columns, outputs))
    uses = [use for use in found if use is not None]
    slopes = tape.gradient(
        loss,
        [use.watched for use in uses],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return BackwardPass(model=model, uses=uses, slopes=slopes)


def _dense(layer: Any, values: Any, move: _Move, tape: Any) -> _Use:
    values = tf.cast(values, layer.kernel.dtype)
    outputs = tf.tensordot(values, layer.kernel, 1)
    if layer.use_bias:
        outputs = tf.nn.bias_add(outputs, layer.bias)
    if move is not None:
        outputs += move(values)
    tape.watch(outputs)

    def squared_norms(slope: Any) -> Any:
        if len(values.shape) == 2:
            sizes = tf.reduce_sum(tf.square(values), 1) + float(layer.use_bias)
            return sizes * tf.reduce_sum(tf.square(slope), 1)
        # Several positions of one example: ||sum_t x_t^T d_t||^2 by inner products.
        x, d = _positions(values), _positions(slope)
        inner = tf.matmul(x, x, transpose_b=True) + float(layer.use_bias)
        return tf.reduce_sum(inner * tf.matmul(d, d, transpose_b=True), (1, 2))

    def gradients(scaled: Any, counted: Any) -> list[tuple[Any, Any]]:
        x, d = _flat(zero_others(values, counted)), _flat(scaled)
        found = [(layer.kernel, tf.matmul(x, d, transpose_a=True))]
        if layer.use_bias:
            found.append((layer.bias, tf.reduce_sum(d, 0)))
        return found

    def capped(scaled: Any, counted: Any, cap: float) -> list[tuple[Any, Any]]:
        x, d = _positions(zero_others(values, counted)), _positions(scaled)
        total = sum_in_chunks(
            lambda rows: tf.reduce_sum(
                cap_coordinates(tf.matmul(*rows, transpose_a=True), cap), 0
            ),
            (x, d),
            num_rows=counted.shape[0],
            chunk_rows=max(1, _MOST_HELD_VALUES // layer.kernel.shape.num_elements()),
            initial=tf.zeros_like(layer.kernel),
        )
        found = [(layer.kernel, total)]
        if layer.use_bias:
            each = cap_coordinates(tf.reduce_sum(d, 1), cap)
            found.append((layer.bias, tf.reduce_sum(each, 0)))
        return found

    def change(scaled: Any, others: Any) -> Any:
        if len(values.shape) == 2:
            inner = tf.reduce_sum(others * values, 1) + float(layer.use_bias)
            return inner[:, None] * scaled
        inner = tf.matmul(_positions(others), _positions(values), transpose_b=True)
        added = tf.matmul(inner + float(layer.use_bias), _positions(scaled))
        return tf.reshape(added, tf.shape(scaled))

    return _Use(
        watched=outputs,
        outputs=layer.activation(outputs) if layer.activation else outputs,
        squared_norms=squared_norms,
        gradients=gradients,
        capped=capped,
        change=change,
    )


def _positions(value: Any) -> Any:
    """Returns (batch, ..., size) values shaped (batch, positions, size)."""
    return tf.reshape(value, (tf.shape(value)[0], -1, value.shape[-1]))


def _flat(value: Any) -> Any:
    return tf.reshape(value, (-1, value.shape[-1]))


def _embedding(layer: Any, ids: Any, move: _Move, tape: Any) -> _Use:
    ids = tf.cast(ids, tf.int32)
    outputs = tf.gather(layer.embeddings, ids)
    if move is not None:
        outputs += move(ids)
    tape.watch(outputs)

    def squared_norms(slope: Any) -> Any:
        # The squared norm of a sum is the sum of the inner products with it.
        products = _positions(slope * _add_equal(slope, ids, layer.input_dim))
        return tf.maximum(tf.reduce_sum(products, (1, 2)), 0.0)

    def change(scaled: Any, others: Any) -> Any:
        del others  # the same ids
        return _add_equal(scaled, ids, layer.input_dim)

    def capped(scaled: Any, counted: Any, cap: float) -> list[tuple[Any, Any]]:
        # What an example adds to a row is the sum at its equal ids, told to each once.
        total = _add_equal(scaled, ids, layer.input_dim)
        count = _add_equal(tf.ones_like(scaled[..., :1]), ids, layer.input_dim)
        return gradients(cap_coordinates(total, cap) / count, counted)

    def gradients(scaled: Any, counted: Any) -> list[tuple[Any, Any]]:
        del counted  # ids are valid in every row
        indices = tf.reshape(ids, (-1,))
        shape = tf.shape(layer.embeddings)
        slices = tf.IndexedSlices(_flat(scaled), indices, shape)
        return [(layer.embeddings, slices)]

    return _Use(
        watched=outputs,
        outputs=outputs,
        squared_norms=squared_norms,
        gradients=gradients,
        capped=capped,
        change=change,
    )


def _add_equal(slope: Any, ids: Any, num_rows: int) -> Any:
    """Returns, at each id, the sum of ``slope`` over the example's equal ids."""
    num_ids = ids.shape[1:].num_elements()  # None where the length varies
    if num_ids == 1:
        return slope
    d = _positions(slope)
    if num_ids is not None and num_ids <= _MOST_PAIRED_IDS:
        rows = tf.reshape(ids, (-1, num_ids))
        equal = tf.cast(rows[:, :, None] == rows[:, None, :], d.dtype)
        return tf.reshape(tf.matmul(equal, d), tf.shape(slope))
    # One number for each pair of example and row.
    rows = tf.reshape(tf.cast(ids, tf.int64), (tf.shape(ids)[0], -1))
    offsets = tf.range(tf.shape(rows)[0], dtype=tf.int64) * num_rows
    distinct, index = tf.unique(tf.reshape(rows + offsets[:, None], (-1,)))
    sums = tf.math.unsorted_segment_sum(_flat(d), index, tf.shape(distinct)[0])
    return tf.reshape(tf.gather(sums, index), tf.shape(slope))


_USES: dict[type, Callable[[Any, Any, _Move, Any], _Use]] = {
    keras.layers.Dense: _dense,
    keras.layers.Embedding: _embedding,
}
