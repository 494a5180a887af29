"""Every architecture: the right path and the right sum, or the true reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.architectures import (
    GHOST,
    OPERATIONS,
    REFUSED,
    VECTORIZED,
    half_precision,
)
from tests.trainer.gradients.test_clipping import CLIP
from tests.trainer.zoo import (
    NUM_ROWS,
    arrays,
    assert_close,
    batch,
    make_model,
    naive_sum,
)
from trainer.gradients import clipping
from trainer.gradients.engine.table_reads import table_reads
from trainer.gradients.model_check import check_model
from trainer.models import as_functional
from trainer.tf_compat import tf

#: Name -> what makes a model, and its path.
ACCEPTED: dict[str, tuple[Any, str]] = {
    **{name: (make, clipping.ONE_PASS) for name, make in GHOST.items()},
    **{name: (make, clipping.ONE_PASS) for name, make in OPERATIONS.items()},
    **{name: (make, clipping.SINGLE_EXAMPLES) for name, make in VECTORIZED.items()},
}

#: Traces that take seconds; the plain suite has a shorter model of each kind.
LONG_TRACES = (
    "masked lstm", "bidirectional", "convolutional lstm", "stacked cells", "gru",
    "causal attention", "cell in slices",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in LONG_TRACES else name
        for name in ACCEPTED
    ],
)
def test_a_good_model_passes_and_has_the_clipped_sum_of_a_tape_per_example(
    name: str, small_batches: Any, rows: Any
) -> None:
    make, path = ACCEPTED[name]
    model = make_model(lambda: as_functional(make(), small_batches.manifest))
    model = dataclasses.replace(model, columns=small_batches.manifest.columns)
    assert clipping.choose_path(model) == path
    check_model(model, small_batches.manifest)
    data = rows(3)
    data["categories"][:, 0] = 1  # else a row may be wholly masked, its mean 0 / 0
    gradient_sum = tf.function(
        clipping.clipped_sum(model, l2_norm_clip=CLIP), autograph=False
    )
    # As many rows as those of the graph that the check made, which is used again.
    padding = small_batches.manifest.physical_batch_size - len(data)
    try:
        found = gradient_sum(*batch(data, padding=padding))
    except tf.errors.InvalidArgumentError as error:
        # Only the kernels of processors with neural instructions have it.
        if name != "grouped convolution" or "filter_size" not in str(error):
            raise
        pytest.skip("TensorFlow differentiates no grouped convolution on this CPU")
    assert_close(arrays(found), naive_sum(model, data, CLIP), 2e-5)


def test_half_precision_is_computed_one_row_at_a_time(rows: Any) -> None:
    model, data = make_model(half_precision), rows(NUM_ROWS)
    assert clipping.choose_path(model) == clipping.SINGLE_EXAMPLES
    found = clipping.clipped_sum(model, l2_norm_clip=CLIP)(*batch(data, padding=4))
    assert_close(arrays(found), naive_sum(model, data, CLIP), 5e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_told_why(name: str, small_batches: Any) -> None:
    make, message = REFUSED[name]
    model = make_model(make)
    with pytest.raises(InputError, match=message) as caught:
        check_model(model, small_batches.manifest)
    assert "\n" not in str(caught.value)
    if "others" in message:
        assert clipping.choose_path(model) == clipping.SINGLE_EXAMPLES


@pytest.mark.parametrize("name", ["table in a lambda", "table untracked"])
def test_a_table_that_is_read_as_a_whole_has_no_known_rows(name: str) -> None:
    model = make_model(OPERATIONS[name])
    assert clipping.choose_path(model) == clipping.ONE_PASS
    assert table_reads(model) is None


def test_the_rows_of_a_table_that_is_used_twice_are_those_of_both_uses() -> None:
    reads = table_reads(make_model(OPERATIONS["table used twice"]))
    assert reads is not None
    assert len(reads.tables) == 1
    columns = {
        "categories": tf.constant([[*range(26)]] * 16, tf.int32),
        "label": tf.zeros(16, tf.int8),
    }
    (found,) = reads.ids(columns, tf.ones(16))
    assert found.shape == 16 * reads.num_ids[0]
