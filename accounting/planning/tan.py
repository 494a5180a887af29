"""The total amount of noise (TAN), and its closed form of epsilon.

At large noise the privacy of DP-SGD depends only on ``eta = q sqrt(T/2) / s``, the
inverse of the total amount of noise.  Small batches with proportionally less noise keep
eta, the number of steps and the noise of a mean gradient.  They train alike at a
fraction of the cost, which makes a search over hyper-parameters affordable.

Not a guarantee of privacy: ``TanEstimate`` approximates Renyi accounting at large noise
and is no bound.  Ask `accounting.core.accountant` for one.

References:
  Sander, Stock and Sablayrolles (2023), arXiv:2210.03403, Equation 4.
"""

from __future__ import annotations

import dataclasses
import math

from accounting.core import accountant, sampler_registry
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import check_choice, check_float

#: Below this noise multiplier epsilon is not a function of the total noise.
LEAST_NOISE = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanEstimate:
    """The closed form of TAN.  An estimate for tuning, never a guarantee.

    Attributes:
      epsilon: ``eta^2 + 2 eta sqrt(ln(1/delta))``.
      eta: Inverse of the total amount of noise, ``q sqrt(T/2) / s``.
      warning: Why the estimate must not be used, or None if it may.
    """

    epsilon: float
    eta: float
    warning: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """A plan and its noise.  All public.

    Attributes:
      plan: A plan of Poisson batches, truncated or not.
      noise_multiplier: Noise standard deviation over the clip norm; above 0.

    Raises:
      InputError: name, value, bound.

    Example:
      >>> plan = DpSgdPlan(sampler="poisson", num_examples=1_281_167,
      ...                  expected_batch_size=16384, num_steps=72_000)
      >>> round(Configuration(plan=plan, noise_multiplier=2.5).eta, 4)
      0.9706
    """

    plan: DpSgdPlan
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_choice("sampler", self.plan.sampler, sampler_registry.poisson_samplers())
        check_float("noise_multiplier", self.noise_multiplier, above=0)

    @property
    def eta(self) -> float:
        """Inverse of the total amount of noise."""
        rate = float(self.plan.sampling_probability)
        return rate * math.sqrt(self.plan.num_steps / 2) / self.noise_multiplier

    def estimate(self, *, delta: float) -> TanEstimate:
        """Returns the closed form, which ignores truncation."""
        accountant.check_delta(delta)
        eta, noise = self.eta, self.noise_multiplier
        warning = None
        if noise < LEAST_NOISE:
            warning = (
                f"noise_multiplier={noise:g} is below {LEAST_NOISE:g}: the true "
                "epsilon grows beyond this estimate, at 0.5 and below without bound."
            )
        value = eta**2 + 2 * eta * math.sqrt(-math.log(delta))
        return TanEstimate(epsilon=value, eta=eta, warning=warning)
