"""The clipped sum of five rows by every architecture of the tests, in three numbers.

They are the sum of its values, its norm and a projection, so that an answer does not
depend on how TensorFlow's kernels round.  The answer of a model that is refused is the
word ``refused``.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from tests.frozen.compare import Answers
from tests.trainer import architectures, conftest, zoo
from trainer.gradients import clipping

CLIP = 0.7
NUM_ROWS = 5

#: Name -> what makes the network.
MODELS: dict[str, architectures.Make] = {
    **{make.__name__: make for make in (*zoo.FAST, *zoo.OTHER)},
    **architectures.GHOST,
    **architectures.OPERATIONS,
    **architectures.VECTORIZED,
}


def _numbers(total: list[np.ndarray]) -> list[float]:
    """Returns sum, norm and a projection of the values."""
    values = np.concatenate([part.astype("f8").ravel() for part in total])
    random = np.random.default_rng(zlib.crc32(str(values.size).encode()))
    projection = float(values @ random.normal(size=values.size))
    return [float(values.sum()), math.sqrt(float(values @ values)), projection]


def _sum(name: str) -> list[float]:
    model = zoo.make_model(MODELS[name])
    rows = conftest.make_rows(NUM_ROWS)
    rows["categories"][:, 0] = 1  # else a row may be wholly masked, its mean 0 / 0
    found = clipping.clipped_sum(model, l2_norm_clip=CLIP)(*zoo.batch(rows, padding=3))
    return _numbers(zoo.arrays(found))


def answer(names: list[str] | None) -> Answers:
    """Computes the sums of all models, or of those named."""
    return {name: _sum(name) for name in (MODELS if names is None else names)}
