"""Gradients of single examples, and the one clip that all of them pass.

    sum_i  w_i * min(1, C / ||g_i||) * g_i,      g_i = gradient of example i's loss

``SingleExamples`` forms g_i one example at a time: the reference of all claims, and the
only way for models that one pass does not understand.  The gradient of one example is
traced once; the same graph runs for every example, for as many at a time as fit a fixed
memory.  A claim (see ``claims``) may give norms and scaled sums of the same g_i without
forming them.  Neither is given C: ``clipped`` alone decides by which factor a row is
scaled.

Formal guarantees:
  - A row of positive weight contributes a vector of L2 norm at most ``l2_norm_clip``
    (up to a relative error of 1e-4, also where its terms cancel), which depends only on
    this row and the weights of the model.  With an adaptive clip, this vector has one
    coordinate more, and all of them are functions of its norm of the step, too.
  - That is so with rounding, too: places of a batch are computed by the same
    instructions, since their number is made a multiple of 16 (or is one), and sums
    within a row are computed row by row (``row_by_row``).
  - With ``linf_norm_clip``, each coordinate of this vector is then clipped to it.
  - A row of weight 0 contributes exactly nothing, whatever it holds, NaN included; so
    does one whose label the loss does not accept, whatever a method says.
  - A row whose gradient is not finite, or the square of whose norm overflows float32,
    contributes exactly nothing.  Its contribution is a function of the row within the
    clip, so that the sensitivity is unchanged.  The number of such rows is sensitive,
    and is never reported.
  - Computing a sum changes no variable, and what runs is what was checked: a traced
    graph without an operation that writes, draws, or calls Python.
  - The gradient of a ``SingleExamples`` is computed without the other examples, and its
    norm from it.  Gradients that the core did not form name a claim, or are refused.
  - ``keep_rows`` returns exact zeros for rows that are not kept, NaN or not.
  - ``clip_to_norm`` returns factors of at most 1.
  - ``cap_coordinates`` returns values of magnitude at most the cap, with their signs.
  - ``clip_scale`` returns a factor s with ``s * norm <= l2_norm_clip`` (up to float32
    rounding) for real rows of finite norm, and exactly 0 for all others.
  - ``clip_weights`` returns the same bits with and without TF Privacy.

Sensitive: everything here.

References:
  Abadi et al. (2016), arXiv:1607.00133; Xiao, Wan and Devadas (2023), arXiv:2210.03843,
  Algorithm 2, for clipping coordinates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trainer.core import claim_names
from trainer.core.step.grid import COUNT_SHAPE, AdaptiveClip
from trainer.core.step.kernels import check_products, dense, is_safe_together
from trainer.core.step.pure_graph import check_pure, in_graph, trace_eagerly
from trainer.core.tf_compat import clip_grads, tf

if TYPE_CHECKING:
    from trainer.model.trainable_model import TrainableModel


#: (columns, weight) -> a tensor or ``tf.IndexedSlices`` per trainable variable.  Each
#: slice is of one example, and no example has two nonzero slices of one row (see
#: ``core.step.grid``).
GradientSum = Callable[[Mapping[str, Any], Any], list[Any]]


def real_rows(model: TrainableModel, columns: Mapping[str, Any], weight: Any) -> Any:
    """Returns which rows may contribute, bool (batch,).

    Args:
      model: Model whose loss decides which labels it accepts.
      columns: Columns by name, each (batch, ...).
      weight: 1 for examples and 0 for padding, (batch,).
    """
    real = tf.logical_and(weight > 0, model.accepts(columns))
    real.set_shape(weight.shape)
    return real


def align(rows: Any, value: Any) -> Any:
    """Returns ``rows`` shaped (batch, 1, ..., 1), to broadcast with ``value``.

    Args:
      rows: One number per row, (batch,).
      value: Tensor (batch, ...) of known rank.
    """
    return tf.reshape(rows, [-1] + [1] * (len(value.shape) - 1))


def zero_others(value: Any, kept: Any) -> Any:
    """Returns ``value`` with zeros in the rows that are not ``kept``.

    Args:
      value: Tensor (batch, ...).
      kept: Rows to keep, bool (batch,).
    """
    if not value.dtype.is_floating:
        return tf.where(align(kept, value), value, tf.zeros_like(value))
    return scale_rows(value, tf.cast(kept, value.dtype))


def keep_rows(columns: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """Returns the columns with zeros in the rows that are not ``kept``.

    Args:
      columns: Columns by name, each (batch, ...).
      kept: Rows to keep, bool (batch,).
    """
    return {name: zero_others(value, kept) for name, value in columns.items()}


def scale_rows(value: Any, scale: Any) -> Any:
    """Returns each row times its scale, and zeros where that is 0, NaN or not.

    Args:
      value: Tensor (batch, ...) of floating point.
      scale: Factor per row, (batch,).
    """
    # One pass over the values, where a choice of rows and a product are three.
    return tf.math.multiply_no_nan(value, align(scale, value))


def squared_norms(gradients: Sequence[Any]) -> Any:
    """Returns the squared L2 norm of each example's gradient, (batch,).

    Args:
      gradients: Gradients by variable, each (batch, *shape).
    """
    return tf.add_n(
        [tf.reduce_sum(tf.square(g), list(range(1, len(g.shape)))) for g in gradients]
    )


def cap_coordinates(value: Any, linf_norm_clip: float | None) -> Any:
    """Returns ``value`` with every entry clipped to [-cap, cap].

    Args:
      value: Tensor of any shape.
      linf_norm_clip: The cap, above 0; None for no cap.
    """
    if linf_norm_clip is None:
        return value
    return tf.clip_by_value(value, -linf_norm_clip, linf_norm_clip)


def sum_in_chunks(
    function: Callable[[Any], Any],
    rows: Any,
    *,
    num_rows: int,
    chunk_rows: int,
    initial: Any,
) -> Any:
    """Returns the sum of ``function`` over chunks of rows, computed one at a time.

    Args:
      function: Maps the nested tensors of a chunk to nested tensors; rows of zeros
        must add zeros.
      rows: Nested tensors, each (num_rows, ...).
      num_rows: Number of rows, known when the graph is built.
      chunk_rows: Number of rows of a chunk, at least 1.
      initial: Zeros of the shapes that ``function`` returns.
    """
    if not num_rows:
        return initial
    if num_rows <= chunk_rows:
        return function(rows)

    def add_chunk(total: Any, chunk: Any) -> Any:
        return tf.nest.map_structure(tf.add, total, function(chunk))

    return tf.foldl(
        add_chunk,
        _split(rows, num_rows, chunk_rows),
        initializer=initial,
        parallel_iterations=1,
    )


def concat_in_chunks(
    function: Callable[[Any], Any], rows: Any, *, num_rows: int, chunk_rows: int
) -> Any:
    """Returns ``function`` of each row, (num_rows,), computed one chunk at a time.

    Args:
      function: Maps the nested tensors of a chunk to one number per row.
      rows: Nested tensors, each (num_rows, ...).
      num_rows: Number of rows, known when the graph is built.
      chunk_rows: Number of rows of a chunk, at least 1.
    """
    if num_rows <= chunk_rows:
        return function(rows)
    values = tf.map_fn(
        function,
        _split(rows, num_rows, chunk_rows),
        fn_output_signature=tf.TensorSpec((chunk_rows,), tf.float32),
        parallel_iterations=1,
    )
    return tf.reshape(values, (-1,))[:num_rows]


def _split(rows: Any, num_rows: int, chunk_rows: int) -> Any:
    """Returns nested tensors (chunks, chunk_rows, ...), padded with zeros."""
    num_chunks = -(-num_rows // chunk_rows)

    def split(value: Any) -> Any:
        shape = tf.concat([[num_chunks, chunk_rows], tf.shape(value)[1:]], 0)
        parts = tf.reshape(value, shape)
        return tf.ensure_shape(parts, (num_chunks, chunk_rows, *value.shape[1:]))

    return tf.nest.map_structure(split, filled(rows, num_rows, chunk_rows))


def filled(rows: Any, num_rows: int, multiple: int = 16) -> Any:
    """Returns nested tensors with rows of zeros after theirs, up to a multiple.

    Processors round the last numbers of an array, fewer than they take at a time (at
    most 16), by other instructions: the bits of a row would tell its place in a batch.

    Args:
      rows: Nested tensors, each (num_rows, ...).
      num_rows: Number of rows, known when the graph is built.
      multiple: The number of rows becomes a multiple of it.
    """
    more = [0, -num_rows % multiple]

    def pad(value: Any) -> Any:
        return tf.pad(value, [more, *[[0, 0]] * (len(value.shape) - 1)])

    return tf.nest.map_structure(pad, rows)


def clip_to_norm(squared_norms: Any, squared_bound: Any) -> Any:
    """Returns the factors that clip vectors to a norm, (batch,).

    Args:
      squared_norms: Squared L2 norms of the vectors, (batch,).
      squared_bound: Square of the largest norm, (batch,) or a scalar.
    """
    longer = squared_norms > squared_bound
    ratio = tf.math.divide_no_nan(squared_bound, squared_norms)
    return tf.where(longer, tf.sqrt(ratio), 1.0)


def clip_weights(l2_norm_clip: float, norms: Any) -> Any:
    """Returns the factors that clip gradients to a norm, (batch,).

    TF Privacy computes them where it is installed; otherwise its formula does.

    Args:
      l2_norm_clip: Largest L2 norm, above 0 and finite.
      norms: L2 norms of the examples' gradients, (batch,).
    """
    if clip_grads is None:
        return l2_norm_clip / tf.math.maximum(l2_norm_clip, norms)
    return clip_grads.compute_clip_weights(l2_norm_clip, norms)


def clip_scale(norms: Any, real: Any, l2_norm_clip: float) -> tuple[Any, Any]:
    """Returns which rows contribute, bool (batch,), and their factors, (batch,).

    Args:
      norms: L2 norms of the examples' gradients, (batch,).
      real: Rows that may contribute, from ``real_rows``.
      l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
    """
    counted = real & tf.math.is_finite(norms)
    scale = (
        tf.ones_like(norms)
        if math.isinf(l2_norm_clip)
        else clip_weights(float(l2_norm_clip), norms)
    )
    return counted, tf.where(counted, scale, 0.0)


class RowGradients(Protocol):
    """The gradients of the rows of a chunk, formed or not.  Sensitive."""

    def norms(self) -> Any:
        """Returns an upper bound on the L2 norm of each row's gradient, (batch,)."""

    def scaled_sum(self, scale: Any, cap: float | None) -> list[Any]:
        """Returns the sum of the scaled gradients, a tensor or slices per variable.

        Args:
          scale: Factor of each row, (batch,), 0 for those that add nothing.
          cap: Largest coordinate of a scaled gradient; None for no bound.
        """


#: (columns, real rows) of a chunk, zeros in all other rows -> gradients of the rows,
#: and which of them may contribute, bool (batch,).
OfRows = Callable[[dict[str, Any], Any], tuple[RowGradients, Any]]


class ExampleGradients:
    """What is clipped: one gradient for each example, a function of its row alone.

    Args:
      model: Model whose loss decides which rows may contribute.
      of_rows: Gives the gradients of a chunk.
      relies_on: Names of the claims that vouch for ``of_rows``; at least one, since
        the core's own are a ``SingleExamples``.
      chunk_rows: Number of rows at a time; None for all of a physical batch.

    Raises:
      InputError: no claim is named, or an unknown one is.
    """

    def __init__(
        self,
        model: TrainableModel,
        of_rows: OfRows,
        *,
        relies_on: Sequence[str],
        chunk_rows: int | None = None,
    ) -> None:
        self.model = model
        self.of_rows = of_rows
        self.relies_on = claim_names.check(relies_on, at_least=1)
        self.chunk_rows = chunk_rows


def clipped(
    gradients: ExampleGradients,
    *,
    l2_norm_clip: float,
    linf_norm_clip: float | None = None,
    adaptive: AdaptiveClip | None = None,
) -> GradientSum:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      gradients: Gradients of the examples.
      l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
      linf_norm_clip: Largest coordinate after the L2 clip; None or infinity for none.
      adaptive: Gradients are divided by its norm before they are clipped, and its count
        is the last value of the sum; None for neither.
    """
    model, cap = gradients.model, None if linf_norm_clip == math.inf else linf_norm_clip

    def chunk_sum(columns: Mapping[str, Any], weight: Any, unit: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        found, kept = gradients.of_rows(keep_rows(columns, real), real)
        norms = found.norms() if unit is None else found.norms() / unit
        kept, scale = clip_scale(norms, real & kept, l2_norm_clip)
        if adaptive is None:
            return found.scaled_sum(scale, cap)
        count = adaptive.counted(norms, kept, l2_norm_clip)
        return [*found.scaled_sum(scale / unit, cap), count]

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        columns, weight = filled((dict(columns), weight), weight.shape[0])
        unit = None if adaptive is None else adaptive.norm
        count = [] if adaptive is None else [tf.zeros(COUNT_SHAPE, tf.int64)]
        return list(
            sum_in_chunks(
                lambda rows: chunk_sum(rows[0], rows[1], unit),
                (columns, weight),
                num_rows=weight.shape[0],
                chunk_rows=(gradients.chunk_rows or weight.shape[0]) // 16 * 16 or 1,
                initial=[*map(tf.zeros_like, model.variables), *count],
            )
        )

    return in_graph(gradient_sum)


#: Largest number of values of per-example gradients that are held at a time: 256 MiB.
MOST_GRADIENT_VALUES = 1 << 26

#: Columns of one row -> its gradient for each variable, and whether it may contribute.
ExampleGradient = Callable[[Mapping[str, Any]], tuple[list[Any], Any]]


def example_gradient(
    model: TrainableModel, row: Mapping[str, Any], weights: Sequence[Any] | None = None
) -> list[Any]:
    """Returns the gradient of one example's loss, a tensor per variable.  Sensitive.

    Args:
      model: Model and its loss.
      row: Columns by name, each (1, ...).
      weights: Weights that replace the model's variables; None for the variables.
    """
    sources = model.variables if weights is None else list(weights)
    with tf.GradientTape() as tape, model.unrolled():
        tape.watch(sources)
        loss = tf.reduce_sum(model.losses(row))
    gradients = tape.gradient(
        loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return [*map(dense, gradients, sources)]


class SingleExamples(ExampleGradients):
    """Gradients that the core forms one example at a time.

    Args:
      model: Model and its loss.
      gradient: Gradient of one example, a function of its row and the weights alone;
        that of the loss if None.
      copies: Number of values per weight that ``gradient`` holds at a time.
      relies_on: Claims that ``gradient`` relies on.

    Raises:
      InputError: ``gradient`` does more than compute its results, or TensorFlow
        computes one of its products wrongly.
    """

    def __init__(
        self,
        model: TrainableModel,
        gradient: ExampleGradient | None = None,
        *,
        copies: int = 1,
        relies_on: Sequence[str] = (),
    ) -> None:
        def of_loss(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
            return example_gradient(model, row), tf.constant(True)

        of_examples, of_trace = _traced(model, gradient or of_loss)

        def of_rows(columns: dict[str, Any], real: Any) -> tuple[_Stacked, Any]:
            stacked, valid = of_examples(columns)
            return _Stacked(stacked), valid

        num_values = (
            copies * of_trace * sum(v.shape.num_elements() for v in model.variables)
        )
        self.model = model
        self.of_rows = of_rows
        self.relies_on = claim_names.check(relies_on)
        self.chunk_rows = max(1, MOST_GRADIENT_VALUES // num_values)


class _Stacked:
    """Gradients by variable, each (batch, *shape); see ``RowGradients``."""

    def __init__(self, gradients: list[Any]) -> None:
        self._gradients = gradients

    def norms(self) -> Any:
        """Returns the L2 norm of each row's gradient, (batch,)."""
        return tf.sqrt(squared_norms(self._gradients))

    def scaled_sum(self, scale: Any, cap: float | None) -> list[Any]:
        """Returns the sum of the scaled gradients, a tensor per variable.

        Args:
          scale: Factor of each row, (batch,), 0 for those that add nothing.
          cap: Largest coordinate of a scaled gradient; None for no bound.
        """
        found = [cap_coordinates(scale_rows(g, scale), cap) for g in self._gradients]
        # Unlike sums within rows, a sum over rows need not be computed row by row.
        return [tf.raw_ops.Sum(input=one, axis=0) for one in found]


def _traced(
    model: TrainableModel, gradient: ExampleGradient
) -> tuple[Callable[[Any], Any], int]:
    """Returns the traced gradient for several examples, and how often memory holds it.

    The columns of an example have no batch axis.  A backward pass through a recurrent
    layer holds a copy for each time step.
    """

    def of_example(example: Mapping[str, Any]) -> tuple[list[Any], Any]:
        with model.unrolled() as found:
            row = {name: value[tf.newaxis] for name, value in example.items()}
            gradients = gradient(row)
        lengths.extend(found)
        return gradients

    specs = {
        name: tf.TensorSpec(spec.shape[1:], spec.dtype)
        for name, spec in model.column_specs.items()
    }
    lengths: list[int] = []
    traced = trace_eagerly(of_example, specs)
    check_pure(traced.graph, "the gradient of the model's loss")
    check_products(traced.graph.get_operations())
    copies = max(lengths, default=1)
    together = is_safe_together(traced.graph, traced.inputs[: len(specs)])

    @functools.partial(tf.function, autograph=False)
    def of_columns(columns: Mapping[str, Any]) -> Any:
        if together:
            return tf.vectorized_map(traced, columns)
        return tf.map_fn(traced, columns, fn_output_signature=results)

    results = tf.nest.map_structure(
        lambda value: tf.TensorSpec(value.shape, value.dtype), traced.structured_outputs
    )
    return lambda columns: of_columns({name: columns[name] for name in specs}), copies
