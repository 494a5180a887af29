"""The best of a random number of runs: a bound from one run's privacy profile.

A run M draws a candidate from a public distribution, with replacement, trains with
fresh keys and batches, and scores the result.  K is drawn from a public law on 1, 2,
..., with ``f(z) = E[z^K]``.  M runs K times, and only the output of the run with the
best score is released, with its candidate and its score.  K, the other runs and how
long all took stay secret.  A run that fails, or whose score is no number, has the worst
score and is not repeated.  The score is a function of the run's output and of what is
the same for both neighbours.

**Theorem.**  Let P and Q be the laws of M's output on two neighbouring data sets,
``delta(s) >= H_(e^s)(P || Q)`` and ``rho(s) >= H_(e^s)(Q || P)`` for s >= 0, and

    q(u) = max(0,  sup over s of e^-s (u - delta(s)),
                   sup over s of 1 - e^s (1 - u) - rho(s))       for u in [0, 1],
    G(z) = max over u of (f'(u) - z e^epsilon f'(q(u)))+ .

Then delta(epsilon) of the selection, for its outputs A on the first data set against
those on the second, is at most ``E_P[G(dQ/dP)]``; and if G lies below the line through
its values at the knots ``z_j = e^(-s_j)``, with slopes that rise by ``c_j / z_j`` at
each and G constant beyond the last, at most ``sum over j of c_j H_(e^(s_j))(P || Q) +
G(z_last)``.

**Proof.**
  1. *Ties.*  Add to each run's output an independent uniform number, which decides
     between equal scores.  P and Q keep their divergences, no two scores are equal, and
     to drop the winner's number at the end is post-processing.
  2. *Density.*  Write F(y) for the probability under P that a run's score is below that
     of the output y.  Given K = k, the winner has the density ``k F(y)^(k-1)`` with
     respect to P: any of k runs has it, and the others are below.  So A has the density
     f'(F(y)) with respect to P, and on the other data set f'(F'(y)) with respect to Q,
     where F' is of Q.
  3. *Events.*  "The score is below that of y" is one event for both data sets.  It has
     probability F(y) under P and F'(y) under Q: ``F <= e^s F' + delta(s)``, and for the
     complement under Q against P, ``1 - F' <= e^s (1 - F) + rho(s)``.  So F'(y) >=
     q(F(y)).
  4. *Sum.*  f' has coefficients >= 0, so it rises.  Then ``H(A || A') = int (f'(F) dP -
     e^epsilon f'(F') dQ)+ <= int (f'(F) dP - e^epsilon f'(q(F)) dQ)+ <= int G(dQ/dP)
     dP``, where G(z) bounds the integrand over dP, whatever F(y) is.  Where dP = 0 the
     integrand is 0.
  5. *Knots.*  G is a maximum of linear functions of z, which fall: it is convex, falls,
     and is at most the lines between its values at knots, and its last value beyond.
     That function is ``G(z_last) + sum of c_j (1 - z / z_j)+``, and ``E_P[(1 - e^s
     dQ/dP)+] = H_(e^s)(P || Q)``.

Formal guarantees:
  - the bound holds for every law of K on 1, 2, ..., every score, ties and failing runs.
  - both directions: remove and add have bounds of their own.
  - every number is rounded to the private side: profiles are asked at grid points
    alone, the maximum over u is over cells with f' at the upper end and q at the lower
    one.  The given K is a table: the probabilities are multiples of 2^-64 that add up
    to 1, and the law of what `NumberOfRuns.draw` returns is exactly the table, if its
    input is uniform.  What is accounted for is this table, not the law it was made
    from.
  - *not* covered: a score of private rows without noise; runs that share batches or
    keys, or stop because of other runs; a grid without replacement; releasing K, the
    index of the winner, or anything of another run.
  - `Selected` has the epsilon of `best_of` for the profile of one run of the plan,
    under zero-out; its law is named by two public numbers, from which every machine
    makes its table.

References:
  The theorem is ours.  Papernot and Steinke (2022), arXiv:2110.03620, for selection
  with a random number of runs, in Renyi divergences, and for its laws.  Against an
  explicit attack on the same profile epsilon is at most 5 % larger, of Poisson's law
  8 %; see the tests.

Public: everything.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting import profiles
from accounting.core import accountant, sampler_registry
from accounting.core.claim import MethodWording
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.numerics import log_ratio, round_up, smallest_noise, threshold
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_int
from accounting.profiles import Profile, bounds_on_grid

Array = NDArray[np.float64]

#: Number of edges of cells of 1 - u, in equal ratios and at equal distances.
_RATIOS, _DISTANCES = 8_000, 20_000
_LARGEST_EPSILON = 600.0
#: More than the relative rounding errors of f', and of all else.
_TERMS, _UP = 1 + 1e-11, 1 + 1e-9
#: Distance of the epsilons at which a run's profile is asked for, over its epsilon.
_SPACING = 1 / 300
#: Share of delta that is negligible in a selection.
_NEGLIGIBLE = 1e-4
#: Digits of a noise multiplier.
_DIGITS = 6


def epsilon_of_best(run: Profile, law: NumberOfRuns, delta: float) -> float:
    """Returns an upper bound on epsilon of the best of a random number of runs.

    Args:
      run: Profile of one run.
      law: Law of the number of runs.
      delta: In (0, 1).
    """
    # Of k runs the total variation is at most k times that of one.
    share = delta / (law.mean * _UP)
    alone = run.epsilon(delta, 0.05) or run.epsilon(share, 0.05)
    if not 0.0 < alone < math.inf:
        return alone
    found = best_of(run, law, spacing=alone * _SPACING, least=_NEGLIGIBLE * delta)
    return found.epsilon(delta)


def noise_of_best(
    run_at: Callable[[float], Profile],
    law: NumberOfRuns,
    *,
    epsilon: float,
    delta: float,
    guess: float,
    say: Callable[[str], None] = lambda text: None,
) -> float:
    """Returns a noise multiplier of each run with which the best is private.

    Args:
      run_at: Noise multiplier -> profile of one run.
      law: Law of the number of runs.
      epsilon: Target, above 0.
      delta: In (0, 1).
      guess: Noise multiplier at which the search begins, above 0.
      say: Gets a line for each noise multiplier that is tried.
    """

    def excess(noise: float) -> float:
        if noise == 0.0:
            return math.inf
        say(f"noise multiplier {noise:.4g}")
        return log_ratio(epsilon_of_best(run_at(noise), law, delta), epsilon)

    return round_up(smallest_noise(excess, guess, stride=1.1), _DIGITS)


def best_of(
    run: Profile, law: NumberOfRuns, *, spacing: float, least: float
) -> Profile:
    """Returns the profile of the best of a random number of runs.

    Args:
      run: Profile of one run.
      law: Law of the number of runs.
      spacing: Distance of the epsilons at which the run's profile is asked for, above
        0; a three-hundredth of the run's epsilon is fine enough.
      least: A delta that is negligible.
    """
    return Profile(_Selection(run, law, spacing, least).deltas)


class _Selection:
    def __init__(
        self, run: Profile, law: NumberOfRuns, spacing: float, least: float
    ) -> None:
        self._spacing = spacing
        forward, backward = bounds_on_grid(run, spacing, least / law.mean)
        self._directions = (forward, backward), (backward, forward)
        x = _cells(least)
        densities = law.derivative(x[:-1]) * _TERMS
        rests = [_largest_rest(*both, spacing, x[1:]) for both in self._directions]
        self._envelopes = [
            _envelope(densities, law.derivative(rest) / _TERMS) for rest in rests
        ]

    def deltas(self, epsilon: float) -> tuple[float, float]:
        remove, add = (self._delta(place, epsilon) for place in range(2))
        return remove, add

    def _delta(self, place: int, epsilon: float) -> float:
        if epsilon > _LARGEST_EPSILON:
            return 1.0
        bounds, inverse = _whole_line(*self._directions[place], self._spacing)
        knots = np.concatenate([[0.0], inverse])
        values = _largest(self._envelopes[place], knots * np.exp(epsilon))
        values = np.maximum(values, 0.0)
        rises = inverse * np.diff(np.diff(values) / np.diff(knots), append=0.0)
        found = float(np.maximum(rises, 0.0) @ bounds) + float(values[-1])
        return min(1.0, found * _UP)


def _envelope(intercepts: Array, slopes: Array) -> tuple[Array, Array]:
    """Returns the lines ``w - t v`` that are the largest at some t >= 0.

    Args:
      intercepts: w, shape (n,).
      slopes: v, falling; shape (n,).
    """
    falls = np.append(True, slopes[1:] < np.minimum.accumulate(slopes)[:-1])
    w, v = intercepts[falls], slopes[falls]
    while True:
        # A line below the larger one of its neighbours is nowhere the largest.
        dw, dv = np.diff(w), np.diff(v)
        kept = np.pad(dw[:-1] * dv[1:] < dw[1:] * dv[:-1], 1, constant_values=True)
        if kept[: len(w)].all():
            return w, v
        w, v = w[kept], v[kept]


def _largest(envelope: tuple[Array, Array], t: Array) -> Array:
    """Returns the largest ``w - t v`` of the lines of `_envelope` at t, shape (n,)."""
    w, v = envelope
    # The next line is larger from where it meets the one before.
    best = np.searchsorted(np.diff(w) / np.diff(v), t)
    return w[best] - t * v[best]


def _cells(least: float) -> Array:
    """Returns edges of cells of x = 1 - u, shape (cells + 1,), from 0 to 1."""
    ratios = np.geomspace(min(least, 1e-3) * 1e-3, 1.0, _RATIOS)
    return np.unique(np.concatenate([ratios, np.linspace(0.0, 1.0, _DISTANCES)]))


def _largest_rest(delta: Array, rho: Array, spacing: float, x: Array) -> Array:
    """Returns an upper bound on ``1 - q(u)`` at x = 1 - u, shape (n,).

    Args:
      delta: Bounds of P against Q at the grid points, shape (m,).
      rho: Bounds of Q against P, shape (k,).
      spacing: Distance of grid points.
      x: Shape (n,).
    """
    shrinks = np.exp(-spacing * np.arange(len(delta)))
    grows = np.exp(spacing * np.arange(len(rho)))
    # All are lines ``start + slope x``, and the least one counts.
    starts = np.concatenate([rho[::-1], 1 - shrinks * (1 - delta)])
    lines = _envelope(-starts, np.concatenate([grows[::-1], shrinks]))
    found = np.minimum(-_largest(lines, x), 1.0)
    # Where both cancel, rounding matters more.
    return np.clip(found * _UP + 1e-15, 0.0, 1.0)


def _whole_line(delta: Array, rho: Array, spacing: float) -> tuple[Array, Array]:
    """Returns bounds on divergences of P against Q, and their increasing ``e^-s``.

    Below 0, ``H_(e^-s)(P || Q) = 1 - e^-s + e^-s H_(e^s)(Q || P)``.
    """
    above, below = spacing * np.arange(len(delta)), spacing * np.arange(1, len(rho))
    shrink = np.exp(-below)
    negative = -np.expm1(-below) + shrink * rho[1:]
    bounds = np.concatenate([delta[::-1], negative])
    return bounds, np.concatenate([np.exp(-above[::-1]), np.exp(below)])


#: Denominator of the probabilities.
WHOLE = 1 << 64
#: Probability of larger numbers of runs, which are left out.
_TAIL = 1e-6
#: Most numbers of runs in a table.
_MOST_RUNS = 20_000
MOST_AS_GOOD = 100
_LEAST_RATE, _MOST_RATE = 1e-12, 2e3
#: Shapes that are tried: a larger one is more concentrated; infinity is Poisson's.
SHAPES = (1.0, 3.0, 10.0, math.inf)
#: A candidate is good if it is among this share of all.
TOP = 0.1


@dataclasses.dataclass(frozen=True)
class NumberOfRuns:
    """A law on 1, 2, ..., n.

    Attributes:
      shares: Probability of each number in units of 2^-64; they add up to 2^64.
      shape: Shape of the law that the table was made from, for messages.
    """

    shares: tuple[int, ...]
    shape: float

    def __post_init__(self) -> None:
        """Refuses shares that are no law.

        Raises:
          InputError: a negative share, or a sum other than 2^64.
        """
        if min(self.shares) < 0 or sum(self.shares) != WHOLE:
            raise InputError("Expected shares >= 0 that add up to 2^64.")

    @functools.cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """Probability of each number, shape (n,)."""
        return np.array([share / WHOLE for share in self.shares])

    @property
    def mean(self) -> float:
        """Expected number of runs."""
        return float(self.probabilities @ np.arange(1, len(self.shares) + 1))

    def derivative(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``f'(1 - x)`` for ``f(z) = E[z^K]``, up to a relative 1e-11.

        It is the sum over k of k times the probability of k runs and that the k - 1
        others are worse, if each is with probability 1 - x.

        Args:
          x: In [0, 1], shape (n,).
        """
        found = np.zeros(len(x))
        factors = self.probabilities * np.arange(1, len(self.shares) + 1)
        for factor in factors[::-1].tolist():  # Horner: all terms are at least 0
            found *= 1 - x
            found += factor
        return found

    def success(self) -> float:
        """Returns the probability that a candidate of the best ``TOP`` is tried."""
        runs = np.arange(1, len(self.shares) + 1)
        return 1.0 - float(self.probabilities @ (1 - TOP) ** runs)

    def draw(self, uniform: int) -> int:
        """Returns a number of runs.

        Args:
          uniform: Uniformly random in [0, 2^64), from a secret key.
        """
        check_int("uniform", uniform, at_least=0, at_most=WHOLE - 1)
        return 1 + bisect.bisect_right(list(itertools.accumulate(self.shares)), uniform)


def as_good_as(num_runs: int, shape: float) -> NumberOfRuns:
    """Returns the law that tries a good candidate as surely as ``num_runs`` runs do.

    Args:
      num_runs: In [1, 100].
      shape: eta of the negative binomial law, at least 1; infinity for Poisson's.

    Raises:
      InputError: a value out of range, or a shape that would need too many runs.
    """
    check_int("num_runs", num_runs, at_least=1, at_most=MOST_AS_GOOD)
    wanted = 1 - (1 - TOP) ** num_runs
    return _smallest(shape, lambda found: wanted - found.success())


def _smallest(shape: float, excess: Callable[[NumberOfRuns], float]) -> NumberOfRuns:
    """Returns the law of least rate at which ``excess`` is not above 0."""

    def of(rate: float) -> NumberOfRuns:
        return NumberOfRuns(_shares(_weights(shape, max(rate, _LEAST_RATE))), shape)

    # Without a tolerance, no mean of a table is exactly 1.
    rate = threshold(
        lambda rate: excess(of(rate)) - 1e-9,
        10.0,
        relative=1e-9,
        least=_LEAST_RATE,
        most=_MOST_RATE,
    )[1]
    if math.isinf(rate):
        raise InputError(
            f"Expected a law of shape {shape:g} to need a mean of {_MOST_RATE:g} at "
            "most. Ask for fewer runs."
        )
    return of(rate)


def _weights(shape: float, rate: float) -> NDArray[np.float64]:
    """Returns probabilities of 1, 2, ...; the law's mean with 0 would be ``rate``."""
    runs = np.arange(1, _MOST_RUNS + 1, dtype=np.float64)
    logs = -special.gammaln(runs + 1)
    if math.isinf(shape):
        logs += runs * math.log(rate)
    else:
        logs += special.gammaln(runs + shape) + runs * math.log(rate / (rate + shape))
    weights = np.exp(logs - logs.max())
    above = np.cumsum(weights[::-1])[::-1]
    weights = weights[above > _TAIL * above[0]]
    return weights / weights.sum()


def _shares(weights: NDArray[np.float64]) -> tuple[int, ...]:
    shares = [int(weight * WHOLE) for weight in weights.tolist()]
    # What rounding left goes where it matters least.
    shares[int(np.argmax(weights))] += WHOLE - sum(shares)
    return tuple(shares)


METHOD = "selection theorem: best of a random number of runs"
_SECRET = "the number of runs, the other runs, and how long they took"
_EARLIER = "earlier runs on the same data, and searches other than this one"


def law_of(num_runs: int, shape: float | None) -> NumberOfRuns:
    """Returns the law that a run record names.

    Args:
      num_runs: As of `as_good_as`.
      shape: Shape of the law; None for Poisson's.
    """
    return as_good_as(num_runs, math.inf if shape is None else shape)


def check_plan(plan: DpSgdPlan) -> None:
    """Refuses a plan whose profile takes too long.

    Raises:
      InputError: a sampler without a profile.
    """
    known = {name: sampler_registry.get(name) for name in sampler_registry.names()}
    fast = [name for name, each in known.items() if each.profile or each.closed_form]
    if plan.sampler not in fast:
        raise InputError(
            f"Expected sampler={plan.sampler!r} of several runs to be "
            f"{' or '.join(fast)}: the others take minutes."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """A run that was the best of a random number of runs.  All public.

    Attributes:
      num_runs: N: a candidate of the best tenth is tried as surely as by N runs.
      shape: Shape of the law; None for Poisson's.
      l2_norm_clip: Bound on the L2 norm of one example's gradient, or "auto".

    Raises:
      InputError: no law with these numbers is offered.
    """

    num_runs: int
    shape: float | None
    l2_norm_clip: float | str

    def __post_init__(self) -> None:
        """Refuses a law that is not offered.

        Raises:
          InputError: name, value, bound.
        """
        if (math.inf if self.shape is None else self.shape) not in SHAPES:
            raise InputError(
                f"Expected shape={self.shape!r} of the number of runs to be one of "
                f"{SHAPES}. Restore the record."
            )

    @functools.cached_property
    def law(self) -> NumberOfRuns:
        """The law of the number of runs."""
        return law_of(self.num_runs, self.shape)

    @property
    def name(self) -> str:
        """Name of the mechanism, for messages."""
        return "the best of several runs"

    @property
    def is_for_rows_alone(self) -> bool:
        """See `Theorem.is_for_rows_alone`: truncated users have another bound."""
        return True

    def check_plan(self, plan: DpSgdPlan) -> None:
        """Refuses slow samplers; see `check_plan`."""
        check_plan(plan)

    def epsilon(
        self, plan: DpSgdPlan, *, noise_multiplier: float, delta: float
    ) -> Bounds:
        """See `Theorem.epsilon`."""
        check_plan(plan)
        run = profiles.run(plan, noise_multiplier)
        return Bounds(upper=epsilon_of_best(run, self.law, delta), method=METHOD)

    def noise_multiplier(
        self, plan: DpSgdPlan, *, epsilon: float, delta: float
    ) -> NoiseBounds:
        """See `Theorem.noise_multiplier`."""
        check_plan(plan)
        found = noise_of_best(
            lambda noise: profiles.run(plan, noise),
            self.law,
            epsilon=epsilon,
            delta=delta,
            guess=1.0,
        )
        return NoiseBounds(sufficient=found, method=METHOD)

    def wording(self, bounds: Bounds) -> MethodWording:
        """Returns the words for a statement of ``bounds``."""
        del bounds
        return MethodWording(
            clipped="",
            released=(
                "; of a random number of such runs, as good as "
                f"{self.num_runs}, only the best is released"
            ),
            discretization=None,
            not_covered=(_SECRET,),
            earlier=_EARLIER,
        )


# -- what tuning costs -----------------------------------------------------------------

#: A search for noise starts at this multiple of the noise of one run.
_GUESS = 1.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What the best of a random number of runs costs.

    Attributes:
      noise_multiplier: Noise multiplier of each run.
      epsilon: Upper bound for the best.
      runs: Law of the number of runs.
    """

    noise_multiplier: float
    epsilon: float
    runs: NumberOfRuns

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        numbers = {
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "shape": self.runs.shape,
            "mean": self.runs.mean,
            "chance_of_top_tenth": self.runs.success(),
        }
        return {name: x if math.isfinite(x) else None for name, x in numbers.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Runs with one plan, of which candidates may differ in anything but the plan.

    Attributes:
      plan: The plan of every run.
      num_runs: N: a candidate of the best tenth is tried as surely as by N runs.
      delta: In (0, 1).
    """

    plan: DpSgdPlan
    num_runs: int
    delta: float

    def __post_init__(self) -> None:
        """Refuses a question whose answer takes too long.

        Raises:
          InputError: a number of runs out of range, or a sampler without a profile.
        """
        check_int("runs", self.num_runs, at_least=2, at_most=MOST_AS_GOOD)
        check_plan(self.plan)

    @functools.cached_property
    def _run(self) -> Callable[[float], Profile]:
        """Noise multiplier -> profile of one run; a search asks for some twice."""
        return functools.cache(functools.partial(profiles.run, self.plan))

    def at_noise(
        self, noise_multiplier: float, runs: NumberOfRuns | None = None
    ) -> Price:
        """Returns the price at given noise.

        Args:
          noise_multiplier: Noise standard deviation over the clip norm, above 0.
          runs: Law of the number of runs; by default the one with the least epsilon.
        """
        run = self._run(noise_multiplier)
        laws = self._laws() if runs is None else [runs]
        found = [(epsilon_of_best(run, law, self.delta), law) for law in laws]
        epsilon, law = min(found, key=lambda one: one[0])
        return Price(noise_multiplier=noise_multiplier, epsilon=epsilon, runs=law)

    def _laws(self) -> list[NumberOfRuns]:
        found = []
        for shape in SHAPES:
            with contextlib.suppress(InputError):  # it would take thousands of runs
                found.append(as_good_as(self.num_runs, shape))
        return found

    def for_epsilon(
        self, epsilon: float, say: Callable[[str], None] = lambda text: None
    ) -> Price:
        """Returns the price with an epsilon of at most the target.

        Args:
          epsilon: Target, above 0.
          say: Gets a line for each noise multiplier that is tried.

        Raises:
          InputError: no noise multiplier meets the target.
        """
        target: Any = {"epsilon": epsilon, "delta": self.delta}
        alone = accountant.noise_multiplier(self.plan, **target).guarantee
        guess = _GUESS * alone
        say(f"noise multiplier {guess:.4g}")
        runs = self.at_noise(guess).runs
        found = noise_of_best(
            self._run,
            runs,
            **target,
            guess=guess,
            say=say,
        )
        return self.at_noise(found, runs)
