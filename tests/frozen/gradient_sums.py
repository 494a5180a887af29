"""The clipped sum of four rows by every architecture of the tests, in three numbers.

They are the sum of its values, its norm and a projection, so that an answer does not
depend on how TensorFlow's kernels round.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from tests.frozen.compare import Answers
from tests.trainer.architecture import PHYSICAL
from tests.trainer.architectures import ARCHITECTURES
from tests.trainer.zoo import arrays, batch
from trainer.gradients.paths import clipped_sum

CLIP = 0.5
NUM_ROWS = 4


def _numbers(total: list[np.ndarray]) -> list[float]:
    """Returns sum, norm and a projection of the values."""
    values = np.concatenate([part.astype("f8").ravel() for part in total])
    random = np.random.default_rng(zlib.crc32(str(values.size).encode()))
    projection = float(values @ random.normal(size=values.size))
    return [float(values.sum()), math.sqrt(float(values @ values)), projection]


def _sum(name: str) -> list[float]:
    architecture = ARCHITECTURES[name]
    model = architecture.trained()
    rows = architecture.with_seeds(architecture.rows(NUM_ROWS), model)
    columns = batch(rows, padding=PHYSICAL - NUM_ROWS)
    return _numbers(arrays(clipped_sum(model, l2_norm_clip=CLIP)(*columns)))


def answer(names: list[str] | None) -> Answers:
    """Computes the sums of all models, or of those named."""
    return {name: _sum(name) for name in (ARCHITECTURES if names is None else names)}
