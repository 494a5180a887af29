"""DP-SAT against Algorithm 1 in NumPy; between steps no weights are moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipelines.files.key_sources import insecure_key
from tests.trainer.bounded import float_noise, unbounded
from tests.trainer.zoo import arrays, batch, both_inputs, make_model
from trainer.claims.dp_sat import SharpnessAwareOptimizer
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras
from trainer.gradients.paths import clipped_sum
from trainer.model.trainable_model import TrainableModel

CLIP, RHO, RATE, DIVISOR, STDDEV = 0.5, 0.7, 0.3, 8, 0.2


def _steps(model: TrainableModel, optimizer: Any) -> Step:
    summed = unbounded(clipped_sum(model, l2_norm_clip=CLIP), DIVISOR)
    return Step(model.variables, summed, optimizer)


def _noise(model: TrainableModel, step: int) -> list[np.ndarray]:
    shapes = [tuple(variable.shape) for variable in model.variables]
    return float_noise(insecure_key(1), step, shapes, STDDEV)


def _weights(model: TrainableModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def _train(rows: Any, radius: float, num_parts: int = 1) -> list[np.ndarray]:
    model = make_model(both_inputs)
    optimizer = SharpnessAwareOptimizer(
        keras.optimizers.SGD(RATE), model.variables, radius=radius
    )
    step = _steps(model, optimizer)
    for t in range(4):
        optimizer.before_step()
        step.begin(_noise(model, t))
        for part in np.array_split(rows(12, seed=t), num_parts):
            step.add(*batch(part, padding=12 - len(part)))
        step.finish()
    return _weights(model)


def _train_in_numpy(rows: Any, radius: float) -> list[np.ndarray]:
    """Algorithm 1 of the paper, line by line."""
    model = make_model(both_inputs)
    gradient_sum = clipped_sum(model, l2_norm_clip=CLIP)
    previous = [np.zeros(v.shape) for v in model.variables]
    for t in range(4):
        weights = _weights(model)
        norm = np.sqrt(sum((g**2).sum() for g in previous))
        for variable, g in zip(model.variables, previous, strict=True):
            variable.assign_add(radius * g / (norm + 1e-16))
        sums = arrays(gradient_sum(*batch(rows(12, seed=t))))
        noise = _noise(model, t)
        previous = [(s + n) / DIVISOR for s, n in zip(sums, noise, strict=True)]
        for v, w, g in zip(model.variables, weights, previous, strict=True):
            v.assign(w - RATE * g)
    return _weights(model)


@pytest.mark.parametrize(("radius", "num_parts"), [(0.0, 1), (RHO, 3)])
def test_it_is_the_algorithm_whatever_the_physical_batches(
    radius: float, num_parts: int, rows: Any
) -> None:
    found = _train(rows, radius, num_parts)
    for left, right in zip(found, _train_in_numpy(rows, radius), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    plain = _train_in_numpy(rows, 0.0)
    moved = max(np.abs(a - b).max() for a, b in zip(found, plain, strict=True))
    assert (moved > 1e-3) == (radius > 0)


def test_the_move_has_the_radius_and_is_undone_bit_for_bit(rows: Any) -> None:
    model = make_model(both_inputs)
    # Rate 0: after the step the weights must be those from before it.
    optimizer = SharpnessAwareOptimizer(
        keras.optimizers.SGD(0.0), model.variables, radius=RHO
    )
    step, before = _steps(model, optimizer), _weights(model)
    for t in range(3):
        optimizer.before_step()
        moves = [a - b for a, b in zip(_weights(model), before, strict=True)]
        length = np.sqrt(sum(float((move**2).sum()) for move in moves))
        assert length == pytest.approx(RHO if t else 0.0, rel=1e-5)
        step.begin(_noise(model, t))
        step.add(*batch(rows(5)))
        step.finish()
        assert all(map(np.array_equal, _weights(model), before))
