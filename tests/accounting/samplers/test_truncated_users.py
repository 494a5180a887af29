"""Both bounds on a truncated step against all draws of small data sets, by hand."""

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from accounting.core.pld.dominating_pairs import Pair
from accounting.core.pld.privacy_profile import StepsProfile
from accounting.core.samplers import truncated_poisson

pytestmark = pytest.mark.usefixtures("answers_once")

EPSILONS = (0.0, 0.3, 1.0, 3.0)


@functools.cache
def sums(gradients, rate, cap):
    """The distribution of a step's sum: all samples, and all that may be kept."""
    found: Counter[int] = Counter()
    for size in range(len(gradients) + 1):
        chance = rate**size * (1 - rate) ** (len(gradients) - size)
        for drawn in itertools.combinations(gradients, size):
            kept = list(itertools.combinations(drawn, min(size, cap)))
            for chosen in kept:
                found[sum(chosen)] += chance / len(kept)
    return found


def density(weights, x, noise):
    means = np.array(list(weights))
    each = np.exp(-(((x[:, None] - means) / noise) ** 2) / 2)
    return each @ list(weights.values()) / (noise * math.sqrt(2 * math.pi))


def divergences(first, second, noise):
    """Exact hockey-stick divergences of both directions, at each of ``EPSILONS``."""
    reach = max(map(abs, [*first, *second])) + 10 * noise
    x, cell = np.linspace(-reach, reach, 1001, retstep=True)
    one, other = density(first, x, noise), density(second, x, noise)
    return np.array(
        [
            [np.maximum(p - math.exp(point) * q, 0).sum() * cell for point in EPSILONS]
            for p, q in ((one, other), (other, one))
        ]
    )


def worst(own, num_others, ghosts, rate, cap, noise):
    """The largest divergences over data sets of gradients -1, 0 and 1."""
    found = np.zeros((2, len(EPSILONS)))
    for others in itertools.combinations_with_replacement((-1, 0, 1), num_others):
        for rows in itertools.combinations_with_replacement((-1, 1), own):
            absent = (0,) * own if ghosts else ()
            present = sums((*rows, *others), rate, cap)
            without = sums((*absent, *others), rate, cap)
            found = np.maximum(found, divergences(present, without, noise))
    return found


def proven(steps):
    return np.array(
        [
            [StepsProfile(directions=(one,), num_steps=1).delta(e) for e in EPSILONS]
            for one in steps
        ]
    )


@pytest.mark.parametrize("noise", [0.5, 2.0])
@pytest.mark.parametrize(
    ("own", "most", "num_examples", "rate", "cap"),
    [
        (2, 2, 5, 0.4, 2),
        (3, 3, 5, 0.5, 3),
        (3, 3, 5, 0.3, 1),
        (1, 3, 6, 0.4, 3),
        (2, 4, 6, 0.8, 4),
        (1, 1, 3, 0.6, 2),
        (1, 1, 5, 0.5, 1),
        (1, 1, 5, 0.5, 3),
        (1, 1, 2, 0.9, 1),
    ],
)
def test_bounds_hold_for_all_small_data_sets(own, most, num_examples, rate, cap, noise):
    """Users of ``own`` rows, of whom k = ``most`` is known.

    Seen to fail with the displaced rows forgotten, with the cap one larger, and with
    the bound of revealed rows under add-or-remove.
    """
    asked = num_examples, rate, cap, noise
    found = functools.partial(worst, own, num_examples - own)
    zero_out, added = (found(ghosts, rate, cap, noise) for ghosts in (True, False))
    displaced = functools.partial(truncated_poisson.displaced_steps, most)
    slack = 1 + 1e-6
    assert (zero_out <= proven(displaced(True, *asked)) * slack).all()
    assert (added <= proven(displaced(False, *asked)) * slack).all()
    assert (
        zero_out <= proven(truncated_poisson.revealed_steps(most, *asked)) * slack
    ).all()


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_displaced_rows_hold_for_fewer_examples_without_ghosts(num_others):
    """As where `dpsgd prepare` left fewer rows than slots."""
    rate, cap, noise = 0.4, 2, 0.7
    step = truncated_poisson.displaced_steps(2, False, 6, rate, cap, noise)
    found = worst(2, num_others, False, rate, cap, noise)
    assert (found <= proven(step) * (1 + 1e-6)).all()


def test_revealed_rows_do_not_hold_without_ghosts():
    """Why users that `dpsgd prepare` left are accounted for under add-or-remove."""
    step = truncated_poisson.revealed_steps(2, 6, 0.8, 2, 3.0)
    assert (worst(2, 4, False, 0.8, 2, 3.0) > 4 * proven(step)).any()


@pytest.mark.parametrize("seed", range(5))
def test_the_pair_dominates_mixtures_of_vectors(seed):
    """The theorem of pairs, in the plane.  Seen to fail with b_i at its half."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(4))
    most = [rng.integers(0, 4, 4), rng.integers(0, 4, 4)]
    directions = rng.normal(size=(2, 4, 2))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    if seed == 0:  # the extreme case
        directions[:] = [[[1.0, 0.0]], [[-1.0, 0.0]]]
    grid = np.linspace(-9, 9, 401)
    x = np.stack(np.meshgrid(grid, grid), axis=-1)
    noise, cell = 1.2, (grid[1] - grid[0]) ** 2

    def mixture(sizes, turned):
        return sum(
            weight
            * np.exp(-((x - size * turn) ** 2).sum(axis=-1) / (2 * noise**2))
            * (cell / (2 * math.pi * noise**2))
            for weight, size, turn in zip(weights, sizes, turned, strict=True)
        )

    upper, lower = (mixture(*both) for both in zip(most, directions, strict=True))
    pair = Pair(
        weights=tuple(weights),
        upper=tuple(map(int, most[0])),
        lower=tuple(map(int, most[1])),
        noise_multiplier=noise,
    )
    for point in EPSILONS:
        exact = np.maximum(upper - math.exp(point) * lower, 0).sum()
        bound = StepsProfile(directions=([(1.0, pair)],), num_steps=1).delta(point)
        assert exact <= bound * (1 + 1e-4)
        if seed == 0:
            assert exact == pytest.approx(bound, rel=1e-3)


def test_the_masses_of_a_step_are_a_distribution():
    for asked in ((9, 0.3, 4, 1.0), (5000, 0.02, 110, 1.0), (50, 0.9, 50, 1.0)):
        for steps in (
            truncated_poisson.displaced_steps(7, True, *asked),
            truncated_poisson.revealed_steps(7, *asked),
        ):
            for step in steps:
                total = sum(mass for mass, _ in step)
                assert total == pytest.approx(1.0, abs=1e-7)
