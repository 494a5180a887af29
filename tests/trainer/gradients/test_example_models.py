"""The models of ``examples/models`` train: two steps of each, over its own columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pipelines.core.batches.columns import Column
from pipelines.core.batches.manifest import Manifest
from tests.trainer.bounded import bounded
from trainer import models
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras, tf
from trainer.gradients import clipping

NUM_ROWS = 4
LABEL = Column(name="label", dtype="int8")

#: module:function -> its columns, its loss, and the path of its gradients.
MODELS: dict[str, tuple[tuple[Column, ...], str, str]] = {
    "transformer:transformer": (
        (Column(name="tokens", dtype="int32", shape=(4,)), LABEL),
        "binary_crossentropy",
        clipping.ONE_PASS,
    ),
    "text:reader": (
        (Column(name="tokens", dtype="int32", shape=(3,)), LABEL),
        "binary_crossentropy",
        clipping.ONE_PASS,
    ),
    "image:cnn": (
        (Column(name="image", dtype="float32", shape=(8, 8, 1)), LABEL),
        "sparse_categorical_crossentropy",
        clipping.ONE_PASS,
    ),
    "image:standardized_cnn": (
        (Column(name="image", dtype="float32", shape=(4, 4, 1)), LABEL),
        "sparse_categorical_crossentropy",
        clipping.SINGLE_EXAMPLES,
    ),
    "vision_transformer:vit": (
        (Column(name="image", dtype="float32", shape=(4, 4, 1)), LABEL),
        "sparse_categorical_crossentropy",
        clipping.ONE_PASS,
    ),
    "two_tower:two_tower": (
        (Column(name="user", dtype="int32"), Column(name="item", dtype="int32"), LABEL),
        "binary_crossentropy",
        clipping.ONE_PASS,
    ),
    "multi_output:visits": (
        (
            Column(name="features", dtype="float32", shape=(3,)),
            Column(name="clicked", dtype="int8"),
            Column(name="seconds", dtype="float32"),
        ),
        "examples.models.multi_output:loss",
        clipping.ONE_PASS,
    ),
}


def _batch(columns: tuple[Column, ...]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        column.name: tf.constant(
            random.integers(0, 2, (NUM_ROWS, *column.shape)).astype(column.dtype)
        )
        for column in columns
    }


@pytest.mark.parametrize("name", MODELS)
def test_an_example_model_trains_two_steps(name: str, small_batches: Any) -> None:
    columns, loss, path = MODELS[name]
    manifest: Manifest = dataclasses.replace(small_batches.manifest, columns=columns)
    model = models.make_model(
        manifest,
        model=f"examples.models.{name}",
        embedding_dim=1,
        hidden=(),
        loss=models.make_loss(loss),
    )
    assert clipping.choose_path(model) == path
    summed = bounded(model, 1.0, NUM_ROWS)
    step = Step(model.variables, summed, keras.optimizers.SGD(0.1))
    before = [v.numpy() for v in model.variables]
    for _ in range(2):
        step.begin([np.full(shape, 1 << 20) for shape in step.shapes])
        step.add(_batch(columns), tf.ones(NUM_ROWS))
        step.finish()
    assert step.num_traces == 1
    for variable, value in zip(model.variables, before, strict=True):
        assert np.isfinite(variable.numpy()).all()
        assert not np.array_equal(variable.numpy(), value)
