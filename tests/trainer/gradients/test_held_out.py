"""Models that were not at hand when the engine was written, against loops over rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.architectures import GHOST, OPERATIONS, REFUSED, VECTORIZED
from tests.trainer.gradients.test_clipping import naive_sum
from tests.trainer.held_out import HELD_OUT, MIXING
from tests.trainer.zoo import NUM_ROWS, arrays, assert_close, batch, make_model
from trainer.gradients import clipping
from trainer.gradients.engine import proof
from trainer.gradients.model_check import check_model
from trainer.models import as_functional
from trainer.tf_compat import tf

CLIP = 0.3


def test_there_are_enough_of_them() -> None:
    assert len({**GHOST, **OPERATIONS, **VECTORIZED, **HELD_OUT}) >= 120
    assert len(MIXING) + len(REFUSED) >= 40


@pytest.mark.parametrize("name", HELD_OUT)
def test_the_clipped_sum_is_that_of_a_loop_over_single_examples(
    name: str, small_batches: Any, rows: Any
) -> None:
    model = make_model(lambda: as_functional(HELD_OUT[name](), small_batches.manifest))
    model = dataclasses.replace(model, columns=small_batches.manifest.columns)
    check_model(model, small_batches.manifest)
    data = rows(NUM_ROWS)
    data["categories"][:, 0] = 1  # a row that is wholly masked has no mean
    gradient_sum = clipping.clipped_sum(model, l2_norm_clip=CLIP)
    found = tf.function(gradient_sum, autograph=False)(*batch(data, padding=4))
    assert_close(arrays(found), naive_sum(model, data, CLIP), 2e-5)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_refused_and_not_proven(
    name: str, small_batches: Any
) -> None:
    model = make_model(MIXING[name])
    assert proof.obstacle(model) is not None
    with pytest.raises(InputError, match="not to depend on the others"):
        check_model(model, small_batches.manifest)
