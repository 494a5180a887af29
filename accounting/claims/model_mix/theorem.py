"""ModelMix: privacy amplification by hidden random mixtures of successive iterates.

One step releases, coordinate by coordinate,

    w_k = alpha w_{k-1} + (1 - alpha) w_{k-2} - (eta / b) (sum of gradients + noise)

where w_{k-1} and w_{k-2} were first moved at least tau apart, alpha is uniform in
[0, 1] and hidden, and only iterates are released.  In units of ``eta C / b``, and given
all earlier iterates, w_k is ``N(0, sigma^2) * U`` around a point that one example
moves by a vector of L2 norm at most 1 and, where coordinates are clipped to
``C / sqrt(p)``, of coordinates at most ``1 / sqrt(p)``; each uniform has a width of at
least ``W = (tau / eta) b / C``.  So the Renyi divergence of order k of T steps is

    at most  T / (k - 1) * ln sum_j C(k, j) (1 - q)^(k-j) q^j A_j^p      (Cor. 4.1)

with A_j = A_j(1 / (sqrt(p) sigma), W / sigma) of `uniform_gaussian`.

Formal guarantees:
  - ``epsilon(...).upper`` and ``delta(...).upper`` are bounds for both directions of
    the zero-out relation; quadrature and rounding err on the private side.
  - They never exceed the bounds without mixing.  Those hold as well: given the earlier
    iterates, w_k is a randomised function of the noisy gradient that DP-SGD releases.
  - They never rise with the width, the noise, or p, nor fall with the number of steps
    (up to the margins for rounding).
  - Width 0 gives the Renyi divergences of the Poisson-subsampled Gaussian.

The following is proven here, since the paper asserts it or leaves it out:

  - Zero-out.  A ghost contributes zero and is sampled with the same q, so the pair is
    that of the paper's add-or-remove relation with q fixed.
  - Of all gradients within the clip bounds, one of p equal coordinates has the largest
    A_j, up to a factor of ``1 + SLACK`` in ln A_j.  `uniform_gaussian` proves this
    for the parameters of each question.  Where its cover fails, the bounds without
    mixing are returned.
  - Wider is more private, also where widths differ between coordinates: see
    `accounting.claims.model_mix.uniform_gaussian`.
  - Removing is the worse direction.  Let L be the likelihood ratio of the shifted to
    the unshifted density, a = 1 - q + q L and b = 1 - q + q / L.  Reflection swaps the
    two densities, so that E[f(L)] = E[L f(1/L)] for all f, and E[a^k] - E[a^(1-k)] is
    the mean of half of ``h(a) + L h(b)`` with ``h(x) = x^k - x^(1-k)``.  That is
    ``q (L - 1) (g(a) - g(b))`` with ``g(x) = h(x) / (x - 1)``, which at x = e^t is
    ``sinh((k - 1/2) t) / sinh(t / 2)``: symmetric in t and rising in |t|.  As ab >= 1,
    a is further from 1 than b where L > 1, and nearer where L < 1.

Truncation adds ``(1 + e^epsilon) T Pr[Bin(n, q) > B]``, as in
`accounting.core.samplers.truncated_poisson`: that coupling holds for any step.

References:
  Xiao, Wan and Devadas (2023), arXiv:2210.03843, Theorem 4.1 and Corollary 4.1;
  Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Proposition 12, for the
  conversion of Renyi divergences, which is tighter than the paper's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.claims.model_mix.uniform_gaussian import (
    LEAST_SHIFT,
    SLACK,
    equal_coordinates_lose_most,
    log_excess_moments,
    log_expm1,
)
from accounting.core import accountant, sampler_registry
from accounting.core.claim import MethodWording
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.numerics import epsilon_after_cost, round_up, smallest_noise
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float, check_int

METHOD = "ModelMix (Xiao et al. 2023, Corollary 4.1)"
_TRUNCATED = ", plus truncation (Chua et al. 2024, Theorem 3.3)"
#: How numbers by this theorem are computed.
DISCRETIZATION = (
    "Rényi moments of integer orders, by quadrature refined until two agree to 1e-9; "
    "that equal coordinates lose most, up to 1 %, by a finite cover for this run"
)
#: Further outputs that a statement by this theorem does not cover.
NOT_COVERED = "noisy gradients and mixing coefficients: iterates alone are released"
#: Orders are tried up to the first of these; if the last is the best, up to the next.
_ORDERS = (32, 128, 512)
#: Increasing noise multipliers that are verified before mixing is given up.
_MOST_TRIES = 5
#: Rounding error of a logarithm from log-factorials and sums.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing:
    """How iterates are mixed.  All public.

    Attributes:
      mix_width: Least distance of the two mixed states in each coordinate, over the
        learning rate (tau / eta).  Its unit is that of a mean gradient, the sum over
        ``expected_batch_size``.  At least 0; the same in every step.
      l2_norm_clip: Bound on the L2 norm of one example's gradient.
      linf_factor: p: the coordinates of one example's gradient are at most
        ``l2_norm_clip / sqrt(p)``.  1 for no such bound.

    Raises:
      InputError: name, value, bound.
    """

    mix_width: float
    l2_norm_clip: float
    linf_factor: int = 1

    def __post_init__(self) -> None:
        check_float("mix_width", self.mix_width, at_least=0.0)
        check_float("l2_norm_clip", self.l2_norm_clip, above=0.0)
        check_int("linf_factor", self.linf_factor, at_least=1)

    def width(self, plan: DpSgdPlan) -> float:
        """Returns W: the width in the sum of gradients, in clip norms.

        It is reduced by a millionth, for rounding of a trainer in float32.
        """
        width = self.mix_width * plan.expected_batch_size / self.l2_norm_clip
        return width * (1 - 1e-6)

    # -- as an `accounting.core.claim.Theorem` --------------------------------------

    @property
    def name(self) -> str:
        """Name of the mechanism, for messages."""
        return "ModelMix"

    @property
    def is_for_rows_alone(self) -> bool:
        """See `Theorem.is_for_rows_alone`."""
        return False

    def check_plan(self, plan: DpSgdPlan) -> None:
        """Refuses other than Poisson batches; see `check_sampler`."""
        check_sampler(plan)

    def epsilon(
        self, plan: DpSgdPlan, *, noise_multiplier: float, delta: float
    ) -> Bounds:
        """See `Theorem.epsilon`; with or without mixing."""
        check_sampler(plan)
        plain = accountant.epsilon(plan, noise_multiplier=noise_multiplier, delta=delta)
        if noise_multiplier == 0:
            return plain
        noise = float(noise_multiplier)
        orders = [2]

        def needed_at(point: float) -> float:
            needed, order = _untruncated_epsilon(plan, self, noise, point)
            orders.append(order)
            return needed

        truncation = sampler_registry.get(plan.sampler).truncation
        if truncation is None:
            value = needed_at(float(delta))
        else:
            cost = functools.partial(truncation.delta, plan)
            value = epsilon_after_cost(cost, needed_at, float(delta))
        # With truncation several deltas were tried: the cover must hold for all orders.
        return _better(plan, self, noise, plain, value, max(orders))

    def delta(
        self, plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float
    ) -> Bounds:
        """See `Theorem.delta`; with or without mixing."""
        check_sampler(plan)
        plain = accountant.delta(
            plan, noise_multiplier=noise_multiplier, epsilon=epsilon
        )
        if noise_multiplier == 0:
            return plain
        noise = float(noise_multiplier)
        log_value, order = _log_delta(plan, self, noise, epsilon)
        value = math.exp(min(log_value, 0.0))
        return _better(plan, self, noise, plain, value, order)

    def noise_multiplier(
        self, plan: DpSgdPlan, *, epsilon: float, delta: float
    ) -> NoiseBounds:
        """See `Theorem.noise_multiplier`.

        It is the smaller of what suffices with and without mixing, and is verified.
        """
        check_sampler(plan)
        plain = accountant.noise_multiplier(plan, epsilon=epsilon, delta=delta)

        def log_excess(noise: float) -> float:
            if noise == 0.0:
                return -math.log(delta)
            return _log_delta(plan, self, noise, epsilon)[0] - math.log(delta)

        # Where the search starts: at its best, mixing saves most of the noise.
        value = smallest_noise(log_excess, max(plain.guarantee / 3, 1e-3))
        for _ in range(_MOST_TRIES):
            if value >= plain.guarantee:
                break
            value = round_up(value, 6)
            answer = self.delta(plan, noise_multiplier=value, epsilon=epsilon)
            if answer.guarantee <= delta:
                return NoiseBounds(sufficient=value, method=answer.method)
            value *= 1 + 1e-4
        return plain

    def wording(self, bounds: Bounds) -> MethodWording:
        """Returns the words for a statement of ``bounds``, with or without mixing."""
        bound = f"l2_norm_clip / sqrt({self.linf_factor})"
        by_mixing = METHOD in bounds.method
        return MethodWording(
            clipped=f" then each coordinate to {bound},"
            if self.linf_factor > 1
            else "",
            released=(
                "; that, times the learning rate, is taken from a hidden mixture of "
                "the two latest iterates, uniformly random in each coordinate between "
                f"two points at least {self.mix_width!r} times the learning rate apart"
            ),
            discretization=DISCRETIZATION if by_mixing else None,
            not_covered=(NOT_COVERED,) if by_mixing else (),
        )


def check_sampler(plan: DpSgdPlan) -> float:
    """Returns q, rounded up, of a plan for which mixing is analysed.

    Raises:
      InputError: another sampler.
    """
    rate = sampler_registry.get(plan.sampler).poisson_rate
    if rate is None:
        analysed = " or ".join(map(repr, sampler_registry.poisson_samplers()))
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be {analysed}: amplification by "
            "mixing is analysed for no other. Make other batches, or use --method "
            "dp-sgd."
        )
    return rate(plan)


def renyi_divergences(
    sampling_probability: float,
    noise_multiplier: float,
    width: float,
    linf_factor: int,
    most_order: int,
    *,
    slack: float = SLACK,
) -> NDArray[np.float64]:
    """Returns bounds on the Renyi divergences of one step, orders 2 ... ``most_order``.

    Args:
      sampling_probability: q.
      noise_multiplier: sigma, above 0.
      width: W, in clip norms.
      linf_factor: p.
      most_order: Largest order, at least 2.
      slack: Slack of `uniform_gaussian`; 0 for gradients of equal coordinates.

    Returns:
      Shape (most_order - 1,).
    """
    shift, factor = _most_shift(noise_multiplier, linf_factor)
    each = np.logaddexp(
        0.0, log_excess_moments(shift, width / noise_multiplier, most_order)
    )
    # ln(A_j^p - 1), with the slack on ln A_j.
    logs = log_expm1(np.asarray((1 + slack) * factor * each)) + _ROUNDING
    values = []
    for order in range(2, most_order + 1):
        k = np.arange(2, order + 1)
        terms = (
            special.gammaln(order + 1) - special.gammaln(k + 1)
            - special.gammaln(order - k + 1)
            + special.xlog1py(order - k, -sampling_probability)
            + k * math.log(sampling_probability) + logs[: order - 1]
        )  # fmt: skip
        rounding = _ROUNDING * (1 + order)
        log_excess = float(special.logsumexp(terms)) + rounding
        values.append(float(np.logaddexp(0.0, log_excess)) / (order - 1))
    return np.array(values)


def _most_shift(noise_multiplier: float, linf_factor: int) -> tuple[float, float]:
    """Returns the shift of a coordinate, and p, that are accounted for.

    p is reduced if its shift is too small to integrate, which is valid: a coordinate
    within the smaller bound is also within the larger one.
    """
    integrable = (1 + 1e-9) * LEAST_SHIFT * noise_multiplier
    factor = max(1.0, min(float(linf_factor), integrable**-2))
    return 1 / (math.sqrt(factor) * noise_multiplier), factor


# -- one question of all orders --------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _divergences(
    plan: DpSgdPlan, mixing: Mixing, noise_multiplier: float, most_order: int
) -> NDArray[np.float64]:
    """Returns bounds on the Renyi divergences of all steps."""
    one = renyi_divergences(
        check_sampler(plan),
        noise_multiplier,
        mixing.width(plan),
        mixing.linf_factor,
        most_order,
    )
    return plan.num_steps * one


def _best_order(
    plan: DpSgdPlan,
    mixing: Mixing,
    noise_multiplier: float,
    question: Callable[[NDArray[np.int64], NDArray[np.float64]], NDArray[np.float64]],
) -> tuple[float, int]:
    """Returns the least answer of ``question``, and its order."""
    for most_order in _ORDERS:
        orders = np.arange(2, most_order + 1)
        divergences = _divergences(plan, mixing, noise_multiplier, most_order)
        answers = question(orders, divergences)
        best = int(answers.argmin())
        if best < len(orders) - 1:
            break
    return float(answers[best]), int(orders[best])


def _untruncated_epsilon(
    plan: DpSgdPlan, mixing: Mixing, noise_multiplier: float, delta: float
) -> tuple[float, int]:
    def question(
        orders: NDArray[np.int64], divergences: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        gained = np.log1p(-1 / orders) - np.log(orders) / (orders - 1)
        return np.asarray(divergences + gained - math.log(delta) / (orders - 1))

    value, order = _best_order(plan, mixing, noise_multiplier, question)
    return max(0.0, value), order


def _log_delta(
    plan: DpSgdPlan, mixing: Mixing, noise_multiplier: float, epsilon: float
) -> tuple[float, int]:
    """Returns ln delta, which may be above 0, and its order."""

    def question(
        orders: NDArray[np.int64], divergences: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        gained = (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
        return np.asarray((orders - 1) * (divergences - epsilon) + gained)

    value, order = _best_order(plan, mixing, noise_multiplier, question)
    truncation = sampler_registry.get(plan.sampler).truncation
    cost = 0.0 if truncation is None else truncation.delta(plan, epsilon)
    return float(np.logaddexp(value, math.log(cost) if cost else -math.inf)), order


def _method(plan: DpSgdPlan, order: int) -> str:
    truncation = sampler_registry.get(plan.sampler).truncation
    return f"{METHOD}, Rényi order {order}{_TRUNCATED if truncation else ''}"


def _better(
    plan: DpSgdPlan,
    mixing: Mixing,
    noise_multiplier: float,
    plain: Bounds,
    value: float,
    order: int,
) -> Bounds:
    """Returns the smaller of ``plain`` and ``value``, the bound by mixing.

    The bound by mixing holds only if the cover is completed.  That takes longest and is
    done last.
    """
    if value >= plain.guarantee:
        return plain
    shift, _ = _most_shift(noise_multiplier, mixing.linf_factor)
    width = mixing.width(plan) / noise_multiplier
    if not equal_coordinates_lose_most(shift, width, order):
        return plain
    return Bounds(upper=value, method=_method(plan, order))
