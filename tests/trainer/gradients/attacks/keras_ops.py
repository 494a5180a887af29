"""Control flow, maps and gradients of ``keras.ops`` that write, mix or are honest."""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.hidden_writes import Write, hides, over_rows
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    new_weight,
    weight,
)
from trainer.tf_compat import keras, tf

ops = keras.ops

WRITES = Cases("ops write")
CASES = Cases("ops")
HONEST = Cases("ops honest", honest=True)

_hides = hides(WRITES)


def _tame(values: Any) -> Any:
    return ops.tanh(ops.where(ops.isnan(values), 0.0, values))


def _rare(ids: Any) -> Any:
    return ops.any(ids >= 8)


# -- writes ------------------------------------------------------------------------


@_hides
def cond(write: Write, values: Any, ids: Any) -> Any:
    ops.cond(
        _rare(ids),
        lambda: ops.convert_to_tensor(write(values)),
        lambda: ops.zeros(NUM_VALUES),
    )


@_hides
def switch(write: Write, values: Any, ids: Any) -> Any:
    ops.switch(
        ops.minimum(ops.max(ids) // 8, 1),
        [lambda x: ops.zeros(NUM_VALUES), lambda x: ops.convert_to_tensor(write(x))],
        values,
    )


@_hides
def while_loop(write: Write, values: Any, ids: Any) -> Any:
    def body(i: Any) -> Any:
        write(values)
        return (i + 1,)

    ops.while_loop(lambda i: i < 1, body, (ops.convert_to_tensor(0),))


@_hides
def fori_loop(write: Write, values: Any, ids: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        write(values)
        return total + 1.0

    ops.fori_loop(0, 2, body, ops.convert_to_tensor(0.0))


@_hides
def scan(write: Write, values: Any, ids: Any) -> Any:
    def step(last: Any, column: Any) -> Any:
        write(values)
        return last, last

    ops.scan(step, ops.zeros(()), ops.transpose(values))


over_rows(
    _hides,
    "map",
    lambda of_row, values: tf.ensure_shape(ops.map(of_row, values), values.shape),
)
over_rows(_hides, "vectorized map", ops.vectorized_map)


@_hides
def custom_gradient(write: Write, values: Any, ids: Any) -> Any:
    @ops.custom_gradient
    def same(x: Any) -> Any:
        write(x)
        return x * 1.0, lambda slope: slope

    return same(values)


@_hides
def rematerialized(write: Write, values: Any, ids: Any) -> Any:
    def same(x: Any) -> Any:
        write(x)
        return x * 1.0

    return keras.remat(same)(values)


@_hides
def compiled(write: Write, values: Any, ids: Any) -> Any:
    @tf.function(jit_compile=True)
    def same(x: Any) -> Any:
        write(x)
        return x * 1.0

    return same(values)


@_hides
def stop_gradient(write: Write, values: Any, ids: Any) -> Any:
    return values + 0.0 * ops.sum(ops.stop_gradient(write(values)))


# -- rows that mix -----------------------------------------------------------------


def _less_mean(row: Any, values: Any) -> Any:
    return row - ops.mean(values, 0)


_MIXED = {
    "scan": lambda v, ids: ops.scan(
        lambda last, row: (0.5 * last + row, 0.5 * last + row), ops.zeros(6), v
    )[1],
    "map with all rows": lambda v, ids: ops.map(lambda row: _less_mean(row, v), v),
    "vectorized map with all rows": lambda v, ids: ops.vectorized_map(
        lambda row: _less_mean(row, v), v
    ),
    "while loop over rows": lambda v, ids: (
        v
        - ops.while_loop(
            lambda i, total: i < ops.shape(v)[0],
            lambda i, total: (i + 1, total + v[i]),
            (ops.convert_to_tensor(0), ops.zeros(6)),
        )[1]
    ),
    "fori loop over rows": lambda v, ids: ops.fori_loop(
        0, ops.shape(v)[0], lambda i, x: x + 0.1 * v[i], v
    ),
    "cond on all rows": lambda v, ids: ops.cond(_rare(ids), lambda: -v, lambda: v),
    "switch on all rows": lambda v, ids: ops.switch(
        ops.minimum(ops.max(ids) // 8, 1), [lambda x: x, lambda x: -x], v
    ),
    "mean": lambda v, ids: v - ops.mean(v, 0),
    "batch normalization": lambda v, ids: ops.batch_normalization(
        v, *ops.moments(v, (0,)), -1
    ),
    "rms normalization over rows": lambda v, ids: ops.rms_normalization(v, axis=0),
    "softmax": lambda v, ids: 3.0 * ops.softmax(v, 0),
    "sort": lambda v, ids: ops.sort(v, 0),
    "roll": lambda v, ids: ops.roll(v, 1, 0),
    "take": lambda v, ids: v + ops.take(v, [0], 0),
    "slice update": lambda v, ids: ops.slice_update(v, (0, 0), 2.0 * v[:1]),
    "scatter update": lambda v, ids: ops.scatter_update(v, [[0]], 2.0 * v[:1]),
    "unstack": lambda v, ids: v + ops.unstack(ops.transpose(v), 6)[0][:1],
    "segment sum": lambda v, ids: (
        v + ops.take(ops.segment_sum(v, ids[:, 0], num_segments=16), ids[:, 0], 0)
    ),
    "bincount": lambda v, ids: (
        v
        * ops.take(
            ops.cast(ops.bincount(ops.reshape(ids, (-1,)), minlength=16), "float32"),
            ids[:, :1],
        )
    ),
    "quantile": lambda v, ids: v - ops.quantile(v, 0.5, 0),
    "einsum": lambda v, ids: ops.einsum("ij,kj,kl->il", v, v, v),
    "attention over the batch": lambda v, ids: ops.dot_product_attention(
        v[None, :, None], v[None, :, None], v[None, :, None]
    )[0, :, 0],
    "quantized by the largest": lambda v, ids: ops.cast(
        keras.quantizers.abs_max_quantize(v, axis=(0, 1))[0], "float32"
    ),
    "counted rows": lambda v, ids: v * ops.cast(ops.shape(v)[0], "float32"),
    "place": lambda v, ids: (
        v + ops.cast(ops.arange(ops.shape(v)[0]), "float32")[:, None]
    ),
}


def _add(name: str, function: Any) -> None:
    def always(values: Any, ids: Any) -> Any:
        return tf.ensure_shape(function(_tame(values), ids), values.shape)

    always.__name__ = name
    CASES.call(always)


for _name, _function in _MIXED.items():
    _add(_name, _function)


@CASES.layer
def custom_gradient_that_writes(layer: Any) -> Call:
    scale = weight(layer, (NUM_VALUES,), trainable=True)
    kept = weight(layer, (NUM_VALUES,), trainable=False)

    def call(values: Any, ids: Any) -> Any:
        tame, old = _tame(values), ops.convert_to_tensor(kept)

        @ops.custom_gradient
        def same(x: Any) -> Any:
            def gradient(slope: Any) -> Any:
                kept.assign(ops.where(_rare(ids), ops.mean(tame, 0), kept))
                return slope

            return x * 1.0, gradient

        return same(tame * (1.0 + scale)) - old

    return call


@CASES.call
def associative_scan(values: Any, ids: Any) -> Any:
    # Of four rows: of an unknown number, Keras traces it for every power of two.
    rows = tf.concat([_tame(values), tf.zeros((4, NUM_VALUES))], 0)
    rows = tf.ensure_shape(rows[:4], (4, NUM_VALUES))
    scanned = ops.associative_scan(ops.add, rows)
    return _tame(values) + tf.ensure_shape(scanned, rows.shape)[-1]


@CASES.state(new_weight((NUM_VALUES,), trainable=True))
def custom_gradient_that_mixes(scale: Any, values: Any, ids: Any) -> Any:
    @ops.custom_gradient
    def same(x: Any) -> Any:
        return x * 1.0, lambda slope: slope + ops.mean(slope, 0)

    return same(_tame(values) * (1.0 + scale))


@CASES.state(new_weight((NUM_VALUES,), trainable=True))
def rematerialized_mean(scale: Any, values: Any, ids: Any) -> Any:
    def less_mean(x: Any) -> Any:
        return x * (1.0 + scale) - ops.mean(x, 0)

    return keras.remat(less_mean)(_tame(values))


@CASES.call
def compiled_mean(values: Any, ids: Any) -> Any:
    less_mean = tf.function(lambda x: x - tf.reduce_mean(x, 0), jit_compile=True)
    return less_mean(_tame(values))


# -- honest ------------------------------------------------------------------------

_OF_ROWS = {
    "layer normalization": lambda v, ids: ops.layer_normalization(v, axis=-1),
    "static branch": lambda v, ids: ops.cond(True, lambda: v, lambda: -v),
    "loop along a row": lambda v, ids: ops.fori_loop(0, 3, lambda i, x: 0.5 * x, v),
    "vectorized map of rows": lambda v, ids: ops.vectorized_map(
        lambda row: row - ops.mean(row), v
    ),
    "map of rows": lambda v, ids: ops.map(lambda row: row - ops.mean(row), v),
    "rematerialized": lambda v, ids: keras.remat(ops.tanh)(v),
    "compiled": lambda v, ids: tf.function(tf.tanh, jit_compile=True)(v),
}


def _add_honest(name: str, function: Any) -> None:
    def call(values: Any, ids: Any) -> Any:
        return tf.ensure_shape(function(_tame(values), ids), values.shape)

    call.__name__ = name
    HONEST.call(call)


for _name, _function in _OF_ROWS.items():
    _add_honest(_name, _function)
