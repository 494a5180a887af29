"""Poisson subsampling: each example is in each step independently with probability q.

Under the zero-out relation (an example is replaced by a ghost that contributes zero),
T steps are tightly dominated, in each direction, by the T-fold composition of the pair
``((1-q) N(0, s^2) + q N(1, s^2), N(0, s^2))`` or its reverse.

Under replace-one the tightly dominating pair of a step is
``P = (1-q) N(0, s^2) + q N(1, s^2)`` against ``Q = (1-q) N(0, s^2) + q N(-1, s^2)``,
which equals its reverse.  Proof: let a gradient u of norm a <= 1 be replaced by v of
norm b <= 1.  For k >= 1 and ``c = (1-q)(k-1)``, the hockey-stick divergence is
``E[(q X - k q Y - c)+]``, in densities relative to N(0, s^2 I).  X and Y are
exponential martingales of a Gaussian with variances a^2/s^2 and b^2/s^2 and covariance
<u, v>/s^2: the divergence is the price of a spread option.  Its payoff g is convex with
g_XY <= 0.  Changes dA and dB of the variances and dC of the covariance change the price
by ``E[X^2 g_XX dA + Y^2 g_YY dB] / 2 + E[X Y g_XY dC]``.  So it increases as <u, v>
decreases to -ab, and then as a and b increase to 1.  For k < 1 exchange P and Q.

The guarantees are those of `composed_steps`.

References:
  Zhu, Dong and Wang (2022), arXiv:2106.08567; Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

import dataclasses
import functools

from accounting.core import neighboring_relation, sampler_registry
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    REPLACE_SPECIAL,
)
from accounting.core.pld import dominating_pairs
from accounting.core.pld.dominating_pairs import Step
from accounting.core.samplers.composed_steps import ComposedSteps, probability

METHOD = "Poisson-subsampled Gaussian, numerical composition (Zhu et al. 2022)"
REPLACE_METHOD = "Poisson-subsampled Gaussian with opposite gradients, composed"
USER_METHOD = "mixture of Gaussians for a user's rows (Choquette-Choo et al. 2024)"
DISCRETIZATION = (
    "connect-the-dots grid chosen per question, sums by a tilted Fourier transform"
)


def steps(sampling_probability: float, noise_multiplier: float) -> tuple[Step, Step]:
    """Returns one step in both directions, as mixtures with a single component.

    Args:
      sampling_probability: q, in (0, 1].
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    return (
        [(1.0, dominating_pairs.remove_pair(sampling_probability, noise_multiplier))],
        [(1.0, dominating_pairs.add_pair(sampling_probability, noise_multiplier))],
    )


def replacing_steps(
    sampling_probability: float, noise_multiplier: float
) -> tuple[Step, ...]:
    """Returns one step under replace-one, where both directions have the same pair.

    Args:
      sampling_probability: q, in (0, 1].
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
    """
    pair = dominating_pairs.replace_pair(sampling_probability, noise_multiplier)
    return ([(1.0, pair)],)


def of_user(count: int) -> ComposedSteps:
    """Returns the bounds for a user with ``count`` examples."""
    return ComposedSteps(
        steps=functools.partial(dominating_pairs.steps, count),
        sensitivity=count,
        num_rows=count,
        method=USER_METHOD,
        # At 0.05, one row in one step costs an epsilon of 200.
        least_noise=min(0.01 * count, 0.05),
    )


#: The bounds for one example, under zero-out and under add-or-remove.
OF_EXAMPLE = ComposedSteps(
    steps=steps,
    sensitivity=1,
    num_rows=1,
    method=METHOD,
    least_noise=0.005,
)
#: The bounds for an example that is replaced by its opposite.
OF_REPLACED = ComposedSteps(
    steps=replacing_steps,
    sensitivity=2,
    num_rows=1,
    method=REPLACE_METHOD,
    least_noise=0.02,
    symmetric=True,
)
WORDING = sampler_registry.Wording(
    sampling="Poisson subsampling, each example in each step independently",
    discretization=DISCRETIZATION,
)


def _sampler(found: ComposedSteps) -> sampler_registry.Sampler:
    return sampler_registry.Sampler(
        epsilon=found.epsilon,
        delta=found.delta,
        noise_multiplier=found.noise_multiplier,
        closed_form=False,
        relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE, REPLACE_ONE),
        delta_by_direction=found.delta_by_direction,
        profile=found.profile,
        poisson_rate=probability,
        wording=WORDING,
    )


def of_users(count: int) -> sampler_registry.Sampler:
    """Returns the `Sampler` for users with at most ``count`` examples."""
    return _sampler(of_user(count))


_ADDED_WORDING = dataclasses.replace(
    WORDING,
    num_examples="num_examples is an approximation that is public and "
    "independent of the data: it fixes the sampling probability alone",
)


def _of_added_users(count: int) -> sampler_registry.Sampler:
    return dataclasses.replace(of_users(count), wording=_ADDED_WORDING)


_ZERO_OUT = _sampler(OF_EXAMPLE)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    users=of_users,
    under={
        # The same pairs, as long as q is the same for both data sets.
        ADD_OR_REMOVE_ONE: dataclasses.replace(
            _ZERO_OUT, users=_of_added_users, wording=_ADDED_WORDING
        ),
        REPLACE_ONE: dataclasses.replace(
            _sampler(OF_REPLACED),
            wording=dataclasses.replace(
                WORDING, num_examples=neighboring_relation.SAME_NUMBER
            ),
        ),
    },
)
