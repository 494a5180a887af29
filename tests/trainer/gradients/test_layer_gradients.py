"""The contribution of a row is bounded by the clip, also where its terms cancel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trainer.bounded import bam_sum
from trainer.core.tf_compat import keras, tf
from trainer.gradients import gradient_parts
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, GradientSum, clipped_sum
from trainer.model.losses import loss_of_ones_own
from trainer.model.trainable_model import TrainableModel

CLIP = 0.3
MOST = 1.0001
ROWS_PER_SHAPE = 200

#: Positions, inputs, units: each way of computing a dense layer's norms is among them.
SHAPES = [(1, 40, 8), (2, 70, 9), (4, 64, 32), (16, 200, 100), (18, 5, 3), (512, 4, 2)]
#: With every method, and one example at a time, where a gradient is formed in one way.
IN_ALL_WAYS = (2, 70, 9)


def _difference(labels: Any, outputs: Any) -> Any:
    """A loss of the difference between positions: their terms cancel."""
    del labels
    signs = np.resize([1.0, -1.0], outputs.shape[1]).astype("f4")
    score = tf.reduce_sum(outputs * signs[:, None], (1, 2))
    return tf.nn.softplus(-score) + score


def _pairwise(positions: int, size: int, units: int) -> TrainableModel:
    inputs = keras.Input((positions, size), name="inputs")
    network = keras.Model(inputs, keras.layers.Dense(units)(inputs))
    return TrainableModel(
        network=network, description={}, loss=loss_of_ones_own("diff", _difference)
    )


def _equal_ids(positions: int, units: int) -> TrainableModel:
    ids = keras.Input((positions,), dtype="int32", name="ids")
    slopes = keras.Input((positions, units), name="slopes")
    rows = keras.layers.Embedding(3, units)(ids)
    products = keras.ops.sum(rows * slopes, (1, 2))
    network = keras.Model([ids, slopes], products[:, None])
    loss = loss_of_ones_own("sum", lambda labels, outputs: outputs[:, 0])
    return TrainableModel(network=network, description={}, loss=loss)


def _random_rows(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Rows of magnitudes from 1e-6 to 1e10, whose positions are nearly alike."""
    random = np.random.default_rng(seed)
    count = (shape[0],) + (1,) * (len(shape) - 1)
    magnitude = 10 ** random.uniform(-6, 10, count)
    apart = 10 ** random.uniform(-9, 0, count)
    common = random.normal(size=(shape[0], 1, *shape[2:]))
    return (magnitude * (common + apart * random.normal(size=shape))).astype("f4")


def _largest_share(
    gradient_sum: GradientSum, columns: dict[str, np.ndarray], num_rows: int
) -> float:
    """The largest norm that a single row contributes, over the clip."""

    def norm(index: Any) -> Any:
        row = {name: value[index][tf.newaxis] for name, value in tensors.items()}
        found = gradient_sum(row, tf.ones(1))
        dense = [tf.cast(tf.convert_to_tensor(g), tf.float64) for g in found]
        return tf.linalg.global_norm(dense)

    tensors = {name: tf.constant(value) for name, value in columns.items()}
    tensors["label"] = tf.zeros(num_rows, tf.int8)
    mapped = tf.function(
        lambda: tf.map_fn(norm, tf.range(num_rows), fn_output_signature=tf.float64),
        autograph=False,
    )
    return float(np.max(mapped())) / CLIP


def _ways(model: TrainableModel, one_at_a_time: bool) -> dict[str, GradientSum]:
    cap = CLIP / 2
    ways = {}
    for path in (ONE_PASS, *[SINGLE_EXAMPLES] * one_at_a_time):
        clip = {"l2_norm_clip": CLIP, "path": path}
        ways[f"dp-sgd {path}"] = clipped_sum(model, **clip)  # type: ignore[arg-type]
        ways[f"model-mix {path}"] = clipped_sum(model, linf_norm_clip=cap, **clip)  # type: ignore[arg-type]
        ways[f"bam {path}"] = bam_sum(model, radius=0.1, **clip)  # type: ignore[arg-type]
    return ways


def test_no_row_adds_more_than_the_clip_however_its_terms_cancel() -> None:
    """200 rows: 6 shapes in one pass, one of them also by 3 methods on both paths."""
    for seed, shape in enumerate(SHAPES):
        model = _pairwise(*shape)
        columns = {"inputs": _random_rows((ROWS_PER_SHAPE, *shape[:2]), seed)}
        ways = {"dp-sgd": clipped_sum(model, l2_norm_clip=CLIP, path=ONE_PASS)}
        if shape == IN_ALL_WAYS:
            ways = _ways(model, one_at_a_time=True)
        for name, way in ways.items():
            share = _largest_share(way, columns, ROWS_PER_SHAPE)
            assert share <= MOST, (shape, name)


@pytest.mark.parametrize("positions", [1, 40, 100])
def test_no_row_adds_more_than_the_clip_at_equal_ids(positions: int) -> None:
    model, num_rows = _equal_ids(positions, 4), 200
    random = np.random.default_rng(positions)
    slopes = _random_rows((num_rows, positions, 4), positions)
    slopes *= np.resize([1, -1], positions)[:, None]
    columns = {"ids": random.integers(0, 3, (num_rows, positions)), "slopes": slopes}
    columns["ids"] = columns["ids"].astype("i4")
    for name, way in _ways(model, one_at_a_time=positions == 40).items():
        assert _largest_share(way, columns, num_rows) <= MOST, name


def test_a_tiny_slope_at_a_huge_input_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = keras.Input((2,), name="inputs")
    outputs = keras.layers.Dense(1)(inputs[:, :1]) * inputs[:, 1:]
    network = keras.Model(inputs, outputs)
    loss = loss_of_ones_own("sum", lambda labels, outputs: outputs[:, 0])
    model = TrainableModel(network=network, description={}, loss=loss)
    # The product is 1.6, and the square of the slope is 0 in single precision.
    columns = {"inputs": np.array([[1.8e19, 9e-20], [1e18, 1e-23]], "f4")}
    assert _largest_share(clipped_sum(model, l2_norm_clip=CLIP), columns, 2) <= MOST
    monkeypatch.setattr(gradient_parts, "_TINY", 0.0)
    assert _largest_share(clipped_sum(model, l2_norm_clip=CLIP), columns, 2) > MOST
