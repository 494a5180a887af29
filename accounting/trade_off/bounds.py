"""What a test of membership can achieve at most: f-DP.

A test decides, from the released model and all other examples, whether an example was
used or a ghost stood in its place.  Its false positive rate a is the probability of
"used" for a ghost; its true positive rate that of "used" for the example.  If (epsilon,
delta) holds in both directions, the latter is at most

    min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)),

and the least over the privacy profile is 1 - f(a), with f the trade-off function: no
test is better, and one is as good where delta is exact.  The true less the false
positive rate, the membership advantage, is at most delta(0), the total variation.

Where a mechanism is mu-GDP, the true positive rate is at most ``Phi(Phi^-1(a) + mu)``.
That holds where each use of an example is one Gaussian mechanism, as it is for
deterministic and shuffled batches.  For Poisson batches it is a limit of many steps
(Dong et al. 2022, Theorem 11), not a bound: none is stated.

Formal guarantees:
  - every rate and advantage is an upper bound, whichever points of the profile are
    taken: each delta is an upper bound, and results are rounded up.
  - more points never give a larger bound.

References:
  Kairouz, Oh and Viswanath (2015), arXiv:1311.0776, Theorem 2.1; Dong, Roth and Su
  (2022), arXiv:1905.02383, Proposition 2.12, for f and Definition 2.6 for mu-GDP.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Any

from accounting import accountant
from accounting.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.plan import DpSgdPlan
from accounting.validation import check_float

#: False positive rates that statements and reports name.
RATES = (0.001, 0.01, 0.1)
#: Those of a curve.
CURVE_RATES = (0.0, *(10 ** (-power / 4) for power in range(24, 0, -1)), 0.75, 1.0)
#: Relative, of the roundings below.
_ROUNDING = 1e-12


def _up(value: float) -> float:
    return min(1.0, value * (1 + _ROUNDING))


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Bounds on every test of membership.

    Attributes:
      points: Pairs (epsilon, delta), each proven in both directions.
      mu: The mechanism is mu-GDP; None if that is not known.
    """

    points: tuple[tuple[float, float], ...]
    mu: float | None = None

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Returns an upper bound on the true positive rate.

        Args:
          false_positive_rate: In [0, 1].

        Raises:
          InputError: it is not.
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
        """Upper bound on the true less the false positive rate, at any of them."""
        bounds = [1.0]
        for epsilon, delta in self.points:
            # Where both bounds of a point are equal.
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
        """Returns the bounds in words, half a sentence.

        Args:
          unit: Whose use is hidden, with its verb.
          replaced: Whether one stands against another, not against a ghost.
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
    """Returns a rate in percent, rounded up, with a decimal or, if small, two.

    Example:
      >>> percent_up(0.27183), percent_up(0.001), percent_up(0.0027183)
      ('27.2 %', '0.1 %', '0.28 %')
    """
    digits = 1 if rate >= 0.01 else 2
    # What is a hundredth but for its last bits is not rounded to the next.
    value = math.ceil(rate * 100 * 10**digits * (1 - 1e-11)) / 10**digits
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") + " %"


def _most(rate: float, epsilon: float, delta: float) -> float:
    factor = math.exp(min(epsilon, 700.0))
    # The second of the module docstring, without a difference of like numbers.
    return min(factor * rate + delta, (delta + rate) / factor - math.expm1(-epsilon))


def trade_off(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    rates: tuple[float, ...] = CURVE_RATES,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> TradeOff:
    """Returns the bounds of a plan; for a curve it takes some seconds.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      rates: False positive rates at which they are to be close.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 a test is of all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    asked = neighboring_relation, max_examples_per_user
    claim = accountant.epsilon(
        plan,
        noise_multiplier=noise_multiplier,
        delta=1e-5,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    ).guarantee
    return _of_rates(plan, noise_multiplier, *asked, (claim, 1e-5), rates)


def of_claim(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> TradeOff:
    """Returns the bounds at ``RATES``, from few points of the privacy profile.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: Proven at ``delta``.
      delta: In (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 a test is of all examples of a user.

    Raises:
      InputError: a relation that is not accounted for.
    """
    asked = neighboring_relation, max_examples_per_user
    return _of_rates(plan, noise_multiplier, *asked, (epsilon, delta), RATES)


@functools.lru_cache
def _of_rates(
    plan: DpSgdPlan,
    noise_multiplier: float,
    neighboring_relation: str,
    max_examples_per_user: int,
    claim: tuple[float, float],
    rates: tuple[float, ...],
) -> TradeOff:
    sampler = brought(plan.sampler, neighboring_relation, max_examples_per_user)
    mu = sampler.gaussian_dp and sampler.gaussian_dp(plan, noise_multiplier)
    epsilons = [0.0, *_epsilons_for(claim, rates)]
    found = {
        epsilon: sampler.delta(plan, noise_multiplier, epsilon).guarantee
        for epsilon in epsilons
    }
    return TradeOff((claim, *sorted(found.items())), mu)


def _epsilons_for(claim: tuple[float, float], rates: Iterable[float]) -> list[float]:
    """Returns the epsilons that bound tests at ``rates`` best if a profile is Gaussian.

    A choice of points: any are bounds.
    """
    if not math.isfinite(claim[0]):
        return []
    mu = _gaussian_mu(*claim)
    inner = [-NormalDist().inv_cdf(rate) for rate in rates if 0.0 < rate < 1.0]
    # The slope of the trade-off function at each rate.
    return [abs(mu * normal - mu**2 / 2) for normal in inner]


def _normal_cdf(value: float) -> float:
    # Accurate in the lower tail, as that of `NormalDist` need not be.
    return math.erfc(-value / math.sqrt(2)) / 2


def _gaussian_mu(epsilon: float, delta: float) -> float:
    """Returns about the mu of a Gaussian mechanism that is (epsilon, delta)-private."""
    low, high = 1e-9, 1e3
    for _ in range(60):
        mu = math.sqrt(low * high)
        lower = _normal_cdf(-epsilon / mu - mu / 2)
        found = _normal_cdf(mu / 2 - epsilon / mu)
        found -= math.exp(min(epsilon, 700.0)) * lower
        low, high = (mu, high) if found < delta else (low, mu)
    return low
