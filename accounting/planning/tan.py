"""The total amount of noise (TAN): cheap configurations that simulate a costly one.

At large noise the privacy of DP-SGD depends only on ``eta = q sqrt(T/2) / s``, the
inverse of the total amount of noise.  Small batches with proportionally less noise keep
eta, the number of steps and the noise of a mean gradient.  They train alike at a
fraction of the cost, which makes a search over hyper-parameters affordable.

Formal guarantees:
  - ``Configuration.simulated`` keeps num_examples, num_steps, noise_multiplier over
    expected_batch_size, and therefore eta.
  - A simulated batch size is at least 1 and smaller than that of the reference.

Not a guarantee of privacy: ``TanEstimate`` approximates Renyi accounting at large noise
and is no bound, and a simulated configuration has an epsilon of hundreds and more.
Ask `accounting.core.accountant` for either.

References:
  Sander, Stock and Sablayrolles (2023), arXiv:2210.03403: Equation 4 for the closed
  form, Section 4 for the simulation.
"""

from __future__ import annotations

import dataclasses
import math

from accounting.core import accountant, sampler_registry
from accounting.core.plan import DpSgdPlan, steps_and_epochs
from accounting.core.validation import InputError, check_choice, check_float, check_int
from accounting.planning.comparison import Question

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
      >>> reference = Configuration(plan=plan, noise_multiplier=2.5)
      >>> small = reference.simulated(128, epsilon=8, delta=8e-7)
      >>> small.noise_multiplier
      0.01953125
      >>> round(small.eta, 4) == round(reference.eta, 4) == 0.9706
      True
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

    def simulated(
        self, batch_size: int, *, epsilon: float, delta: float
    ) -> Configuration:
        """Returns the configuration of small batches with the same total noise.

        Args:
          batch_size: Expected examples per step.
          epsilon: Target epsilon; truncated batches get the least cap of negligible
            cost for the target, so that truncation is as rare as in the reference.
          delta: Target delta, in (0, 1).

        Raises:
          InputError: ``batch_size`` is not smaller than in the reference.
        """
        large = self.plan.expected_batch_size
        _check_smaller(batch_size, large)
        return Configuration(
            plan=_smaller(self.plan, batch_size, epsilon, delta),
            noise_multiplier=self.noise_multiplier * batch_size / large,
        )


def _smaller(
    plan: DpSgdPlan, batch_size: int, epsilon: float, delta: float
) -> DpSgdPlan:
    num_steps, num_epochs = steps_and_epochs(
        plan.num_examples, batch_size, epochs=None, num_steps=plan.num_steps
    )
    question = Question(
        num_examples=plan.num_examples,
        expected_batch_size=batch_size,
        num_steps=num_steps,
        num_epochs=num_epochs,
        epsilon=epsilon,
        delta=delta,
    )
    return question.plan(plan.sampler)


def check_sizes(batch_sizes: tuple[int, ...], reference: int) -> None:
    """Refuses sizes from which a line cannot be extrapolated.

    Args:
      batch_sizes: Expected examples per step of the simulations.
      reference: Expected examples per step of the simulated run.

    Raises:
      InputError: fewer than two, one twice, or one that is not below ``reference``.
    """
    text = ",".join(map(str, batch_sizes))
    if len(set(batch_sizes)) != len(batch_sizes):
        raise InputError(f"Expected small_batch_sizes={text!r} to hold each size once.")
    if len(batch_sizes) < 2:
        raise InputError(
            f"Expected small_batch_sizes={text!r} to hold two sizes or more, as "
            "128,256,512: a line needs two points."
        )
    for size in batch_sizes:
        _check_smaller(size, reference)


def _check_smaller(batch_size: int, reference: int) -> None:
    check_int(
        "simulated batch size",
        batch_size,
        at_least=1,
        at_most=reference - 1,
        remedy="Give --small-batch-sizes below --batch-size.",
    )
