"""How many bands correlated noise should have: a rule from public numbers alone.

Noise of k bands, ``W_t = Z_t - sum of c_j W_(t-j)``, cancels in part between steps
(`accounting.core.samplers.cyclic_poisson`).  But an example may then be used only every
k steps, which costs noise.  The rule weighs both by the noise of the iterates: the sum
over all steps so far of an exponential average of W, such as momentum takes.

No privacy claim depends on it.

Example:
  >>> best_bands(num_examples=540_000, expected_batch_size=1024, num_steps=527,
  ...            epsilon=1.0, delta=1e-6).bands
  16
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import signal

from accounting.core import accountant
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import CYCLIC_POISSON, POISSON, DpSgdPlan, together
from accounting.core.samplers.cyclic_poisson import coefficients

#: More bands gain next to nothing, and each costs the memory of the parameters.
_MOST_BANDS = 16
#: Fewer bands are preferred if their noise exceeds the least by at most this share.
_ENOUGH = 0.05
#: Steps for each band, at least: a run of fewer ends before the noise of its steps,
#: which is larger, has cancelled.  In 16 runs of 40 steps at epsilon 8, AUC rose by
#: 0.003 with 4 bands and fell by 0.001 and 0.005 with 8 and 16; in 122 steps it rose by
#: 0.005 with 16.
_STEPS_PER_BAND = 7
#: Decay of the average over steps, as in Adam's momentum.
_MOMENTUM = 0.9
#: Steps after which a step's noise has no part of that of the first.
_LONG = 5_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bands:
    """A number of bands and what it gains.

    Attributes:
      bands: k; 1 for independent noise.
      noise: Noise of the iterates, over that of independent noise at the same epsilon.
      noise_multiplier: Noise multiplier of noise of k bands.
      independent: Noise multiplier of independent noise.

    Example:
      >>> best_bands(num_examples=100, expected_batch_size=60, num_steps=20,
      ...            epsilon=1.0, delta=1e-5).in_words
      '1, by the rule: correlated noise would gain nothing'
    """

    bands: int
    noise: float
    noise_multiplier: float
    independent: float

    @property
    def in_words(self) -> str:
        """The number, and what it gains."""
        if self.bands == 1:
            return "1, by the rule: correlated noise would gain nothing"
        return (
            f"{self.bands}, by the rule: iterates have {self.noise:.2f} of the noise "
            "that independent noise gives them at the same epsilon"
        )

    @property
    def of_step(self) -> float:
        """Standard deviation of the noise of a late step, over the clip norm."""
        c = coefficients(self.bands)
        inverse = signal.lfilter([1.0], c, np.eye(1, _LONG)[0])
        return float(math.hypot(*c) * np.linalg.norm(inverse) * self.noise_multiplier)


def iterate_noise(bands: int, num_steps: int) -> float:
    """Returns the root mean square of the iterates' noise, for a noise multiplier of 1.

    Args:
      bands: k.
      num_steps: Number of steps.
    """
    c = coefficients(bands)
    impulse = np.zeros(num_steps)
    impulse[0] = np.linalg.norm(c) * (1 - _MOMENTUM)
    poles = np.polymul([1.0, -1.0], [1.0, -_MOMENTUM])
    response = signal.lfilter([1.0], poles, signal.lfilter([1.0], c, impulse))
    left = np.arange(num_steps, 0, -1)  # iterates that hold the response
    return math.sqrt(float(response**2 @ left) / num_steps)


def of_plan(plan: DpSgdPlan, noise_multiplier: float) -> Bands:
    """Returns the bands of a plan, compared with independent noise.

    Both are compared at the epsilon of the plan at a delta of ``0.1 / num_examples``,
    and without a cap.

    Args:
      plan: A plan with bands, for rows.
      noise_multiplier: Noise multiplier of a run of the plan, above 0.
    """
    assert plan.bands is not None
    delta = 0.1 / plan.num_examples
    banded = dataclasses.replace(
        plan, sampler=CYCLIC_POISSON, truncated_batch_size=None
    )
    epsilon = accountant.epsilon(
        banded, noise_multiplier=noise_multiplier, delta=delta
    ).guarantee
    plain = dataclasses.replace(banded, sampler=POISSON, bands=None)
    independent = accountant.noise_multiplier(
        plain, epsilon=epsilon, delta=delta
    ).guarantee
    of_bands, of_one = (iterate_noise(k, plan.num_steps) for k in (plan.bands, 1))
    return Bands(
        bands=plan.bands,
        noise=of_bands * noise_multiplier / (of_one * independent),
        noise_multiplier=noise_multiplier,
        independent=independent,
    )


def best_bands(
    *,
    num_examples: int,
    expected_batch_size: int,
    num_steps: int,
    epsilon: float,
    delta: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    of_runs: int = 1,
    most: int = _MOST_BANDS,
) -> Bands:
    """Returns the least power of two whose noise is within 5 % of the least.

    There are at least seven steps for each band.

    Args:
      num_examples: n, slots of the data set.
      expected_batch_size: b, expected examples per step.
      num_steps: T.
      epsilon: Target, above 0.
      delta: Target, in (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      of_runs: Number of runs of the plan that have the target together.
      most: Number of bands that is not exceeded.

    Raises:
      InputError: a value out of range.
    """
    largest = min(
        most,
        _MOST_BANDS,
        max(1, num_examples // expected_batch_size),
        max(1, num_steps // _STEPS_PER_BAND),
    )
    found = []
    for bands in (2**power for power in range(largest.bit_length())):
        plan = DpSgdPlan(
            sampler=POISSON if bands == 1 else CYCLIC_POISSON,
            num_examples=num_examples,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            bands=None if bands == 1 else bands,
        )
        multiplier = accountant.noise_multiplier(
            together(plan, of_runs),
            epsilon=epsilon,
            delta=delta,
            neighboring_relation=neighboring_relation,
        ).guarantee
        noise = iterate_noise(bands, num_steps) * multiplier
        found.append((noise, multiplier, bands))
    enough = min(found)[0] * (1 + _ENOUGH)
    noise, multiplier, bands = next(each for each in found if each[0] <= enough)
    of_one, independent, _ = found[0]
    return Bands(
        bands=bands,
        noise=noise / of_one,
        noise_multiplier=multiplier,
        independent=independent,
    )
