"""Lower bounds on delta of Poisson and truncated Poisson batches.  They take a second.

That of truncated batches is of the data set whose other gradients are zero, where
evicting another example has no effect: see `kept_rows`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from accounting.core.neighboring_relation import REPLACE_ONE
from accounting.core.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.core.samplers.poisson import OF_EXAMPLE, OF_REPLACED, of_user
from accounting.lower_bounds import kept_rows, merged_outcomes
from accounting.lower_bounds.merged_outcomes import Component

METHOD = "merged outcomes of the Poisson-subsampled Gaussian"
REPLACE_METHOD = "merged outcomes of the Poisson-subsampled pair of opposites"
USER_METHOD = "merged outcomes of the mixture of Gaussians for a user's rows"


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
        components = functools.partial(kept_rows.components, count=count)
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
    return merged_outcomes.replaced(kept_rows.rate(plan))


def _rows(plan: DpSgdPlan, count: int) -> tuple[Component, ...]:
    return merged_outcomes.rows(kept_rows.rate(plan), count)
