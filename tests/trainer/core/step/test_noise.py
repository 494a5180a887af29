"""Noise: its law, and that it depends on (key, step, variable) alone; and its grid."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from randomgen import AESCounter

from accounting.core.validation import InputError
from pipelines.core.keys import derive
from pipelines.files.key_sources import insecure_key
from trainer.core.step import grid as module
from trainer.core.step import noise
from trainer.core.step.grid import Grid, make
from trainer.core.step.noise import (
    LaterNoise,
    NoiseStream,
    _generator,
    grid_normal,
    mixing_coefficients,
    step_noise,
    uniform,
)
from trainer.core.tf_compat import tf

KEY = insecure_key(1)
OTHER_KEY = insecure_key(2)
#: Distance of grid points in the tests of a whole step.
UNIT = 2.0**-30


#: Units of a standard deviation of 1: finer than what is compared here.
UNITS = 2.0**31


def normal(key: bytes, step: int, variable: int, shape: Sequence[int]) -> np.ndarray:
    """Noise of standard deviation 1, of its stream."""
    return grid_normal(key, step, variable, shape, stddev=UNITS) / UNITS


def test_the_generator_is_aes_128_in_counter_mode() -> None:
    # FIPS 197, appendix C.1: this block under this key.
    key, block = bytes(range(16)), bytes.fromhex("00112233445566778899aabbccddeeff")
    generator = AESCounter(
        key=int.from_bytes(key, "little"), counter=int.from_bytes(block, "little")
    )
    found = generator.random_raw(2).astype("<u8").tobytes()
    assert found == bytes.fromhex("69c4e0d86a7b0430d8cdb78070b4c55a")


def test_streams_of_other_keys_steps_and_variables_are_uncorrelated() -> None:
    n = 20_000
    labels = itertools.product((KEY, OTHER_KEY), (0, 1, 10), (0, 1, 10))
    streams = np.stack([normal(*label, (n,)) for label in labels])
    correlation = np.corrcoef(streams) - np.eye(len(streams))
    # 153 pairs, each about N(0, 1/n): 5.5 deviations fail with probability < 1e-5.
    assert np.abs(correlation).max() < 5.5 / math.sqrt(n)


def test_noise_has_the_stated_deviation_neither_more_nor_less() -> None:
    n, stddev = 400_000, 2.5
    values = step_noise(KEY, 0, [(n,)], stddev, UNIT)[0] * UNIT / stddev
    # The variance of n normals is 1 +- sqrt(2/n): five deviations are 1.1 %, so that a
    # standard deviation off by 2 % fails with probability > 0.999.
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(values.mean()) < 5 / math.sqrt(n)
    for point in (0.5, 1, 2, 3):
        expected = math.erfc(point / math.sqrt(2))
        deviation = math.sqrt(expected * (1 - expected) / n)
        assert abs((np.abs(values) > point).mean() - expected) < 5 * deviation


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_block_of_noise_is_drawn_by_one_worker(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(950,), (7, 100), (30,)]
    monkeypatch.setattr(noise, "_BLOCK", 100)
    whole = step_noise(KEY, 0, shapes, 1.0, UNIT)
    assert all(np.count_nonzero(values) == values.size for values in whole)
    shares = [
        step_noise(KEY, 0, shapes, 1.0, UNIT, (rank, count)) for rank in range(count)
    ]
    for values, *drawn in zip(whole, *shares, strict=True):
        assert np.array_equal(sum(drawn), values)
        assert np.count_nonzero(drawn) == values.size


def test_mixing_coefficients_are_uniform() -> None:
    n = 400_000
    values = uniform(KEY, 0, 0, (n,))
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() <= 1
    # Kolmogorov and Smirnov, by Dvoretzky, Kiefer and Wolfowitz: fails by chance
    # with probability 1e-7.  Seen to fail for values ** 1.02, whose distance is 0.7 %.
    ranks = np.arange(n + 1) / n
    ordered = np.sort(values.astype("f8"))
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    assert distance < math.sqrt(math.log(2 / 1e-7) / (2 * n))


def _all_drawn(key: bytes, step: int, shapes: list[tuple[int]]) -> list[np.ndarray]:
    noise = step_noise(key, step, shapes, 1.0, UNIT)
    return [*noise, *mixing_coefficients(key, step, shapes)]


def test_mixing_coefficients_are_independent_of_noise_and_of_each_other() -> None:
    n = 20_000
    shapes = [(n,), (n,)]
    streams = np.stack(
        [
            stream
            for key, step in itertools.product((KEY, OTHER_KEY), (0, 1))
            for stream in _all_drawn(key, step, shapes)
        ]
    )
    correlation = np.corrcoef(streams) - np.eye(len(streams))
    # 120 pairs, each about N(0, 1/n): 5.5 deviations fail with probability < 1e-5.
    assert np.abs(correlation).max() < 5.5 / math.sqrt(n)
    again = _all_drawn(KEY, 0, shapes)
    assert all(map(np.array_equal, again, streams[:4]))
    assert all(map(np.array_equal, again[:2], step_noise(KEY, 0, shapes, 1.0, UNIT)))
    # Another label: not the bits of the noise in another form.
    noise_key = derive(KEY, "grid-noise", 0, 0, 0)
    assert noise_key != derive(KEY, "mixing-coefficients", 0, 0)
    stream = AESCounter(key=int.from_bytes(noise_key[:16], "little"), counter=0)
    others = np.random.Generator(stream).random(n).astype("f4")
    assert not np.isin(uniform(KEY, 0, 0, (n,))[:100], others).all()


def test_there_is_no_noise_without_a_grid() -> None:
    with pytest.raises(ValueError, match="a grid for noise"):
        step_noise(KEY, 0, [(3,)], 1.0, None)


def test_no_noise_is_exactly_zero_and_nothing_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("trainer.core.step.noise.AESCounter")
    later = LaterNoise(secret=KEY, step=0, noise_stddev=0.0)
    for values in (
        step_noise(KEY, 0, [(3,)], 0.0, None)[0],
        later.of_read(1, 0, (3,)),
        later.of_flush(0, 1, (3,)),
    ):
        assert values.tolist() == [0.0] * 3


def test_stream_yields_every_step_once_in_order_for_slow_and_fast_readers() -> None:
    shapes = [(3,), (2, 2)]
    wanted = [step_noise(KEY, step, shapes, 0.5, UNIT) for step in range(4, 12)]
    for pause in (0.0, 0.01):
        found = []
        with NoiseStream(
            KEY, steps=range(4, 12), shapes=shapes, noise_stddev=0.5, unit=UNIT
        ) as stream:
            for noise in stream:
                time.sleep(pause)
                found.append(noise)
        assert len(found) == len(wanted)
        for left, right in zip(found, wanted, strict=True):
            assert all(map(np.array_equal, left, right))


def test_stream_ends_when_its_reader_leaves() -> None:
    with NoiseStream(
        KEY, steps=range(10**9), shapes=[(2,)], noise_stddev=1.0, unit=UNIT
    ) as stream:
        next(iter(stream))
    assert not stream._thread.is_alive()


def test_stream_raises_what_its_thread_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr("trainer.core.step.noise.step_noise", fail)
    with (
        NoiseStream(
            KEY, steps=range(2), shapes=[(2,)], noise_stddev=1.0, unit=UNIT
        ) as stream,
        pytest.raises(MemoryError, match="planted"),
    ):
        next(iter(stream))


def test_noise_on_a_grid_is_rounded_to_the_nearest_integer() -> None:
    for stddev in (0.6, 3.0, 2.0**37, 2.0**47):
        generator = _generator(derive(KEY, "grid-noise", 5, 2, 0))
        doubles = generator.standard_normal(40_000) * stddev
        found = grid_normal(KEY, 5, 2, (40_000,), stddev=stddev)
        assert (found == np.rint(doubles)).all()
    with pytest.raises(ValueError, match="at most 2\\^47 units"):
        grid_normal(KEY, 5, 2, (1,), stddev=2.0**48)


# -- the grid: what it takes from the clip, that sums fit, and that noise covers it ----


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
