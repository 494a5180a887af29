"""Losses of positions, with Keras's masks: those of Keras for each row alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from pipelines.core.batches.manifest import Column
from tests.trainer.zoo import assert_close, clipped_total
from trainer.core.tf_compat import get_keras_mask, keras, tf
from trainer.gradients.paths import SINGLE_EXAMPLES, choose_path, clipped_sum
from trainer.model.evaluation import Evaluator, with_masks
from trainer.model.losses import loss_by_name, loss_of_keras
from trainer.model.trainable_model import TrainableModel

layers, losses = keras.layers, keras.losses
POSITIONS, CLASSES, ROWS = 6, 5, 16
CLIP = 0.05

sparse = functools.partial(losses.SparseCategoricalCrossentropy, from_logits=True)
REDUCTIONS = ("sum_over_batch_size", "sum", None)


class _Squares(losses.Loss):
    """Integer labels, which Keras casts; one number for each position."""

    def call(self, labels: Any, outputs: Any) -> Any:
        return keras.ops.sum(keras.ops.square(labels - outputs), -1)


def _each_error(labels: Any, outputs: Any) -> Any:
    return keras.ops.abs(labels - outputs)


#: Loss, units of the output, and shape of a label.
CASES: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    **{
        f"classes, {one}": (sparse(reduction=one), CLASSES, (POSITIONS,))
        for one in REDUCTIONS
    },
    "ignored class, sum": (
        sparse(ignore_class=0, reduction="sum"), CLASSES, (POSITIONS,)
    ),
    "one-hot": (
        losses.CategoricalCrossentropy(from_logits=True), CLASSES, (POSITIONS, CLASSES)
    ),
    "own loss": (_Squares(), 2, (POSITIONS, 2)),
    "own function": (_each_error, 1, (POSITIONS, 1)),
}  # fmt: skip


def _network(units: int, *, masked: bool = True) -> Any:
    keras.utils.set_random_seed(0)
    ids = keras.Input((POSITIONS,), dtype="int32", name="ids")
    rows = layers.Embedding(7, 3, mask_zero=masked)(ids)
    return keras.Model(ids, layers.Dense(units)(layers.Dense(4, "tanh")(rows)))


def _columns(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows of all lengths, one of them without any position."""
    random = np.random.default_rng(0)
    lengths = np.arange(ROWS) % (POSITIONS + 1)
    ids = random.integers(1, 7, (ROWS, POSITIONS))
    ids[np.arange(POSITIONS) >= lengths[:, None]] = 0
    if name == "one-hot":
        labels = np.eye(CLASSES)[random.integers(0, CLASSES, (ROWS, POSITIONS))]
    else:
        labels = random.integers(0, 2, (ROWS, *shape))
    return {"ids": ids.astype("i4"), "label": labels.astype("i4")}


def _model(network: Any, loss: Any, shape: tuple[int, ...]) -> TrainableModel:
    columns = (
        Column(name="ids", dtype="int32", shape=(POSITIONS,)),
        Column(name="label", dtype="int32", shape=shape),
    )
    return TrainableModel(network=network, description={}, loss=loss, columns=columns)


def _gradients_of_keras(network: Any, columns: Any, row: int) -> list[np.ndarray]:
    """The gradient of Keras's loss of a batch of this row alone."""
    ids, labels = (columns[name][row : row + 1] for name in ("ids", "label"))
    with tf.GradientTape() as tape:
        loss = network.compute_loss(y=labels, y_pred=network(ids))
    found = tape.gradient(loss, network.trainable_variables)
    return [tf.convert_to_tensor(one).numpy() for one in found]


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_gradient_of_keras_for_this_row_alone(name: str) -> None:
    """Seen to fail: padding was trained on, and a sum was a mean."""
    loss, units, shape = CASES[name]
    network, columns = _network(units), _columns(name, shape)
    network.compile("sgd", loss)
    model = _model(network, loss_of_keras(loss), shape)
    assert np.all(model.accepts(columns))
    rows = [_gradients_of_keras(network, columns, row) for row in range(ROWS)]
    assert sum(any(map(np.any, gradients)) for gradients in rows) > ROWS // 2
    for path in {choose_path(model), SINGLE_EXAMPLES}:
        found = clipped_sum(model, l2_norm_clip=CLIP, path=path)(
            {name: tf.constant(value) for name, value in columns.items()}, tf.ones(ROWS)
        )
        found = [tf.convert_to_tensor(one).numpy() for one in found]
        assert_close(found, clipped_total(rows, CLIP), 1e-5)


@pytest.mark.parametrize(
    ("name", "units", "shape"),
    [
        ("sparse_categorical_crossentropy", CLASSES, (POSITIONS,)),
        ("categorical_crossentropy", CLASSES, (POSITIONS, CLASSES)),
        ("mean_squared_error", 2, (POSITIONS, 2)),
    ],
)
def test_losses_by_name_and_held_out_metrics_leave_padding_out(
    name: str, units: int, shape: tuple[int, ...]
) -> None:
    """Seen to fail: both were means over padding, too."""
    network = _network(units)
    kind = "one-hot" if name == "categorical_crossentropy" else name
    columns, model = _columns(kind, shape), _model(network, loss_by_name(name), shape)
    outputs = network(columns["ids"])
    masks = get_keras_mask(outputs)
    values = np.asarray(outputs, np.float64)
    if units == CLASSES:
        classes = columns["label"]
        classes = classes.argmax(-1) if len(shape) == 2 else classes
        logs = values - np.log(np.exp(values).sum(-1, keepdims=True))
        of_positions = -np.take_along_axis(logs, classes[..., None], -1)[..., 0]
    else:
        of_positions = np.square(values - columns["label"]).mean(-1)
    lengths = (columns["ids"] > 0).sum(1)
    total = np.where(columns["ids"] > 0, of_positions, 0).sum(1)
    wanted = np.where(lengths > 0, total / np.maximum(lengths, 1), 0)
    np.testing.assert_allclose(model.losses(columns), wanted, rtol=1e-5)

    class _HeldOut:
        option = "--eval"

        def batches(self) -> Any:
            for first in (0, 5):
                part = slice(first, 5 if first == 0 else ROWS)
                yield {key: value[part] for key, value in columns.items()}

    def predict(rows: Any) -> Any:
        found = network(rows["ids"])
        return with_masks(found, get_keras_mask(found))

    evaluator = Evaluator(held_out=_HeldOut(), model=model, predict=predict)  # type: ignore[arg-type]
    direct, again = evaluator.metrics(), evaluator.metrics_of(*evaluator.outputs())
    assert direct == again
    loss = "log_loss" if units == CLASSES else "loss"
    assert direct[loss] == pytest.approx(wanted.mean(), rel=1e-5)
    if units == CLASSES:
        right = np.where(np.asarray(masks), values.argmax(-1) == classes, 0).sum(1)
        share = (right[lengths > 0] / lengths[lengths > 0]).mean()
        assert direct["accuracy"] == pytest.approx(share)
