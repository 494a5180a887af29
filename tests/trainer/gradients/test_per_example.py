"""Rows that may not contribute become exact zeros."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainer.gradients.per_example import clip_scale, keep_rows
from trainer.tf_compat import tf


def test_other_rows_are_exactly_zero_whatever_they_held() -> None:
    columns = {
        "scalar": tf.constant([1.0, math.nan, math.inf]),
        "vector": tf.constant([[1, 2], [3, 4], [5, 6]], tf.int32),
    }
    found = keep_rows(columns, tf.constant([True, False, False]))
    np.testing.assert_array_equal(found["scalar"], [1, 0, 0])
    np.testing.assert_array_equal(found["vector"], [[1, 2], [0, 0], [0, 0]])


@pytest.mark.parametrize("clip", [0.5, 2.0, 2, math.inf])
def test_factors_by_hand(clip: float) -> None:
    norms = tf.constant([0.0, 1.0, 4.0, math.nan, math.inf, 1.0])
    real = tf.constant([True, True, True, True, True, False])
    counted, scale = clip_scale(norms, real, clip)
    np.testing.assert_array_equal(counted, [1, 1, 1, 0, 0, 0])
    wanted = [1.0, min(1.0, clip), min(1.0, clip / 4), 0.0, 0.0, 0.0]
    np.testing.assert_allclose(scale, wanted, rtol=1e-6)
