"""The grid: what it takes from the clip, that sums fit, and that noise covers it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.files.key_sources import insecure_key
from trainer.core.step import grid as module
from trainer.core.step import noise
from trainer.core.step.grid import Grid, make
from trainer.core.step.noise import grid_normal, step_noise
from trainer.core.tf_compat import tf

KEY = insecure_key(1)
SIZE = 400


def _make(**changes: Any) -> Grid:
    most = {"num_values": SIZE, "most_examples": 1000, "noise_multiplier": 1.0}
    return make(**{"l2_norm_clip": 1.5, **most, **changes})


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> Grid:
    """A coarse grid: a unit is 1/64 of the clip, and rounding takes a third of it."""
    monkeypatch.setattr(module, "_MOST_BITS", 6)
    return _make(l2_norm_clip=1.0)


def _units(grid: Grid, value: np.ndarray) -> np.ndarray:
    found: np.ndarray = grid.on(tf.constant(value.astype("f4"))).numpy()
    return found


def test_one_example_changes_a_sum_on_the_grid_by_the_clip_at_most(
    coarse: Grid,
) -> None:
    each = coarse.clip / math.sqrt(SIZE)
    # The example brings each coordinate just past a grid point: the largest change.
    sums = np.full(SIZE, coarse.unit * (1 - (each / coarse.unit) % 1) + 1e-5)
    change = _units(coarse, sums + each) - _units(coarse, sums)
    worst = np.linalg.norm(change) * coarse.unit
    assert coarse.clip * 1.05 < worst <= 1.0
    generator = np.random.default_rng(0)
    for _ in range(20):
        sums, added = generator.normal(size=(2, SIZE))
        added *= coarse.clip / np.linalg.norm(added)
        change = _units(coarse, sums + added) - _units(coarse, sums)
        assert np.linalg.norm(change) * coarse.unit <= 1.0


def test_the_clip_that_tensorflow_computes_with_leaves_room_for_the_rounding() -> None:
    # TensorFlow rounds the clip to the nearest float32, half of them upwards: 200 clips
    # would all pass by chance with probability 2^-200.
    for clip in np.random.default_rng(0).uniform(0.1, 10, 200).tolist():
        grid = _make(l2_norm_clip=clip)
        used = Fraction(float(tf.constant(grid.clip, tf.float32)))
        # The norm of one unit in each of d coordinates, compared by squares.
        left = (Fraction(clip) - used) / Fraction(grid.unit)
        assert left > 0
        assert left**2 >= SIZE
        # And no more than the rounding of two float32 is lost.
        assert left < math.sqrt(SIZE) + 2**-22 * clip / grid.unit


def test_a_row_of_one_example_is_no_longer_on_the_grid(coarse: Grid) -> None:
    values = np.random.default_rng(0).normal(size=(50, 4)).astype("f4")
    rows = tf.IndexedSlices(tf.constant(values), tf.range(50) % 7, (7, 4))
    found = coarse.on(rows)
    units = found.values.numpy()
    assert units.dtype == np.int64
    assert (np.abs(units) * coarse.unit <= np.abs(values)).all()
    assert (np.abs(units - values / coarse.unit) < 1).all()
    assert np.array_equal(found.indices, rows.indices)


@pytest.mark.parametrize("examples", [1, 65_536, 4_000_000_000, 1 << 40])
@pytest.mark.parametrize("multiplier", [0.0, 1.0, 200.0, 1e5])
def test_no_sum_of_a_step_overflows(examples: int, multiplier: float) -> None:
    clip = 1.999
    grid = _make(l2_norm_clip=clip, most_examples=examples, noise_multiplier=multiplier)
    # Twice the sum, for float32, and the longest tail that the ziggurat draws.
    units = (Fraction(2 * examples) + 13 * Fraction(multiplier)) * Fraction(clip)
    assert units / Fraction(grid.unit) < 1 << 62
    if examples <= 65_536 and multiplier <= 1:
        assert grid.exponent == -30


def test_no_value_of_the_ziggurat_is_longer_than_the_range_has_room_for() -> None:
    # Of the tail x = r - ln(u) / r, kept where -2 ln(v) > (ln(u) / r)^2, u, v > 2^-54.
    longest = 3.6541528853610088 + math.sqrt(2 * 53 * math.log(2))
    assert longest < 13


@pytest.mark.parametrize("multiplier", [1.0, 64.0, 1e6])
def test_noise_reaches_odd_and_even_points_alike(multiplier: float) -> None:
    clip, n = 1.99, 40_000
    grid = _make(l2_norm_clip=clip, noise_multiplier=multiplier)
    (units,) = step_noise(KEY, 0, [(n,)], multiplier * clip, grid.unit)
    # 2^12 of the doubles are multiples of 2^-50 deviations, and so on: bits that the
    # sampler does not draw would be zeros.  Five standard errors: 6e-7.
    for bit in range(4):
        share = (units >> bit & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(n)
    assert multiplier * clip / grid.unit < 2**37


def test_noise_on_a_grid_is_the_normal_of_its_stream_rounded() -> None:
    units = grid_normal(KEY, 3, 1, (5, 7), stddev=2.0**31)
    assert units.dtype == np.int64
    assert units.shape == (5, 7)
    again = grid_normal(KEY, 3, 1, (5, 7), stddev=2.0**31)
    assert units.tobytes() == again.tobytes()
    label = noise.derive(KEY, "grid-noise", 3, 1, 0)
    doubles = noise._generator(label).standard_normal(35) * 2.0**31
    assert np.array_equal(units.ravel(), np.rint(doubles))


def test_a_mean_is_the_nearest_float32_of_the_sum_times_a_constant() -> None:
    grid = Grid(exponent=-30, clip=1.0)
    sums = np.array([0, 1, -3, (1 << 40) + 1, -(1 << 50)])
    found = grid.mean(tf.constant(sums), 8.0).numpy()
    assert found.dtype == np.float32
    assert np.array_equal(found, (sums.astype("f4") * np.float32(2.0**-33)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l2_norm_clip": 1e-8}, "l2_norm_clip=1e-08 to be between 1.5e-8 and 1e18"),
        ({"l2_norm_clip": 1e30}, "l2_norm_clip=1e.30 to be between"),
        ({"noise_multiplier": 1e10}, "would take half of the clip"),
        ({"num_values": 1 << 60}, "grid for 1,152,921,504,606,846,976 parameters"),
    ],
)
def test_what_no_grid_is_fine_enough_for_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _make(**changes)
