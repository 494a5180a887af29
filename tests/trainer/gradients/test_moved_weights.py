"""One pass in which each example has moved weights: exact, independent, bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.trainer.architectures import OPERATIONS
from tests.trainer.bounded import bam_sum
from tests.trainer.claims.test_bam import loop_sum
from tests.trainer.gradients.test_operation_clipping import KNOWN, known_model
from tests.trainer.zoo import (
    NUM_ROWS,
    OTHER,
    arrays,
    assert_close,
    batch,
    make_model,
    numbers,
)
from trainer.claims import bam
from trainer.gradients.clipping import ONE_PASS as PATH
from trainer.gradients.clipping import SINGLE_EXAMPLES, choose_path
from trainer.gradients.engine.backward_pass import backward
from trainer.gradients.engine.changed_results import with_changes
from trainer.gradients.engine.moved_weights import num_formed_values
from trainer.gradients.engine.proof import proof_of
from trainer.gradients.engine.weight_uses import UnknownUseError
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

CLIP = 0.3
RADIUS = 0.3


def _mostly_thorough(names: Iterable[str], plain: Sequence[str]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in plain else pytest.mark.thorough)
        for name in names
    ]


MODELS = OPERATIONS | {make.__name__: make for make in OTHER}


def _never(*arguments: Any) -> Any:
    raise AssertionError("computed one example at a time")


def _sum(model: TrainableModel, clip: float = CLIP) -> Callable[..., Any]:
    moved_sum = bam_sum(model, l2_norm_clip=clip, radius=RADIUS, path=PATH)
    return tf.function(moved_sum, autograph=False)


@pytest.mark.parametrize(
    "name",
    _mostly_thorough(MODELS, ["table used twice", "lstm", "strides and padding"]),
)
def test_one_pass_equals_a_loop_that_moves_the_weights(name: str, rows: Any) -> None:
    model, data = make_model(MODELS[name]), rows(NUM_ROWS)
    found = _sum(model)(*batch(data, padding=4, fill=math.nan))
    assert_close(arrays(found), loop_sum(model, data, CLIP, RADIUS), 2e-5)


@pytest.mark.parametrize(
    "name",
    _mostly_thorough(
        KNOWN, ["turned", "subtracted from", "rows and columns", "einsum along"]
    ),
)
def test_every_known_use_equals_the_loop(name: str, rows: Any) -> None:
    model, data = known_model(*KNOWN[name]), rows(NUM_ROWS)
    found = _sum(model)(*batch(data, padding=2))
    assert_close(arrays(found), loop_sum(model, data, CLIP, RADIUS))


def _dilated_and_grouped(images: Any, kernel: Any) -> Any:
    return tf.nn.conv2d(images, kernel, 1, "SAME", dilations=[2, 1])


def _depthwise(images: Any, kernel: Any) -> Any:
    return tf.nn.depthwise_conv2d(images, kernel, [1, 1, 1, 1], "SAME")


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [(_dilated_and_grouped, (2, 2, 1, 4)), (_depthwise, (2, 2, 2, 3))],
)
def test_windows_of_several_channels_equal_the_loop(
    convolution: Callable[[Any, Any], Any], shape: tuple[int, ...], rows: Any
) -> None:
    def windows(values: Any, kernel: Any) -> Any:
        images = tf.reshape(values[:, :12], (-1, 4, 3, 1))
        found = convolution(tf.concat([images, tf.tanh(images)], -1), kernel)
        weights = tf.range(1.0, found.shape[-1] + 1)  # channels differ
        return tf.reduce_sum(tf.tanh(found * weights), (1, 2, 3))[:, None]

    model, data = known_model(shape, windows), rows(NUM_ROWS)
    found = _sum(model)(*batch(data))
    try:
        wanted = loop_sum(model, data, CLIP, RADIUS)
    except tf.errors.InvalidArgumentError as error:
        # Only the kernels of processors with neural instructions have it.
        if "do not yet support dilation" not in str(error):
            raise
        pytest.skip("TensorFlow differentiates no dilated convolution on this CPU")
    assert_close(arrays(found), wanted)


def test_large_products_are_not_formed(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(values: Any, kernel: Any) -> Any:
        hidden = tf.tanh(tf.matmul(values, kernel))
        return tf.reduce_sum(tf.tanh(tf.matmul(hidden, kernel)), 1, keepdims=True)

    model, data = known_model((13, 13), twice), rows(NUM_ROWS)
    monkeypatch.setattr(
        "trainer.gradients.engine.moved_weights._product_change", _never
    )
    found = _sum(model)(*batch(data))
    assert_close(arrays(found), loop_sum(model, data, CLIP, RADIUS))


def test_of_a_table_that_is_looked_up_no_whole_gradient_is_formed() -> None:
    model = make_model(OPERATIONS["table used twice"])
    sizes = [v.shape.num_elements() for v in model.variables if v.shape != (7, 3)]
    assert num_formed_values(proof_of(model)) == sum(sizes)


@pytest.mark.parametrize("width", [1, 40])
def test_memory_counts_only_products_that_are_formed(width: int) -> None:
    """A matrix at few positions is applied by its factors, which the pass holds."""

    def product(values: Any, kernel: Any) -> Any:
        hidden = tf.matmul(values, kernel)
        return tf.reduce_sum(tf.tanh(hidden), 1, keepdims=True)

    found = num_formed_values(proof_of(known_model((13, width), product)))
    assert found == (13 if width == 1 else 0)


def test_what_does_not_follow_from_a_change_is_used_as_it_is() -> None:
    with tf.Graph().as_default() as graph:
        values = tf.constant([1.0, 2.0])
        apart, changed = values + 1.0, values * 2.0
        result = tf.square(apart) * tf.sqrt(changed)
        found, copies = with_changes(result, {changed.op.name: lambda op: [2.0, 4.0]})
        (copy,) = copies.values()
        both = tf.compat.v1.Session().run([found, result, copy.outputs[0]])
        types = [op.type for op in graph.get_operations()]
    assert types.count("Square") == 1
    np.testing.assert_allclose(both[0], both[1] * np.sqrt(2.0), rtol=1e-6)
    np.testing.assert_array_equal(both[2], [2.0, 4.0])


class _ChosenRows(keras.layers.Layer):
    """Reads rows of a table that another weight chooses."""

    def build(self, shape: Any) -> None:
        self.choice = self.add_weight((13, 3))
        self.table = self.add_weight((3, 2))

    def call(self, values: Any) -> Any:
        scores = tf.matmul(values, self.choice)
        rows = tf.gather(self.table, tf.argmax(scores, 1, output_type=tf.int32))
        return tf.reduce_sum(rows, 1, keepdims=True) * tf.reduce_max(
            scores, 1, keepdims=True
        )


def test_rows_that_are_chosen_by_weights_are_computed_one_example_at_a_time(
    rows: Any,
) -> None:
    def make() -> Any:
        integers, values = numbers()
        return keras.Model(integers, _ChosenRows()(values))

    model, data = make_model(make), rows(NUM_ROWS)
    assert choose_path(model) == PATH
    assert bam.choose_bam_path(model) == SINGLE_EXAMPLES
    proof = proof_of(model)

    @tf.function(autograph=False)
    def moved(columns: Any, weight: Any) -> Any:
        found = backward(proof, columns, NUM_ROWS)
        with pytest.raises(UnknownUseError, match="depend on a weight"):
            found.moved(weight)
        return weight

    moved(*batch(data))
    chosen = bam_sum(model, l2_norm_clip=CLIP, radius=RADIUS)
    assert_close(arrays(chosen(*batch(data))), loop_sum(model, data, CLIP, RADIUS))


@pytest.mark.parametrize(
    "name", _mostly_thorough(["lstm", "strides and padding"], ["strides and padding"])
)
def test_an_example_contributes_the_same_beside_others_and_at_most_the_clip(
    name: str, rows: Any
) -> None:
    model, data = make_model(OPERATIONS[name]), rows(NUM_ROWS)
    clip = 0.1
    gradient_sum = _sum(model, clip)
    whole, rest = (
        arrays(gradient_sum(*batch(data[k:], padding=k, fill=math.inf))) for k in (0, 1)
    )
    alone = arrays(gradient_sum(*batch(data[:1], padding=NUM_ROWS - 1)))
    for a, b, c in zip(whole, rest, alone, strict=True):
        np.testing.assert_allclose(a - b, c, atol=1e-6)
    norm = math.sqrt(sum(float((a.astype("f8") ** 2).sum()) for a in alone))
    assert clip * 0.999 <= norm <= clip * (1 + 1e-5)
