"""The best of a random number of runs: the bound holds, and is nearly attained."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from accounting import profiles
from accounting.claims import selection
from accounting.claims.selection import SHAPES, NumberOfRuns
from accounting.claims.selection import best_of as best
from accounting.core.numerics import log_ratio, threshold
from accounting.profiles import Profile, bounds_on_grid
from tests.accounting.plans import make_plan
from tests.accounting.selection.laws import law

EPSILONS = (0.0, 0.3, 1.0, 2.0)
DELTA = 1e-6
#: Shape -> worst relative excess over the best attack that was found.
CLOSE = {1.0: 0.05, 3.0: 0.05, math.inf: 0.08}
SMALL = make_plan("poisson", 16_000, 256, 126)
CRITEO = make_plan("poisson", 36_800_000, 65_536, 562)
RUNS = {
    "small 1": (SMALL, 1.19113, 1.0),
    "small 3": (SMALL, 0.791856, 3.0),
    "criteo 1": (CRITEO, 0.749001, 1.0),
    "criteo 3": (CRITEO, 0.580698, 3.0),
}


def divergence(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def profile_of(p, q):
    """The exact profile of a pair of laws on a few outcomes."""
    return Profile(lambda s: (divergence(p, q, s), divergence(q, p, s)))


def selected(p, ranks, runs):
    """The law of the winner: of equal ranks, each run wins as often as another."""
    found = np.zeros(len(p))
    numbers = np.arange(1, len(runs.shares) + 1)
    for rank in set(ranks):
        tied = ranks == rank
        below, top = p[ranks < rank].sum(), p[tied].sum()
        at_most = below + top
        wins = float(runs.probabilities @ (at_most**numbers - below**numbers))
        found[tied] = wins * p[tied] / max(top, 1e-300)
    return found


@functools.cache
def laws():
    """Laws of every shape, exactly three runs, and one or nine."""
    shapes = [law(shape, 4.0) for shape in SHAPES]
    whole = sum(shapes[0].shares)
    three = NumberOfRuns((0, 0, whole), math.nan)
    one_or_nine = NumberOfRuns((whole // 2, *(0,) * 7, whole // 2), math.nan)
    return (*shapes, three, one_or_nine)


def pairs(count):
    rng = np.random.default_rng(5)
    for _ in range(count):
        p = rng.dirichlet(np.full(4, rng.choice([0.3, 1.0, 5.0])))
        q = (
            rng.dirichlet(np.full(4, 1.0))
            if rng.random() < 0.5
            else p * rng.uniform(0.5, 2.0, 4)
        )
        yield p, q / q.sum()


def excess(p, q, runs, orders):
    """By how much exact deltas exceed the bound, at worst."""
    bound = best(profile_of(p, q), runs, spacing=0.02, least=1e-9)
    deltas = [(epsilon, *bound.deltas(epsilon)) for epsilon in EPSILONS]
    return max(
        divergence(*pair, epsilon) - delta
        for ranks in orders
        for ours, theirs in [[selected(one, ranks, runs) for one in (p, q)]]
        for epsilon, remove, add in deltas
        for pair, delta in (((ours, theirs), remove), ((theirs, ours), add))
    )


@pytest.mark.parametrize("place", range(6))
def test_the_bound_holds_for_every_law_of_k_every_score_ties_and_failing_runs(place):
    """All orders of four outcomes, with ties; a failing run has the worst score."""
    ranks = itertools.product(range(4), repeat=4)
    orders = [np.array(one) for one in ranks if set(one) == set(range(max(one) + 1))]
    assert max(excess(*pair, laws()[place], orders) for pair in pairs(8)) <= 1e-12


def test_one_run_is_the_run_itself():
    one = best(profiles.gaussian(1.0), law(3.0, 1.0), spacing=0.005, least=1e-12)
    for epsilon in (0.0, 0.5, 2.0, 4.0):
        assert one.deltas(epsilon)[0] == pytest.approx(
            profiles.gaussian(1.0).deltas(epsilon)[0], rel=2e-3
        )


def test_the_best_of_runs_of_epsilon_0_has_what_it_has():
    """A run's delta at 0 is small enough, and that of the best of ten is not."""
    p, q = np.array([0.985, 0.015]), np.array([0.995, 0.005])
    run, runs, ranks = profile_of(p, q), law(1.0, 10.0), np.arange(2)
    assert run.epsilon(0.012) == 0.0
    ours, theirs = (selected(one, ranks, runs) for one in (p, q))
    assert divergence(ours, theirs, 0.0) > 0.05
    found = selection.epsilon_of_best(run, runs, 0.012)
    assert divergence(ours, theirs, found) <= 0.012
    assert selection.epsilon_of_best(run, runs, 0.12) == 0.0


def test_pure_privacy_costs_as_published():
    """Papernot and Steinke (2022), Corollary 3: (2 + eta) epsilon, for a long tail."""
    p = np.array([math.e, 1.0]) / (1 + math.e)
    runs = law(1.0, 900.0)
    bound = best(profile_of(p, p[::-1]), runs, spacing=0.02, least=1e-9)
    assert bound.deltas(3.0)[0] < 1e-6
    assert bound.deltas(2.9)[0] > 1e-6


def discrete(forward, backward, spacing):
    """Losses of a pair with these divergences, and the first law; infinity is last.

    Where the greatest convex function of ``e^loss`` below the bounds bends by c, there
    is a loss of mass c under the second law.
    """
    above, below = corners(forward, spacing), corners(backward, spacing)
    below = below[:-1] * np.exp(-spacing * np.arange(len(below) - 1))
    p = np.concatenate([below[:0:-1], [0.0], above[1:]])
    p[len(below) - 1] = max(0.0, 1.0 - p.sum())
    return spacing * (1 - len(below) + np.arange(len(p))), p


def corners(bounds, spacing):
    """Masses of the first law at losses 0, h, 2 h and so on, and at infinity."""
    ratios = np.exp(spacing * np.arange(len(bounds)))
    kept = [0]
    for place in range(1, len(bounds)):
        while len(kept) > 1 and (bounds[place] - bounds[kept[-2]]) * (
            ratios[kept[-1]] - ratios[kept[-2]]
        ) <= (bounds[kept[-1]] - bounds[kept[-2]]) * (ratios[place] - ratios[kept[-2]]):
            kept.pop()
        kept.append(place)
    slopes = np.diff(bounds[kept]) / np.diff(ratios[kept])
    masses = np.zeros(len(bounds) + 1)
    masses[kept[1:]] = np.maximum(np.diff(slopes, append=0.0), 0.0) * ratios[kept[1:]]
    masses[-1] = bounds[-1]
    return masses


def attacked(run, runs, spacing):
    """The largest epsilon of scores that put large losses between two groups.

    Outputs that speak for the first data set are below, so that large losses beat more
    of the other runs there; those that speak for the second are above.
    """
    found = 0.0
    both = bounds_on_grid(run, spacing, DELTA * 1e-3)
    for forward, backward in (both, both[::-1]):
        losses, p = discrete(forward, backward, spacing)
        q = p * np.exp(-losses)
        q[-1] = 0.0
        ends = np.interp([1e-3, 1 - 1e-5], np.cumsum(p) / p.sum(), losses)
        for low, high in itertools.product(
            [-math.inf, *np.linspace(*ends, 24)], np.linspace(ends[1] / 4, ends[1], 12)
        ):
            if low < high:
                groups = losses <= low, losses >= high
                winners = _between(p, *groups, runs), _between(q, *groups, runs)
                found = max(found, _attained(*winners))
    return found


def _between(p, above, between, runs):
    """The law of the winner: ``between`` beats all but ``above``."""
    found, p = np.zeros(len(p)), p / p.sum()
    numbers = np.arange(1, len(runs.shares) + 1)
    below = 0.0
    for group in (~above & ~between, between, above):
        share = float(p[group].sum())
        wins = (min(below + share, 1.0)) ** numbers - below**numbers
        found[group] = p[group] / max(share, 1e-300) * (runs.probabilities @ wins)
        below = min(below + share, 1.0)
    return found


def _attained(p, q):
    """The epsilon at which a pair has the divergence DELTA."""
    return threshold(
        lambda epsilon: log_ratio(divergence(p, q, min(epsilon, 100.0)), DELTA),
        2.0,
        relative=1e-4,
        most=100.0,
    )[0]


@pytest.mark.parametrize(
    ("name", "mean"),
    [("small 3", 10.0), ("criteo 1", 10.0)],
)
def test_no_attack_exceeds_the_bound_and_the_best_is_near(name, mean):
    plan, noise, epsilon = RUNS[name]
    run = profiles.run(plan, noise)
    for shape, close in CLOSE.items():
        runs = law(shape, mean)
        bound = best(run, runs, spacing=epsilon / 300, least=1e-4 * DELTA).epsilon(
            DELTA
        )
        attack = attacked(run, runs, epsilon / 300)
        assert attack <= bound <= (1 + close) * attack
