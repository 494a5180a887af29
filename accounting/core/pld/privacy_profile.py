"""The privacy profile of T independent losses, rounded up.

`Composition` composes a discrete loss.  `StepComposition` composes a mixture of
dominating pairs, which it discretises for each question, finely where delta depends on
it.

`Chernoff` bounds delta of a sum of losses for tiny deltas (`LEAST_TIGHT_DELTA`).  With
``M(r) = E[e^(r L)]`` and S the sum of T independent losses under P, for any r > 0

    delta(eps) = E[(1 - e^(eps - S))+] <= c(r) M(r)^T e^(-r eps),
    c(r) = max over y > 0 of (1 - e^-y) e^(-r y) = r^r / (1 + r)^(1 + r).

It is looser than `inversion` by a factor of some ten in delta, a few percent in
epsilon, and it has no term that is added: it is right at any delta.  Losses are split
between the same cells, and r is from the same list, whatever is asked: so the bound on
epsilon falls with delta, as the bound on delta does with epsilon.

References:
  Abadi et al. (2016), arXiv:1607.00133, for the moments of a sum; Canonne, Kamath and
  Steinke (2020), arXiv:2004.00010, Proposition 12, for c(r).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from accounting.core.numerics import LEAST_TIGHT_DELTA, inner, log_ratio, threshold
from accounting.core.pld import dominating_pairs, inversion
from accounting.core.pld.dominating_pairs import Atoms, Step
from accounting.core.pld.inversion import UNIT, Cost, Focus, LaplaceSum

#: Largest relative addition to delta: in an answer, in an early step of a search, and
#: in a comparison of directions.
FINE = 2e-5
COARSE = 1e-3
ROUGH = 0.1
#: Choices are repeated if they add more than this times the allowed addition.
_TOO_MUCH = 1.5
#: A sum for one epsilon serves another if the logarithms of their Chernoff bounds
#: differ by at most this.
_NEAR = 0.3
#: If not, the relative length of the interval in which epsilon is searched for, and the
#: least epsilon that is told from 0.
_SEARCHED = 1e-3
_LEAST_EPSILON = 1e-12
_MOST_TRIES = 8
#: Least epsilon with a sum of its own in `StepsProfile.shared_deltas`.
_LEAST_SHARED = 1e-4
#: If rare steps lose most, a first guess can be a thousand times too large, and each
#: sum reduces it by about a third.
_MOST_GUESSES = 64
#: If an approximation of ln delta is larger, Chernoff's bound is not needed.
_FEW = -36.0


class Composition:
    """The sum of T independent losses, tight at a chosen epsilon.

    Attributes:
      loss: Discrete loss of one step.  A subclass that overrides `_dominating` uses it
        for choices only.
      num_steps: T.
    """

    def __init__(self, loss: Atoms, num_steps: int) -> None:
        self.loss = loss
        self.num_steps = num_steps

    def _dominating(self, focus: Focus, cost: Cost, fineness: float) -> Atoms:
        """Returns a discrete loss that dominates the exact loss of one step.

        Args:
          focus: The question.
          cost: Known properties of the sum.
          fineness: Largest relative addition to delta.
        """
        return focus.loss

    def at(self, epsilon: float, fineness: float, enough: float = 0.0) -> LaplaceSum:
        """Returns a pessimistic sum that is tight at ``epsilon``.

        Args:
          epsilon: At least 0.
          fineness: Largest relative addition to delta.
          enough: A delta for which a looser sum suffices.
        """
        focus = inversion.focus(self.loss, self.num_steps, epsilon)
        dominating = functools.partial(self._dominating, focus)
        return inverted(focus, fineness, dominating, enough)

    def approximate_epsilon(self, delta: float) -> float:
        """Returns an approximation of epsilon at ``delta``."""
        return inversion.approximate_epsilon(self.loss, self.num_steps, delta)

    def _roughly(self, delta: float) -> float:
        """Returns a rough epsilon at ``delta``."""
        epsilon = self.approximate_epsilon(delta)
        for _ in range(_MOST_GUESSES):
            total = self.at(epsilon, ROUGH)
            found = total.epsilon(delta)
            if math.isinf(found):
                return epsilon
            if abs(found - epsilon) * total.contour.order <= _NEAR:
                break
            epsilon = found
        return found

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon at ``delta``."""
        return self.near(delta, FINE)[0].epsilon(delta)

    def near(self, delta: float, fineness: float) -> tuple[LaplaceSum, float]:
        """Returns a sum that is tight near epsilon at ``delta``, and where it is tight.

        Args:
          delta: In (0, 1).
          fineness: Largest relative addition to delta.
        """
        epsilon = self._roughly(delta)
        total = self.at(epsilon, fineness)
        nearest = epsilon - _NEAR / total.contour.order
        if nearest < 0 or total.delta(nearest) > delta:
            return total, epsilon

        # Delta hardly depends on epsilon, and what a rough sum adds to it decides.
        def excess(point: float) -> float:
            return log_ratio(self.at(point, fineness).delta(point), delta)

        guess = total.epsilon(delta)
        _, epsilon = threshold(excess, guess, relative=_SEARCHED, least=_LEAST_EPSILON)
        return self.at(epsilon, fineness), epsilon


class StepComposition(Composition):
    """The sum of the losses of T steps.

    Attributes:
      step: Mixture of dominating pairs.
    """

    def __init__(self, step: Step, num_steps: int) -> None:
        self.step = step
        self._x: list[NDArray[np.float64]] = []
        self._parts: list[Atoms] = []
        for weight, pair in step:
            x, masses = pair.sketch(*dominating_pairs.support(pair))
            self._x.append(x)
            self._parts.append(Atoms(weight * masses, pair.loss(x)))
        parts = [(1.0, part) for part in self._parts]
        super().__init__(dominating_pairs.mix(parts), num_steps)

    def _dominating(self, focus: Focus, cost: Cost, fineness: float) -> Atoms:
        flows = inversion.flows(focus, cost, fineness, self._parts)
        found = []
        for (weight, pair), x, part, flow in zip(
            self.step, self._x, self._parts, flows, strict=True
        ):
            edges = np.interp(np.linspace(0, flow[-1], int(flow[-1]) + 2), flow, x)
            first, last = focus.kept(part)
            ends = x[first], x[last]
            edges = np.union1d(np.clip(edges, *ends), np.array(ends))
            found.append((weight, dominating_pairs.spread(pair, edges, *focus.ends)))
        return dominating_pairs.mix(found)


def inverted(
    focus: Focus,
    fineness: float,
    dominating: Callable[[Cost, float], Atoms],
    enough: float = 0.0,
) -> LaplaceSum:
    """Returns the sum of the losses of all steps, tight at the epsilon of a question.

    Args:
      focus: The question.
      fineness: Largest relative addition to delta.
      dominating: (known properties of the sum, fineness) -> the loss of one step.
      enough: A delta for which a looser sum suffices.
    """
    cost = inversion.expected_cost(focus)
    for _ in range(_MOST_TRIES):
        loss = dominating(cost, fineness / 2)
        contour = inversion.contour(focus, cost, fineness / 2)
        total = inversion.invert(loss, focus.num_steps, contour)
        found = inversion.found_cost(total, focus.epsilon)
        if not found.exceeds(cost, _TOO_MUCH) or total.delta(focus.epsilon) <= enough:
            break
        cost = found.or_more(cost)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsProfile:
    """An upper bound on delta as a function of epsilon, over both directions.

    Attributes:
      directions: The step in each direction, as a public mixture of dominating pairs:
        example against ghost, and ghost against example.
      num_steps: T.
      fineness: Largest relative addition to delta: ``FINE`` or ``COARSE``.

    Below `LEAST_TIGHT_DELTA` the bounds are Chernoff's.
    """

    directions: tuple[Step, ...]
    num_steps: int
    fineness: float = FINE

    @functools.cached_property
    def _sums(self) -> tuple[StepComposition, ...]:
        return tuple(StepComposition(step, self.num_steps) for step in self.directions)

    @functools.cached_property
    def _chernoffs(self) -> tuple[Chernoff, ...]:
        return tuple(Chernoff(step, self.num_steps) for step in self.directions)

    def _tiny(self, place: int, epsilon: float) -> float | None:
        """Returns Chernoff's bound in one direction, if it is the one to take."""
        one = self._sums[place]
        if inversion.approximate_log_delta(one.loss, one.num_steps, epsilon) > _FEW:
            return None
        found = self._chernoffs[place].delta(epsilon)
        return found if found < LEAST_TIGHT_DELTA else None

    def _delta_of(self, place: int, epsilon: float) -> float:
        tiny = self._tiny(place, epsilon)
        if tiny is not None:
            return tiny
        found = self._sums[place].at(epsilon, self.fineness).delta(epsilon)
        # Where Chernoff's bound is larger: delta falls with epsilon.
        return max(found, LEAST_TIGHT_DELTA)

    def delta(self, epsilon: float) -> float:
        """Returns a delta >= 0 at which ``(epsilon, delta)`` is proven."""
        worst = 0.0
        for place, one in enumerate(self._sums):
            # A rough bound may show that this direction is the better one.
            small = worst < LEAST_TIGHT_DELTA
            if small or one.at(epsilon, ROUGH, worst).delta(epsilon) > worst:
                worst = max(worst, self._delta_of(place, epsilon))
        return worst

    def _worst_first(self, delta: float) -> list[StepComposition]:
        """Returns the directions, the one with the largest epsilon probably first."""
        return sorted(self._sums, key=lambda one: -one.approximate_epsilon(delta))

    @functools.cached_property
    def _shared(self) -> dict[int, tuple[LaplaceSum, ...]]:
        return {}

    def shared_deltas(self, epsilon: float) -> tuple[float, ...]:
        """Returns upper bounds on delta in each direction, for very many epsilons.

        A sum serves epsilons from its own to 1.4 times that.
        """
        place = math.floor(2 * math.log2(max(epsilon, _LEAST_SHARED)))
        if place not in self._shared:
            own = 2.0 ** (place / 2)
            self._shared[place] = tuple(
                one.at(own, self.fineness) for one in self._sums
            )
        found = (total.delta(epsilon) for total in self._shared[place])
        return tuple(max(delta, LEAST_TIGHT_DELTA) for delta in found)

    def sums_at(self, delta: float) -> tuple[LaplaceSum | Chernoff, ...]:
        """Returns the sums of losses in each direction, near epsilon at ``delta``.

        The worse direction comes first; the other is rough if that shows it is better.
        """
        if delta < LEAST_TIGHT_DELTA:
            return self._chernoffs
        sums = self._worst_first(delta)
        worst, epsilon = sums[0].near(delta, self.fineness)
        found: list[LaplaceSum | Chernoff] = [worst]
        for one in sums[1:]:
            total = one.at(epsilon, ROUGH, delta / 2)
            if total.delta(epsilon) > delta / 2:
                total, _ = one.near(delta, self.fineness)
            found.append(total)
        return tuple(found)

    def epsilon(self, delta: float) -> float:
        """Returns an epsilon >= 0 at which ``(epsilon, delta)`` is proven."""
        return epsilon_of(self.sums_at(delta), delta)


def epsilon_of(sums: tuple[LaplaceSum | Chernoff, ...], delta: float) -> float:
    """Returns the largest epsilon of several sums.

    Args:
      sums: Sums of losses, usually the worst first.
      delta: In (0, 1).
    """
    worst = sums[0].epsilon(delta)
    for total in sums[1:]:
        if math.isfinite(worst) and total.delta(worst) > delta:
            worst = max(worst, total.epsilon(delta))
    return worst


_ORDERS = np.geomspace(1e-3, 1e6, 400)
#: Width of a cell in noise standard deviations: with the four nodes of
#: `dominating_pairs`, even the density 37 of them from its mean is integrated with a
#: relative error far below that of rounding.
_WIDTH = 0.0125
#: More than the relative error of a mass, and of the sum of all.
_QUADRATURE = 1e-12


class Chernoff:
    """The bound for T steps.

    Attributes:
      step: Mixture of dominating pairs.
      num_steps: T.
    """

    def __init__(self, step: Step, num_steps: int) -> None:
        self.step = step
        self.num_steps = num_steps
        self._log_factors: dict[int, float] = {}

    @functools.cached_property
    def _loss(self) -> Atoms:
        """A discrete loss that dominates the exact loss of one step."""
        parts = []
        for weight, pair in self.step:
            low, high = dominating_pairs.support(pair)
            count = 2 + int((high - low) / (_WIDTH * pair.noise_multiplier))
            edges = np.linspace(low, high, count)
            loss = dominating_pairs.spread(pair, edges, -math.inf, math.inf)
            parts.append((weight, loss))
        return dominating_pairs.mix(parts)

    def _log_factor(self, place: int) -> float:
        """Returns ``ln(c(r) M(r)^T)`` of an order, rounded up."""
        if place not in self._log_factors:
            order = float(_ORDERS[place])
            weights, log_moment = self._loss.tilted(order)
            mean_size = inner(weights, np.abs(self._loss.losses))
            rounding = 4 * order * mean_size + 16 * abs(log_moment)
            log_moment += _QUADRATURE + UNIT * rounding
            log_share = order * math.log(order) - (order + 1) * math.log1p(order)
            self._log_factors[place] = self.num_steps * log_moment + log_share
        return self._log_factors[place]

    def _least(self, of_order: Callable[[float, float], float]) -> float:
        """Returns the least value over all orders.

        ``ln(c(r) M(r)^T)`` is convex in r, so values fall and then rise.

        Args:
          of_order: (r, ``ln(c(r) M(r)^T)``) -> value.
        """

        def value(place: int) -> float:
            return of_order(float(_ORDERS[place]), self._log_factor(place))

        places = range(len(_ORDERS) - 1)
        return value(
            bisect.bisect_left(places, True, key=lambda i: value(i + 1) >= value(i))
        )

    @property
    def _infinite(self) -> float:
        """The probability of infinite loss in any step, rounded up."""
        return min(1.0, self.num_steps * self._loss.infinite_mass * (1 + 1e-9))

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on delta at ``epsilon``."""
        exponent = self._least(lambda order, factor: factor - order * epsilon)
        return min(1.0, math.exp(min(exponent, 0.0)) + self._infinite)

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on epsilon at ``delta``; infinite if there is none."""
        left = delta - self._infinite
        if left <= 0.0:
            return math.inf
        log_left = math.log(left)
        found = self._least(lambda order, factor: (factor - log_left) / order)
        return max(0.0, found * (1 + 1e-12))
