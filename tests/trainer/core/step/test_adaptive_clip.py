"""The automatic clip: its count costs nothing, and the clip follows the quantile.

Planted faults, each of which a test here was seen to find: a count of 1 instead of the
root of a half; a threshold at the clip; a count of rows that may not contribute; a
step that is scaled by its clip; a clip that moves the wrong way; a gain that is the
same in all plans; positions that are too few for a small gain.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from pipelines.files.key_sources import insecure_key
from tests.trainer.bounded import bounded, plan_of
from tests.trainer.conftest import make_rows
from tests.trainer.zoo import batch, linear, make_model
from trainer.core import claim_names
from trainer.core.step.bounded_sum import BoundedSum
from trainer.core.step.clipping import ExampleGradients, SingleExamples
from trainer.core.step.dp_step import Step
from trainer.core.step.grid import _FINE, _THRESHOLD, CLIPS, AdaptiveClip
from trainer.core.step.noise import step_noise
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, example_gradients
from trainer.model.trainable_model import TrainableModel

DIVISOR = 8
#: Norms and sums are rounded to float32 (see `clipping`).
MOST = 1 + 1e-4


def _at(position: int, quantile: float = 0.9) -> AdaptiveClip:
    found = AdaptiveClip(quantile)
    found._position.assign(position * _FINE)
    return found


def _of_first_integer(model: TrainableModel) -> ExampleGradients:
    """Gradients along one direction, as long as the row's first integer."""
    size = sum(variable.shape.num_elements() for variable in model.variables)

    def gradient(row: Any) -> tuple[list[Any], Any]:
        each = row["integers"][0, 0] / math.sqrt(size)
        return [tf.fill(v.shape, each) for v in model.variables], tf.constant(True)

    return SingleExamples(model, gradient, relies_on=[claim_names.OTHER_METHOD])


def _rows_of(norms: Any) -> tuple[dict[str, Any], Any]:
    rows = make_rows(len(norms))
    rows["integers"][:, 0] = norms
    return batch(rows)


def _flat(values: list[Any]) -> np.ndarray:
    arrays = [tf.convert_to_tensor(one).numpy().ravel() for one in values]
    return np.concatenate(arrays).astype("f8")


def _unit(found: BoundedSum) -> float:
    assert found.unit is not None
    return found.unit


def _units(found: BoundedSum) -> int:
    assert found.adaptive is not None
    assert found.grid is not None
    return found.adaptive.units(found.grid)


def _run(step: Step, noise: list[np.ndarray], *batches: Any) -> None:
    step.begin(noise)
    for columns, weight in batches:
        step.add(columns, weight)
    step.finish()


# -- the count costs nothing -----------------------------------------------------------


@pytest.mark.parametrize("position", [0, 32, 47, 56])
def test_a_row_moves_sum_and_count_together_by_the_clip_at_most(position: int) -> None:
    found = bounded(_of_first_integer(make_model(linear)), _at(position), DIVISOR)
    assert found.grid is not None
    clip, of_grid = float(CLIPS[position]), found.grid.clip
    near = [
        clip * of_grid * edge * (1 + ulps * 2.0**-23)
        for edge in (_THRESHOLD, math.sqrt(0.5), 1.0)
        for ulps in (*range(-40, 41, 4), -(2**18), 2**18)
    ]
    norms = np.array([*near, 0, 1e-30, 1e-3 * clip, 1e6 * clip, 1e18], "f4")
    moved = np.array(
        [_unit(found) * np.linalg.norm(_flat(found(*_rows_of([n])))) for n in norms]
    )
    assert moved.max() <= MOST
    # Rows at the threshold and rows that are clipped use all that they may.
    assert moved[: len(near) // 3].max() > 0.9999
    assert moved[-1] > 0.9999
    # A row that is counted and has no gradient moves the count alone.
    assert moved[-4] == pytest.approx(_THRESHOLD, rel=1e-4)


@pytest.mark.parametrize("path", [ONE_PASS, SINGLE_EXAMPLES])
def test_the_sum_is_that_of_a_fixed_clip_in_units_of_it(path: str, rows: Any) -> None:
    gradients, some = example_gradients(make_model(linear), path), rows(16)
    clip = float(CLIPS[20])
    found = bounded(gradients, _at(20), DIVISOR)
    fixed = bounded(gradients, clip, DIVISOR)
    *sums, count = found(*batch(some))
    wanted = _flat(fixed(*batch(some))) * _unit(fixed)
    np.testing.assert_allclose(
        _flat(sums) * _unit(found) * clip, wanted, rtol=1e-4, atol=1e-6
    )
    whole = bounded(gradients, 1e6, DIVISOR)
    norms = [np.linalg.norm(_flat(whole(*batch(row)))) for row in some[:, None]]
    small = np.sum(np.array(norms) * _unit(whole) <= clip * math.sqrt(0.5))
    assert 0 < small < 16
    assert int(count[0]) == small * _units(found)


def test_padding_and_rows_without_a_finite_gradient_are_not_counted() -> None:
    found = bounded(_of_first_integer(make_model(linear)), _at(32), DIVISOR)
    columns, weight = _rows_of([0.1, 0.1, np.nan, np.inf, 3e38, 0.1])
    count = found(columns, weight * [1, 0, 1, 1, 1, 1])[-1]
    assert int(count[0]) == 2 * _units(found)


def test_a_step_of_several_batches_counts_all_of_them() -> None:
    """And the noise of the count is that of any coordinate: one draw, then the sum."""
    found = bounded(_of_first_integer(make_model(linear)), _at(32), DIVISOR)
    step = Step(_variables(), found, keras.optimizers.SGD(0.0))
    noise = [np.zeros(shape, np.int64) for shape in step.shapes]
    noise[-1] += _units(found)  # as one row more
    _run(step, noise, _rows_of([0.1] * 3), _rows_of([0.1, 9]), _rows_of([9, 0.2]))
    assert _log2(found) == pytest.approx(_moved(0.9 - (1 + 5) / DIVISOR), abs=2 / _FINE)


def _variables() -> list[Any]:
    return make_model(linear).variables


# -- the clip --------------------------------------------------------------------------


def _log2(found: BoundedSum) -> float:
    """The clip's position, as the binary logarithm of a clip."""
    assert found.adaptive is not None
    return float(found.adaptive._position) / _FINE / 8 - 4


def _moved(wrong: float, gain: float = 0.15) -> float:
    """Change of the logarithm; 0.15 is the gain of the 100 steps of ``plan_of``."""
    return gain * wrong / math.log(2)


@pytest.mark.parametrize(
    ("num_steps", "gain"), [(1, 0.2), (75, 0.2), (150, 0.1), (1_000_000, 1.5e-5)]
)
def test_the_gain_falls_with_the_steps_of_the_plan(num_steps: int, gain: float) -> None:
    found = BoundedSum(
        _of_first_integer(make_model(linear)),
        dataclasses.replace(plan_of(DIVISOR), num_steps=num_steps),
        l2_norm_clip=_at(32),
        noise_multiplier=1.0,
    )
    step = Step(_variables(), found, keras.optimizers.SGD(0.0))
    for _ in range(2):
        noise = [np.zeros(shape, np.int64) for shape in step.shapes]
        _run(step, noise, _rows_of([9.0]))
    assert _log2(found) == pytest.approx(2 * _moved(0.9, gain), rel=0.01)


def test_the_clip_finds_the_quantile_of_the_norms() -> None:
    """The share of 400 norms at the threshold, within the noise of the last steps."""
    adaptive = AdaptiveClip(0.8)
    random = np.random.default_rng(0)
    norms = np.exp(random.normal(0, 1, 400)).astype("f4")
    found = BoundedSum(
        _of_first_integer(make_model(linear)),
        plan_of(400, most=400),
        l2_norm_clip=adaptive,
        noise_multiplier=1.0,
    )
    step = Step(_variables(), found, keras.optimizers.SGD(0.0))
    shares = []
    for index in range(150):
        noise = step_noise(insecure_key(2), index, step.shapes, 1.0, found.unit)
        _run(step, noise, _rows_of(norms))
        threshold = float(adaptive.norm) * math.sqrt(0.5)
        shares.append(np.mean(norms <= threshold))
    # Clips are 9 % apart, which is less than 0.04 of these norms.
    assert np.mean(shares[100:]) == pytest.approx(0.8, abs=0.04)


def test_the_clip_is_bounded_and_so_is_its_change() -> None:
    found = bounded(_of_first_integer(make_model(linear)), _at(32), DIVISOR)
    step = Step(_variables(), found, keras.optimizers.SGD(0.0))
    assert found.adaptive is not None
    for count, limit in ((-(2**45), CLIPS[-1]), (2**45, CLIPS[0])):
        before = _log2(found)
        for index in range(60):
            noise = [np.zeros(shape, np.int64) for shape in step.shapes]
            noise[-1] += count
            _run(step, noise, _rows_of([1.0]))
            if not index:
                assert abs(_log2(found) - before) <= _moved(1) + 1 / _FINE
        assert float(found.adaptive.norm) == limit


def test_an_update_is_in_units_of_the_clip() -> None:
    found = bounded(_of_first_integer(make_model(linear)), _at(48), DIVISOR)
    variables = _variables()
    step = Step(variables, found, keras.optimizers.SGD(1.0))
    before = [variable.numpy() for variable in variables]
    noise = [np.zeros(shape, np.int64) for shape in step.shapes]
    _run(step, noise, _rows_of([1e6]))
    moved = [b - v.numpy() for b, v in zip(before, variables, strict=True)]
    assert np.linalg.norm(_flat(moved)) == pytest.approx(1 / DIVISOR, rel=1e-4)
    assert _log2(found) == pytest.approx(2 + _moved(0.9), abs=2 / _FINE)
