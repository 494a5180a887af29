"""What is known of a mechanism: its divergences, and what attacks can reach by them.

A *profile* gives upper bounds ``delta(s)`` and ``rho(s)``, at every s >= 0, on the
hockey-stick divergences ``H_(e^s)(P || Q)`` and ``H_(e^s)(Q || P)``, where P and Q are
the outputs on two neighbouring data sets.  No more is known of a selection or of a
shuffle.

*The trade-off function of f-DP.*  A membership test decides, from the released model
and all other examples, whether an example was used or a ghost replaced it.  Its false
positive rate a is the probability of "used" for a ghost; its true positive rate that of
"used" for the example.  If (epsilon, delta) holds in both directions, the true positive
rate is at most

    min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)).

The least of these over the privacy profile is 1 - f(a), with f the trade-off function.
No test is better; where delta is exact, some test is as good.  The membership
advantage, the true minus the false positive rate, is at most delta(0), the total
variation distance.

If a mechanism is mu-GDP, the true positive rate is at most ``Phi(Phi^-1(a) + mu)``.
This holds for deterministic and shuffled batches, where each use of an example is one
Gaussian mechanism.  For Poisson batches mu-GDP is a limit for many steps (Dong et al.
2022, Theorem 11) and no bound, so that no mu is stated.

`group_epsilon` bounds the epsilon of a group.  A run's profile is `accountant.delta` at
many epsilons, under the same relation and unit.

Every bound holds whichever points of a profile are asked for: each delta is an upper
bound, results are rounded up, and more points never give a larger bound.  Between the
points that it asks for, `bounds_on_grid` takes the line: H is convex in ``e^s``, so it
lies below.

References:
  Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 2.1; Dong, Roth and Su
  (2022), arXiv:1905.02383, Proposition 2.12, for f and Definition 2.6 for mu-GDP.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from accounting.core import accountant
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.core.numerics import log_ratio, settled_epsilon, threshold
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import check_float, check_int

if TYPE_CHECKING:  # a statement does without NumPy
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: Bounds of a costly profile are asked for at every so many grid points.
_STRIDE = 8
#: Bounds are no longer asked for where so many in a row did not fall.
_MOST_FLAT = 8
_MOST_POINTS = 1 << 17
_LEAST_EPSILON, _MOST_EPSILON = 1e-6, 1e4
#: Where searches for epsilon may start.
_STARTS = tuple(1.1**power for power in range(70))


@dataclasses.dataclass(frozen=True)
class Profile:
    """Upper bounds on the divergences between a mechanism's outputs on neighbours.

    Attributes:
      deltas: Epsilon at least 0 -> bounds on delta in both directions.
      is_costly: Whether an answer takes milliseconds, so that few are asked for.
    """

    deltas: Callable[[float], tuple[float, float]]
    is_costly: bool = False

    def epsilon(self, delta: float, relative: float = 1e-6) -> float:
        """Returns an epsilon at which ``delta`` is proven; infinite if none is.

        Args:
          delta: In (0, 1).
          relative: Relative error of the search.
        """

        @functools.cache
        def excess(epsilon: float) -> float:
            return log_ratio(max(self.deltas(epsilon)), delta)

        # The cost of a cap rises with epsilon: a search by leaps might miss its place.
        start = next((point for point in _STARTS if excess(point) <= 0.0), 1.0)
        return threshold(
            excess, start, relative=relative, least=_LEAST_EPSILON, most=_MOST_EPSILON
        )[1]


def bounds_on_grid(
    profile: Profile, spacing: float, least: float
) -> tuple[Array, Array]:
    """Returns both bounds at 0, h, 2 h and so on; they fall, and start at one value.

    Args:
      profile: The mechanism.
      spacing: h, above 0.
      least: A delta that is negligible: no further point is asked for.

    Returns:
      Two arrays of shape (n,).
    """
    import numpy as np

    stride = _STRIDE if profile.is_costly else 1
    found: list[tuple[float, float]] = []
    flat = 0
    for place in range(0, _MOST_POINTS, stride):
        point = profile.deltas(place * spacing)
        if found:
            # What holds at a smaller epsilon holds at a larger one.
            point = min(point[0], found[-1][0]), min(point[1], found[-1][1])
            # A bound of 1 is not flat: it says nothing yet.
            flat = flat + 1 if point == found[-1] and max(point) < 1.0 else 0
        found.append(point)
        if max(point) <= least or flat >= _MOST_FLAT:
            break
    both = np.minimum(np.array(found), 1.0)
    both[0] = both[0].min()  # the total variation, in either direction
    # Divergences are convex in e^s: between two points they are below the line.
    asked = np.exp(spacing * stride * np.arange(len(both)))
    ratios = np.exp(spacing * np.arange(stride * (len(both) - 1) + 1))
    forward, backward = (np.interp(ratios, asked, one) for one in both.T)
    return forward, backward


def gaussian(noise_multiplier: float) -> Profile:
    """Returns the profile of one Gaussian release.

    Args:
      noise_multiplier: Noise standard deviation over the L2 sensitivity.
    """
    from accounting.core.pld.dominating_pairs import gaussian_delta

    accountant.check_noise_multiplier(noise_multiplier)

    return Profile(lambda epsilon: (gaussian_delta(noise_multiplier, epsilon),) * 2)


def run(
    plan: DpSgdPlan,
    noise_multiplier: float,
    *,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Profile:
    """Returns the profile of a training run; arguments as for `accountant.delta`.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the profile is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    noise = accountant.check_noise_multiplier(noise_multiplier)
    sampler = brought(plan.sampler, neighboring_relation, max_examples_per_user)
    if sampler.profile is not None:
        # Laws of a selection ask for the same epsilons.
        return Profile(functools.cache(sampler.profile(plan, noise)))

    def deltas(epsilon: float) -> tuple[float, float]:
        found = sampler.delta(plan, noise, epsilon).guarantee
        return found, found

    return Profile(deltas, is_costly=not sampler.closed_form)


def group_epsilon(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    group_size: int,
    max_examples_per_user: int = 1,
) -> float:
    """Returns an epsilon for data sets that differ by several zero-outs.

    They differ, for instance, in an example and its replacement, which are a group of
    two, or in many examples of a user.  By group privacy, if the plan is (e, d)-private
    for one, it is ``(k e, d (e^(k e) - 1) / (e^e - 1))``-private for k.  The result is
    infinite if no e is proven.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: Delta of the claim for the group, in (0, 1).
      group_size: k, at least 1.
      max_examples_per_user: Largest number of examples of each member of the group;
        above 1 the members are users, as for `accountant.epsilon`.

    Raises:
      InputError: a value out of range.
    """
    check_int("group_size", group_size, at_least=1)
    accountant.check_delta(delta)

    def needed(epsilon: float) -> float:
        log_share = -math.log(group_size)
        if epsilon > 0.0:
            log_share = _log_expm1(epsilon) - _log_expm1(group_size * epsilon)
        if math.log(delta) + log_share < -680.0:
            return math.inf
        return accountant.epsilon(
            plan,
            noise_multiplier=noise_multiplier,
            delta=delta * math.exp(log_share) if group_size > 1 else delta,
            max_examples_per_user=max_examples_per_user,
        ).guarantee

    if group_size == 1:
        return needed(0.0)
    return group_size * settled_epsilon(needed, margin=1e-5, most_tries=60)


def _log_expm1(value: float) -> float:
    """Returns ``ln(e^value - 1)``."""
    return value + math.log(-math.expm1(-value))


# -- what a test of membership can reach -----------------------------------------------

#: False positive rates in statements and reports.
RATES = (0.001, 0.01, 0.1)
#: False positive rates of a curve, of two digits: what is printed is what is bounded.
_POWERS = (float(f"{10 ** (-power / 4):.1e}") for power in range(24, 0, -1))
CURVE_RATES = (0.0, *_POWERS, 0.75, 1.0)
#: Bound on the relative rounding error of the formulas below.
_ROUNDING = 1e-12


def _up(value: float) -> float:
    return min(1.0, value * (1 + _ROUNDING))


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Upper bounds on every membership test.

    Attributes:
      points: Pairs (epsilon, delta), each proven in both directions.
      mu: The mechanism is mu-GDP with this mu; None if none is known.
      methods: The theorems behind ``points``.
    """

    points: tuple[tuple[float, float], ...]
    mu: float | None = None
    methods: tuple[str, ...] = ()

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Returns an upper bound on the true positive rate.

        Args:
          false_positive_rate: In [0, 1].

        Raises:
          InputError: a rate outside [0, 1].
        """
        rate = check_float(
            "false_positive_rate", false_positive_rate, at_least=0.0, at_most=1.0
        )
        bounds = [1.0, *(_most(rate, *point) for point in self.points)]
        if self.mu is not None and 0.0 < rate < 1.0:
            bounds.append(_normal_cdf(NormalDist().inv_cdf(rate) + self.mu))
        return _up(min(bounds))

    @property
    def advantage(self) -> float:
        """Upper bound on the true minus the false positive rate of any test."""
        bounds = [1.0]
        for epsilon, delta in self.points:
            # The largest difference is where both terms of the minimum are equal.
            share = math.tanh(epsilon / 2)
            bounds.append(share + delta * (1 - share))
        if self.mu is not None:
            bounds.append(math.erf(self.mu / math.sqrt(8)))
        return _up(min(bounds))

    def to_json(self, rates: Iterable[float] = RATES) -> dict[str, Any]:
        """Returns a JSON-serialisable dict.

        Args:
          rates: False positive rates, each in [0, 1].
        """
        return {
            "membership_advantage_at_most": self.advantage,
            "mu": self.mu,
            "tests": [
                {
                    "false_positive_rate": rate,
                    "true_positive_rate_at_most": self.true_positive_rate(rate),
                }
                for rate in rates
            ],
        }

    def to_text(self, unit: str = "an example was", *, replaced: bool = False) -> str:
        """Returns the bounds in words, as part of a sentence.

        Args:
          unit: The privacy unit with its verb, such as "an example was".
          replaced: Whether the relation is replace-one: the test tells one example from
            another instead of from a ghost.
        """
        asked = f"whether {unit} used"
        wrong, right = "of those that were not", "of those that were"
        if replaced:
            asked = "which of two examples was used"
            wrong, right = "of the second", "of the first"
        first, second = (
            (percent_up(rate), percent_up(self.true_positive_rate(rate)))
            for rate in (0.01, 0.001)
        )
        return (
            f"no test that tells from the model, and from all other examples, {asked} "
            f"does better than this: if it says so of {first[0]} {wrong}, it says so "
            f"of at most {first[1]} {right}; if of {second[0]}, of at most "
            f"{second[1]}; "
            f"the two rates differ by at most {percent_up(self.advantage)} in any test "
            "(membership advantage; guessing has 0 %)"
        )


def percent_up(rate: float) -> str:
    """Returns a rate in percent, rounded up to one decimal, or two below 1 %.

    Example:
      >>> percent_up(0.27183), percent_up(0.001), percent_up(0.0027183)
      ('27.2 %', '0.1 %', '0.28 %')
    """
    digits = 1 if rate >= 0.01 else 2
    # The factor keeps a rounding error of 0.01 from being rounded up to 0.02.
    value = math.ceil(rate * 100 * 10**digits * (1 - 1e-11)) / 10**digits
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") + " %"


def _most(rate: float, epsilon: float, delta: float) -> float:
    factor = math.exp(min(epsilon, 700.0))
    # The second term of the module docstring, written without cancellation.
    return min(factor * rate + delta, (delta + rate) / factor - math.expm1(-epsilon))


def trade_off(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    rates: tuple[float, ...] = CURVE_RATES,
    **unit: Any,
) -> TradeOff:
    """Returns the bounds of a plan.  Takes some seconds for ``CURVE_RATES``.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      rates: False positive rates at which the bounds should be tight.
      **unit: Relation and privacy unit, as for `accountant.epsilon`.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    asked = {"noise_multiplier": noise_multiplier, **unit}
    epsilon = accountant.epsilon(plan, delta=1e-5, **asked).guarantee
    return _of_rates(plan, claim=(epsilon, 1e-5), rates=rates, tries=1, **asked)


def trade_off_of_claim(
    plan: DpSgdPlan, *, epsilon: float, delta: float, **asked: Any
) -> TradeOff:
    """Returns the bounds at ``RATES``, from few points of the privacy profile.

    Args:
      plan: How batches are made.
      epsilon: Proven at ``delta``.
      delta: In (0, 1).
      **asked: Noise, relation and privacy unit, as for `accountant.epsilon`.

    Raises:
      InputError: a relation that is not accounted for.
    """
    return _of_rates(plan, claim=(epsilon, delta), rates=RATES, tries=2, **asked)


@functools.lru_cache
def _of_rates(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    claim: tuple[float, float],
    rates: tuple[float, ...],
    tries: int,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> TradeOff:
    sampler = brought(plan.sampler, neighboring_relation, max_examples_per_user)
    mu = sampler.gaussian_dp and sampler.gaussian_dp(plan, noise_multiplier)
    epsilon = 0.0
    found = {epsilon: sampler.delta(plan, noise_multiplier, epsilon)}
    for rate in sorted((one for one in rates if 0.0 < one < 1.0), reverse=True):
        for _ in range(tries):
            reached = found[epsilon].guarantee
            if 0.0 < reached < 1.0:
                epsilon = _best_epsilon(rate, _gaussian_mu(epsilon, reached))
                found[epsilon] = sampler.delta(plan, noise_multiplier, epsilon)
    points = sorted((epsilon, each.guarantee) for epsilon, each in found.items())
    methods = dict.fromkeys(each.method for each in found.values())
    return TradeOff((claim, *points), mu, tuple(methods))


def _best_epsilon(rate: float, mu: float) -> float:
    """Returns the epsilon with the best bound at ``rate`` if a mechanism is mu-GDP.

    It is the slope of the trade-off function there.  The mu that fits a profile best
    changes slowly along it, so each rate begins with the mu of the rate before.
    """
    return abs(mu * NormalDist().inv_cdf(rate) + mu**2 / 2)


def _normal_cdf(value: float) -> float:
    # Accurate in the lower tail, where `NormalDist.cdf` need not be.
    return math.erfc(-value / math.sqrt(2)) / 2


def _gaussian_mu(epsilon: float, delta: float) -> float:
    """Returns about the mu of a Gaussian mechanism that is (epsilon, delta)-private."""
    factor = math.exp(min(epsilon, 700.0))

    def excess(noise: float) -> float:
        if noise == 0.0:
            return 1.0
        half, shift = 1 / (2 * noise), epsilon * noise
        return _normal_cdf(half - shift) - factor * _normal_cdf(-half - shift) - delta

    return 1 / threshold(excess, 1.0, relative=1e-9)[1]
