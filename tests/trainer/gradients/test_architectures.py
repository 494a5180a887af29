"""The clipped sum of whole architectures, and of ``examples/models``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from pipelines.core.batches.manifest import Column, Manifest
from tests.trainer.architecture import PHYSICAL
from tests.trainer.architectures import ARCHITECTURES
from tests.trainer.zoo import arrays, batch, clipped_total, norm_of
from trainer import models
from trainer.core.tf_compat import tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, choose_path, clipped_sum
from trainer.gradients.proof import table_reads

NUM_ROWS = 4
#: A sum of 2^8 numbers, the longest of a row, is rounded 2^8 times: in two orders it
#: differs by some sqrt(2^8) roundings of 2^-24.  What was found is a third of that.
TOLERANCE = 2.0**4 * 2.0**-24

#: The plain suite has one of each kind, which is traced in less time.
PLAIN = (
    "bag_of_words", "convolution_of_clips", "deep_interest", "gradient_of_ones_own",
    "label_smoothing", "mixture_density", "mnist_convnet", "multi_gate_experts",
    "named_classes", "odd_layers", "ordinal_regression", "overridden_call",
    "padded_transformer", "preprocessing", "stacked_cells", "subclass",
    "tied_autoencoder", "two_towers", "untracked_table",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in PLAIN else pytest.param(name, marks=pytest.mark.thorough)
        for name in ARCHITECTURES
    ],
)
def test_the_clipped_sum_is_that_of_a_loop_over_rows(name: str) -> None:
    """The loop has Keras's own loss, with its masks and weights, and a tape per row."""
    architecture = ARCHITECTURES[name]
    model = architecture.trained()
    assert choose_path(model) == architecture.decision
    rows = architecture.with_seeds(architecture.rows(NUM_ROWS), model)
    gradients = architecture.gradients(model.network, rows)
    norms = [norm_of(one) for one in gradients]
    clip = float(np.median(norms))  # half of the rows are clipped
    step = tf.function(clipped_sum(model, l2_norm_clip=clip), autograph=False)
    try:
        found = step(*batch(rows, padding=PHYSICAL - NUM_ROWS, fill=math.nan))
    except tf.errors.InvalidArgumentError as error:
        # Only the kernels of processors with neural instructions have it.
        if name != "grouped_convolution" or "filter_size" not in str(error):
            raise
        pytest.skip("TensorFlow differentiates no grouped convolution on this CPU")
    pairs = zip(arrays(found), clipped_total(gradients, clip), strict=True)
    gap = norm_of([ours - loops for ours, loops in pairs])
    assert gap <= TOLERANCE * sum(min(clip, norm) for norm in norms)


def test_a_table_that_is_read_as_a_whole_has_no_known_rows() -> None:
    model = ARCHITECTURES["untracked_table"].plain()
    assert choose_path(model) == ONE_PASS
    assert table_reads(model) is None


def test_the_rows_of_a_table_that_is_used_twice_are_those_of_both_uses() -> None:
    architecture = ARCHITECTURES["deep_interest"]
    reads = table_reads(architecture.plain())
    assert reads is not None
    assert len(reads.tables) == 1
    (found,) = reads.ids(*batch(architecture.rows(PHYSICAL)))
    # The four items of the history, and the item at its two uses.
    assert reads.num_ids == (6,)
    assert found.shape == PHYSICAL * 6


_BINARY, _SPARSE = "binary_crossentropy", "sparse_categorical_crossentropy"

#: module:function -> type and shape of its columns, and its loss.
MODELS: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], str]] = {
    "transformer:transformer": ({"tokens": ("int32", (4,))}, _BINARY),
    "text:reader": ({"tokens": ("int32", (3,))}, _BINARY),
    "image:cnn": ({"image": ("float32", (8, 8, 1))}, _SPARSE),
    "image:standardized_cnn": ({"image": ("float32", (4, 4, 1))}, _SPARSE),
    "vision_transformer:vit": ({"image": ("float32", (4, 4, 1))}, _SPARSE),
    "two_tower:two_tower": ({"user": ("int32", ()), "item": ("int32", ())}, _BINARY),
    "multi_output:visits": (
        {"features": ("float32", (3,)), "clicked": ("int8", ()),
         "seconds": ("float32", ())},
        "examples.models.multi_output:loss",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_an_example_model_takes_a_step(name: str, small_batches: Any) -> None:
    given, loss = MODELS[name]
    columns = [
        Column(name=column, dtype=dtype, shape=shape)
        for column, (dtype, shape) in {**given, "label": ("int8", ())}.items()
    ]
    manifest: Manifest = dataclasses.replace(
        small_batches.manifest, columns=tuple(columns)
    )
    model = models.make_model(
        manifest,
        model=f"examples.models.{name}",
        embedding_dim=1,
        hidden=(),
        loss=models.make_loss(loss),
    )
    is_apart = name != "image:standardized_cnn"
    assert choose_path(model) == (ONE_PASS if is_apart else SINGLE_EXAMPLES)
    random = np.random.default_rng(0)
    rows = {
        column.name: tf.constant(
            random.integers(0, 2, (NUM_ROWS, *column.shape)).astype(column.dtype)
        )
        for column in columns
    }
    found = arrays(clipped_sum(model, l2_norm_clip=1.0)(rows, tf.ones(NUM_ROWS)))
    assert all(np.isfinite(one).all() and one.any() for one in found)
