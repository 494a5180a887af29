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

with A_j = A_j(1 / (sqrt(p) sigma), W / sigma), see *Moments*.

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
    A_j, up to a factor of ``1 + SLACK`` in ln A_j.  `equal_coordinates_lose_most`
    proves this for the parameters of each question.  Where its cover fails, the bounds
    without mixing are returned.
  - Wider is more private, also where widths differ between coordinates: see
    *Moments*.
  - Removing is the worse direction.  Let L be the likelihood ratio of the shifted to
    the unshifted density, a = 1 - q + q L and b = 1 - q + q / L.  Reflection swaps the
    two densities, so that E[f(L)] = E[L f(1/L)] for all f, and E[a^k] - E[a^(1-k)] is
    the mean of half of ``h(a) + L h(b)`` with ``h(x) = x^k - x^(1-k)``.  That is
    ``q (L - 1) (g(a) - g(b))`` with ``g(x) = h(x) / (x - 1)``, which at x = e^t is
    ``sinh((k - 1/2) t) / sinh(t / 2)``: symmetric in t and rising in |t|.  As ab >= 1,
    a is further from 1 than b where L > 1, and nearer where L < 1.

Truncation adds ``(1 + e^epsilon) T Pr[Bin(n, q) > B]``, as in
`accounting.core.samplers.truncated_poisson`: that coupling holds for any step.

*Moments* of the likelihood ratio of a shifted Gaussian plus uniform noise.  With the
convolution P = N(0, 1) * U[-width/2, width/2] and its density p,

    A_k(shift, width) = E_{x ~ P} [ (p(x - shift) / p(x))^k ],    k = 2, 3, ...

All lengths are in units of the Gaussian's standard deviation.

Formal guarantees:
  - ``log_excess_moments`` returns an upper bound on ``ln(A_k - 1)``: the difference of
    the last two quadratures and the rounding of the exponents are added.
  - Width 0 has the Gaussian's ``A_k = exp(k (k - 1) shift^2 / 2)``, an upper bound for
    every width.  It is also returned if the shift is too large to be of use, or too
    small for the quadrature.
  - A_k increases with the shift and decreases with the width.

Proof of the last: P is log-concave, so the most powerful test between P and P + shift
is a threshold.  At false positive rate a, its false negative rate is
``F(F^-1(1 - a) - shift)``, which decreases with the shift.  A wider uniform is more
dispersed, and remains so after adding a log-concave variable (Lewis and Thompson 1981):
quantiles of F are further apart, so ``F^-1(1 - a) - shift`` is a higher quantile of F.
A pair with a larger false negative rate at every a is a post-processing of the other
pair (Blackwell), so each of its divergences is smaller, including that of order k.

*The worst gradient* has equal coordinates, which a finite cover proves.  One example
moves the coordinates of a step by shifts s_j.  Their squares add up to at most p S^2,
and each shift is at most S.  With g(s) = ln A_k(s, W), `equal_coordinates_lose_most`
shows that

    sum_j g(s_j)  <=  (1 + SLACK) p g(S)        for every such gradient,

It suffices that ``g(s) / s^2 <= (1 + SLACK) g(S) / S^2`` for all s in (0, S].  (Xiao et
al. assert, without proof, that g is convex in s^2, which would make SLACK unnecessary.)

From S down to some s_0, intervals cover all s.  Since g does not fall with s,

    g(s) / s^2 <= g(high) / low^2        for s in [low, high],

and low is chosen so that the right side is just small enough.  For s <= s_0, with
psi = -ln p and y drawn from P, so that A_k = E[exp((k - 1) (psi(y + s) - psi(y)))]:

  - psi'' is 1 minus the variance of the uniform given y.  P is log-concave, so psi'' is
    in [0, 1].  psi''' is minus the third central moment of the uniform given y, which
    is log-concave too: at most 2 in size (Bubeck and Eldan 2014, Lemma 2).
  - So ``psi(y + s) - psi(y) <= s psi' + s^2 psi'' / 2 + s^3``, of mean
    ``s^2 I / 2 + s^3``, where I = E[psi'^2] = E[psi''], and of size at most
    ``s m`` with ``m = |psi'| + s / 2 + s^2``.
  - As ``e^z <= 1 + z + z^2 e^max(z, 0) / 2``, and ln A_k <= A_k - 1,

        g(s) / s^2 <= (k - 1) (I / 2 + s) + (k - 1)^2 / 2 E[m^2 e^((k - 1) s m)],

    which does not fall with s: it holds for all s <= s_0 if it does at s_0.

  - ``equal_coordinates_lose_most`` is true only if the cover was completed, for every
    order up to ``most_order``, with quadratures on the private side.

References:
  Xiao, Wan and Devadas (2023), arXiv:2210.03843, Theorem 4.1 and Corollary 4.1;
  Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Proposition 12, for the
  conversion of Renyi divergences, which is tighter than the paper's.
  Lewis and Thompson (1981), J. Appl. Probab. 18, Theorem 8, on dispersion; Bubeck and
  Eldan (2014), arXiv:1412.1587.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core import accountant, sampler_registry
from accounting.core.claim import MethodWording
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.numerics import epsilon_after_cost, round_up, smallest_noise
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float, check_int

#: Standard deviations integrated beyond the last point where an integrand is large.
_REACH = 15.0
#: Points per standard deviation: initial and largest number.
_FIRST_POINTS, _MOST_POINTS = 8, 512
#: Largest shift times order that is integrated; beyond, the loss is too large to be of
#: use.
_FARTHEST = 1000.0
#: The effect of a smaller shift is below the rounding of the two densities.
LEAST_SHIFT = 1e-5
#: Relative difference of two quadratures that ends the refinement.
_TOLERANCE = 1e-9
#: Relative error of an exponent, which is a sum of a few terms.
_OF_EXPONENT = 16 * np.finfo(np.float64).eps
#: The density of a narrower uniform is an integral, of a wider one a difference of
#: tails.
_NARROW = 1.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def log_density(x: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Returns the logarithm of the density of N(0, 1) * U[-width/2, width/2].

    Args:
      x: Points, of any shape.
      width: Width of the uniform, at least 0.

    Example:
      >>> float(log_density(np.zeros(1), 0.0)[0])  # ln(1 / sqrt(2 pi))
      -0.9189385332046727
    """
    if width <= _NARROW:
        means = _NODES[:, None] * (width / 2)
        logs = special.logsumexp(
            x * means - means**2 / 2, b=_WEIGHTS[:, None] / 2, axis=0
        )
        gaussian = -(x**2) / 2 - 0.5 * math.log(2 * math.pi)
        return np.asarray(gaussian + logs)
    distance = np.abs(x)
    near = special.log_ndtr(width / 2 - distance)
    far = special.log_ndtr(-width / 2 - distance)
    return np.asarray(near + np.log1p(-np.exp(far - near)) - math.log(width))


def log_excess_moments(
    shift: float, width: float, most_order: int
) -> NDArray[np.float64]:
    """Returns ``ln(A_k - 1)`` for k = 2 ... ``most_order``, rounded up.

    Args:
      shift: Shift in standard deviations of the Gaussian, above 0.
      width: Width of the uniform in the same unit, at least 0.
      most_order: Largest order k, at least 2.

    Returns:
      Shape (most_order - 1,).

    Raises:
      ArithmeticError: the quadrature does not converge.
    """
    orders = np.arange(2, most_order + 1)
    if width == 0.0 or not LEAST_SHIFT <= shift <= _FARTHEST / most_order:
        # Less noise, hence an upper bound for every width.
        exponents = orders * (orders - 1) * shift**2 / 2
        return np.asarray(log_expm1(exponents * (1 + _OF_EXPONENT)) + _OF_EXPONENT)
    points = _FIRST_POINTS
    while points <= _MOST_POINTS:
        coarse, fine, rounding = _quadratures(shift, width, orders, points)
        errors = np.abs(np.expm1(coarse - fine))
        if errors.max() <= _TOLERANCE:
            return np.asarray(fine + errors + rounding)
        points *= 2
    raise ArithmeticError(
        f"moments of shift={shift!r}, width={width!r}, order {most_order} do not settle"
    )


def log_expm1(exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns ``ln(e^x - 1)`` for x > 0, without overflow."""
    return np.asarray(exponents + np.log(-np.expm1(-exponents)))


def _quadratures(
    shift: float, width: float, orders: NDArray[np.int64], points: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Returns ln(A_k - 1) from half and from all points, and a rounding error."""
    step = 1.0 / (2 * points)
    coarse, fine, largest = [], [], 0.0
    for x in _pieces(shift, width, int(orders[-1]), step):
        here = log_density(x, width)
        loss = log_density(x - shift, width) - here
        terms = here + _log_excess(loss, orders[:, None])
        coarse.append(special.logsumexp(terms[:, ::2], axis=1) + math.log(2 * step))
        fine.append(special.logsumexp(terms, axis=1) + math.log(step))
        largest = max(largest, float(np.abs(here).max() + np.abs(loss).max()))
    rounding = _OF_EXPONENT * (1 + (orders + 1 / shift) * largest)
    return special.logsumexp(coarse, axis=0), special.logsumexp(fine, axis=0), rounding


def _pieces(
    shift: float, width: float, most_order: int, step: float
) -> list[NDArray[np.float64]]:
    """Returns equidistant points where the integrands are not negligible.

    The likelihood ratio falls at the left edge of the uniform.  Beyond its right edge
    the integrand of order k resembles a Gaussian around k times the shift.  Between the
    edges the density is constant.
    """
    left, right = -width / 2 - _REACH, width / 2 + most_order * shift + _REACH
    middle = (-width / 2 + shift + _REACH, width / 2 - _REACH)
    ends = [(left, right)]
    if middle[0] < middle[1]:
        ends = [(left, middle[0]), (middle[1], right)]
    return [
        np.asarray(a + step * np.arange(math.ceil((b - a) / step) + 1), np.float64)
        for a, b in ends
    ]


def _log_excess(
    loss: NDArray[np.float64], orders: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns ``ln(r^k - 1 - k (r - 1))`` for r = e^loss.

    The argument is at least 0, and its mean under P is A_k - 1, without the
    cancellation of a difference from 1.
    """
    power = orders * loss
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        direct = np.log(np.expm1(power) - orders * np.expm1(loss))
        # ln of (k^2 - k) l^2 / 2! + (k^3 - k) l^3 / 3! + (k^4 - k) l^4 / 4!.
        k = orders.astype(np.float64)
        bend = (k + 1) / 3 + (k**2 + k + 1) * loss / 12
        small = np.log(k * (k - 1) / 2 * (1 + bend * loss)) + 2 * np.log(np.abs(loss))
        rest = k * np.exp(loss - power) + (1 - k) * np.exp(-power)
        large = power + np.log1p(-rest)
    found = np.where(np.abs(power) < 1e-4, small, direct)
    return np.asarray(np.where(power > 30.0, large, found))


#: Relative cost of the cover in the divergence; a smaller one takes longer to prove.
SLACK = 0.01
#: Largest number of intervals; most covers have a few hundred.
_MOST_INTERVALS = 3000
#: Bound on the relative error of quadratures.
_MARGIN = 1e-5
#: Spacing of the points of ``_limit``, and their reach beyond the uniform's edge.
_STEP, _LIMIT_REACH = 1 / 256, 15.0


@functools.lru_cache(maxsize=256)
def equal_coordinates_lose_most(
    most_shift: float, width: float, most_order: int
) -> bool:
    """Returns whether the cover was completed.  Takes about a second.

    Args:
      most_shift: S, in standard deviations of the Gaussian.
      width: W, in the same unit.
      most_order: Largest order k, at least 2.
    """
    if width == 0.0:
        return True  # g(s) / s^2 is constant
    allowed = _slopes(most_shift, 1.0, width, most_order) * (1 + SLACK)
    share = _least_share(most_shift, width, allowed)
    return share is not None and _covers(most_shift, width, allowed, share)


def _slopes(
    most_shift: float, share: float, width: float, most_order: int
) -> NDArray[np.float64]:
    """Returns ``g(s) / s^2`` at ``s^2 = share * most_shift^2``, for orders 2, 3, ..."""
    square = share * most_shift**2
    logs = log_excess_moments(math.sqrt(square), width, most_order)
    return np.asarray(np.logaddexp(0.0, logs) / square)


def _least_share(
    most_shift: float, width: float, allowed: NDArray[np.float64]
) -> float | None:
    """Returns (s_0 / S)^2; None if the limit is not small enough for any s_0."""
    shift = most_shift
    while shift > LEAST_SHIFT:
        if (_limit(shift, width, len(allowed) + 1) <= allowed).all():
            return (shift / most_shift) ** 2
        shift /= 2
    return None


def _limit(shift: float, width: float, most_order: int) -> NDArray[np.float64]:
    """Returns a bound on ``g(s) / s^2`` for s up to ``shift``, for orders 2, 3, ..."""
    inner = min(width / 2, _LIMIT_REACH)
    # One half, by symmetry.  Further inside, psi' is 0 and m is constant.
    steps = np.arange(math.ceil((inner + _LIMIT_REACH) / _STEP) + 1, dtype=np.float64)
    y = width / 2 - inner + _STEP * steps
    density = log_density(y, width)
    gaussian = -((y - width / 2) ** 2) / 2 - 0.5 * math.log(2 * math.pi)
    # psi' = (phi(y - W / 2) - phi(y + W / 2)) / (W p(y))
    score = np.exp(gaussian - math.log(width) - density) * -np.expm1(-width * y)
    masses = 2 * _STEP * np.exp(density)
    masses[0] /= 2
    least = shift / 2 + shift**2
    information = float(masses @ score**2)
    values = []
    for k in range(1, most_order):
        with np.errstate(over="ignore"):
            means = (score + least) ** 2 * np.exp(k * shift * (score + least))
            flat = least**2 * np.exp(k * shift * least)
        second = float(masses @ means) + flat
        values.append(k * (information / 2 + shift) + k**2 / 2 * second)
    return np.array(values) * (1 + _MARGIN)


def _covers(
    most_shift: float, width: float, allowed: NDArray[np.float64], least: float
) -> bool:
    """Returns whether intervals from share 1 to ``least`` stay within ``allowed``."""
    share = 1.0
    for _ in range(_MOST_INTERVALS):
        if share <= least:
            return True
        slopes = _slopes(most_shift, share, width, len(allowed) + 1)
        shrinking = float((slopes * (1 + _MARGIN) / allowed).max())
        if shrinking >= 1.0:
            return False
        share *= shrinking
    return False


# -- the theorem -----------------------------------------------------------------------

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
        """Returns bounds on delta at ``epsilon``, with or without mixing.

        Args:
          plan: Accepted by ``check_plan``.
          noise_multiplier: Noise standard deviation over ``l2_norm_clip``.
          epsilon: At least 0.
        """
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
      slack: Slack of the cover; 0 for gradients of equal coordinates.

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
