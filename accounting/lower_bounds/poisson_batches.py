"""Lower bounds on delta and epsilon of Poisson and truncated Poisson batches.

They take a second, prove no privacy, and show how tight the guarantees are.

*Truncated batches*: of the data set whose other gradients are zero, where dropping
another row has no effect.  A step's sum is N(J, s^2), where J is the number of the
user's rows that are sampled and kept.  If i of them are sampled beside m other rows,
J = i, or a hypergeometric number if i + m > B.  Steps are independent.  The
probabilities of J > 0 are rounded down by one common factor, and improbable draws count
as keeping no row.  So J becomes stochastically smaller, which lowers both hockey-stick
divergences, by the theorem of `dominating_pairs`.

Example:
  >>> plan = DpSgdPlan(
  ...     sampler="poisson", num_examples=60_000, expected_batch_size=600,
  ...     num_steps=1000, num_epochs=10)
  >>> found = epsilon(plan, noise_multiplier=1.1, delta=1e-5)
  >>> round(found.lower, 2), round(found.guarantee, 2)
  (1.52, 1.52)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from accounting.core import accountant, sampler_registry
from accounting.core.intervals import Bounds, below
from accounting.core.neighboring_relation import REPLACE_ONE, REPLACE_SPECIAL
from accounting.core.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.core.samplers.poisson import OF_EXAMPLE, OF_REPLACED, of_user
from accounting.lower_bounds import merged_outcomes
from accounting.lower_bounds.merged_outcomes import Component, lower_epsilon

METHOD = "merged outcomes of the Poisson-subsampled Gaussian"
REPLACE_METHOD = "merged outcomes of the Poisson-subsampled pair of opposites"
USER_METHOD = "merged outcomes of the mixture of Gaussians for a user's rows"
#: Relative error of the probabilities, by which they are reduced.
_ROUNDING = 1e-9
#: Numbers of other rows beyond this many deviations count as keeping no row.
_DEVIATIONS = 12
#: So does a number of the user's own rows that is less probable than this.
_LEAST_CHANCE = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A lower bound on delta.

    Attributes:
      components: Plan -> the pair of one step.
      least_noise: Noise multiplier below which nothing is known.
      method: The theorem behind it.
    """

    components: Callable[[DpSgdPlan], tuple[Component, ...]]
    least_noise: float
    method: str

    def delta(self, plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> float:
        """Returns a lower bound on delta at ``epsilon``.

        Args:
          plan: Of the sampler that this is a bound of.
          noise_multiplier: Noise standard deviation over the clip norm, at least 0.
          epsilon: At least 0.
        """
        found = self.components(plan)
        if noise_multiplier == 0.0:
            # Participation is visible.
            never = plan.num_steps * math.log1p(-sum(one.upper for one in found))
            return -math.expm1(never) * (1 - 1e-9)
        if noise_multiplier < self.least_noise or not any(one.upper for one in found):
            return 0.0
        return merged_outcomes.lower_delta(
            found, noise_multiplier, plan.num_steps, epsilon
        )


def bound_of(
    sampler: str, neighboring_relation: str, max_examples_per_user: int
) -> LowerBound | None:
    """Returns the lower bound of a sampler's batches; None if it has none here.

    Args:
      sampler: Name of a registered sampler, which is accounted for under the relation.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the privacy unit is a user.
    """
    count = max_examples_per_user
    one, method = count == 1, METHOD if count == 1 else USER_METHOD
    of_batches = OF_EXAMPLE if one else of_user(count)
    components: Callable[[DpSgdPlan], tuple[Component, ...]]
    if sampler == TRUNCATED_POISSON:
        components = functools.partial(kept_rows, count=count)
        method += (
            " at the probability of being kept" if one else ", as many as are kept"
        )
    elif sampler != POISSON:
        return None
    elif neighboring_relation == REPLACE_ONE:
        components, method, of_batches = _replaced, REPLACE_METHOD, OF_REPLACED
    else:
        components = functools.partial(_rows, count=count)
    least_noise = of_batches.least_noise
    return LowerBound(components=components, least_noise=least_noise, method=method)


def _replaced(plan: DpSgdPlan) -> tuple[Component, ...]:
    return merged_outcomes.replaced(rate(plan))


def _rows(plan: DpSgdPlan, count: int) -> tuple[Component, ...]:
    return merged_outcomes.rows(rate(plan), count)


def rate(plan: DpSgdPlan) -> float:
    """Returns the sampling probability, rounded down, which is more private.

    The probabilities of keeping rows rise with it.
    """
    return math.nextafter(float(plan.sampling_probability), 0.0)


@functools.lru_cache(maxsize=8)
def kept_rows(plan: DpSgdPlan, count: int) -> tuple[Component, ...]:
    """Returns the pair of one step.

    Args:
      plan: A plan with a cap B.
      count: k, number of rows of the user; at most ``plan.num_examples``.
    """
    size = plan.truncated_batch_size
    assert size is not None
    probability = rate(plan)
    others = max(plan.num_examples - count, 0)
    mean = others * probability
    reach = _DEVIATIONS * math.sqrt(mean) + _DEVIATIONS**2
    sampled = np.arange(max(0, int(mean - reach)), min(others, int(mean + reach)) + 1)
    chances = stats.binom.pmf(sampled, others, probability)
    kept = np.zeros(count + 1)
    for own in range(1, count + 1):
        own_chance = float(stats.binom.pmf(own, count, probability))
        if own_chance < _LEAST_CHANCE:
            continue
        fits = sampled + own <= size
        kept[own] += own_chance * float(chances[fits].sum())
        for number in range(1, own + 1):
            share = stats.hypergeom.pmf(number, sampled[~fits] + own, own, size)
            kept[number] += own_chance * float(chances[~fits] @ share)
    return tuple(
        Component(float(number), float(kept[number]) * (1 - _ROUNDING), 0.0)
        for number in range(1, count + 1)
    )


def epsilon(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Bounds:
    """Returns the accountant's bounds on epsilon, with a lower one if it has none.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: as of the accountant, or a sampler without lower bounds.
    """
    asked = neighboring_relation, max_examples_per_user
    found = accountant.epsilon(
        plan,
        noise_multiplier=noise_multiplier,
        delta=delta,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )
    if found.lower is not None:
        return found
    bound = _known(plan.sampler, *asked)
    lower = lower_epsilon(
        lambda point: bound.delta(plan, noise_multiplier, point),
        found.guarantee,
        delta,
    )
    return dataclasses.replace(found, lower=lower, lower_method=bound.method)


def delta(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    epsilon: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Bounds:
    """Returns the accountant's bounds on delta; otherwise as `epsilon`.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: At least 0.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: as of the accountant, or a sampler without lower bounds.
    """
    asked = neighboring_relation, max_examples_per_user
    found = accountant.delta(
        plan,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )
    if found.lower is not None:
        return found
    bound = _known(plan.sampler, *asked)
    lower = below(bound.delta(plan, noise_multiplier, epsilon), found.guarantee)
    return dataclasses.replace(found, lower=lower, lower_method=bound.method)


def _known(sampler: str, relation: str, max_examples_per_user: int) -> LowerBound:
    found = bound_of(sampler, relation, max_examples_per_user)
    if found is None:
        sampler_registry.refuse(
            sampler, "a lower bound", "Ask the accountant for the upper one."
        )
    return found
