"""Sums of likelihood ratios by option prices: one error, whatever the number of terms.

Let R be the sum of t independent likelihood ratios r (see `random_allocation`).  Its
call ``E[(R - K)+]`` and its put ``E[(K - R)+]`` are deltas of one epoch.  As convex
functions of the strike K they determine the distribution of R:

  - *upper*: chords between upper bounds, at any set of strikes, lie above the price.
    The largest convex function below the chords still does, and it is the price of a
    discrete distribution, that of `Ratios`.
  - *lower*: beyond the end of a chord, a convex function lies above the chord's line.
    So a line through two neighbours, with a lower bound at the nearer and an upper
    bound at the farther, lies below the price, and so does the largest convex function
    below such lines.

At a strike, the price is the inverse of a Laplace transform (`inversion` with the
kernel ``1 / z^2``); a put is the call of -R at -K.  Errors:

  - *r*: discretised by `random_allocation.single`, for either bound.
  - *large r*: for strikes k <= K, each r is cut to at most K, which makes R' of R, and
    the mean of the excess is added: ``(R - k)+ = (R' - k)+ + R - R'``.  So no tail is
    too heavy for a tilt.
  - *smoothing* by a normal Z of variance v and *wrapping* only add to a price.  For a
    lower bound both are subtracted.  Smoothing adds ``E[h(R - K)]``, with
    ``h(x) = E[(x + Z)+] - x+ <= v n(x)`` for the density n of Z: at most v times the
    density of R + Z at K, which is a sum along the same line.  Wrapping is bounded by
    Chernoff's bound, as in `_period`.
  - the remaining errors are those of `inversion`, and of one more transform, which
    evaluates a price at many strikes.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

from accounting.claims.allocation import random_allocation
from accounting.claims.allocation.random_allocation import Ratios
from accounting.core.numerics.sums import inner
from accounting.core.pld import inversion, saddlepoint
from accounting.core.pld.inversion import Contour
from accounting.core.pld.loss_distribution import Atoms

#: At smaller noise, in general and for fewer terms, ratios are too far apart.
_LEAST_NOISE, _FEW_NOISE, _FEW = 0.3, 1.0, 8
#: Number of atoms of one ratio, and of those that hardly ever occur with much noise: an
#: atom at 0 in their place would count under a tilt.
_NUM_CELLS, _NUM_FAR = 10_000, 200
#: Width of a cell, in standard deviations of the sum under the tilt of its contour.
_WIDTH = 1e-3
#: Range of a contour: standard deviations, and ratio of the largest to the least
#: strike.
_REACH, _MOST_RATIO = 4.0, 2.0
#: Smaller prices, in units of t, count as 0 or as infinite loss.
_TAIL = 1e-18
#: Minus ln of the wrapping error, and of the last term of the sum along a contour.
_NEEDED = 42.0
#: Least distance of a contour from the pole at 0: the shift of the mean under its tilt,
#: in standard deviations of the sum.
_LEAST_TILT = 2.0

_Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Prices:
    """Bounds on prices of R / t.

    Attributes:
      strikes: Increasing, shape (n,).
      puts: Bounds on the puts, shape (n,).
      calls: Bounds on the calls, shape (n,).
    """

    strikes: _Floats
    puts: _Floats
    calls: _Floats

    @property
    def slopes(self) -> tuple[_Floats, _Floats]:
        """Slopes of puts and of calls between strikes, which differ by 1.

        Small slopes of either are accurate.
        """
        width = np.diff(self.strikes)
        put, call = np.diff(self.puts) / width, np.diff(self.calls) / width
        below = self.strikes[1:] <= 1.0
        return np.where(below, put, call + 1.0), np.where(below, put - 1.0, call)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Strikes K of one contour, for calls on t ratios or on their negatives.

    Attributes:
      loss: Distribution of one ratio, cut, or of its negative.
      num_steps: t.
      low: Smallest strike; negative for negative ratios.
      high: Largest strike.
      cut: Mean of the excess that was cut off the sum.
    """

    loss: Atoms
    num_steps: int
    low: float
    high: float
    cut: float

    def cumulants(self, order: float) -> tuple[float, float]:
        """Returns the mean and standard deviation of the sum under a tilt."""
        _, mean, variance = self.loss.cumulants(order)
        return self.num_steps * mean, math.sqrt(self.num_steps * variance)

    def order(self) -> float:
        """Returns r: of the tilt to the middle, unless that is too near the pole."""
        mean, deviation = self.cumulants(0.0)
        aim = functools.partial(
            saddlepoint.order_for_epsilon, self.loss, self.num_steps
        )
        away = aim(mean + _LEAST_TILT * deviation)
        return max(aim((self.low + self.high) / 2), min(away, _LEAST_TILT / deviation))


def _group(one: Ratios, num_steps: int, sign: int, start: float) -> _Group:
    """Returns the strikes of one contour, from ``start`` outwards."""
    values = np.append(0.0, one.values)
    masses = np.append(one.zero_mass, one.masses)
    end = start * _MOST_RATIO**sign
    while True:
        kept = np.minimum(values, max(start, end))
        low, high = sign * start, sign * end
        # Cutting costs a put nothing: with such a ratio it is worth 0.
        excess = inner(masses, values - kept) + one.lost if sign > 0 else 0.0
        cut = num_steps * excess
        found = _Group(
            Atoms(masses, kept if sign > 0 else -kept), num_steps, low, high, cut
        )
        order = saddlepoint.order_for_epsilon(found.loss, num_steps, sign * start)
        reach = _REACH * found.cumulants(order)[1]
        if abs(end - start) <= 1.01 * reach:
            return found
        end = start + sign * reach  # nearer to ``start`` than before


def _contour(group: _Group) -> Contour:
    order = group.order()
    deviation = group.cumulants(order)[1]
    width = _WIDTH * max(deviation, (group.high - group.low) / _REACH)
    variance = width**2 / 6
    period = _period(group, order, deviation)
    count = math.ceil(math.sqrt(2 * _NEEDED / variance) * period / (2 * math.pi))
    return Contour(
        order=order, period=period, variance=variance, count=count, shift=0.0
    )


def _period(group: _Group, order: float, deviation: float) -> float:
    """Returns a period W at which the wrapping error is at most ``_wrapped``.

    At all strikes: with X = S - K -+ W, ``X+ e^(-r X) <= e^(h X) / (e (h + r))`` for
    h > -r, whose mean under the tilt falls by e^(-|h| W) with each period.
    """
    weights = group.loss.tilted(order)[0]
    kept = weights > 1e-40
    weights, losses = weights[kept], group.loss.losses[kept]
    mean = inner(weights, losses)

    def width(rate: float, strike: float) -> float:
        exponents = rate * (losses - mean)
        largest = float(exponents.max())
        if largest < 1.0:
            moment = math.log1p(inner(weights, np.expm1(exponents)))
        else:
            moment = largest + math.log(inner(weights, np.exp(exponents - largest)))
        moment *= group.num_steps
        moment += rate * (group.num_steps * mean - strike)
        return (max(moment, 0.0) + _NEEDED) / abs(rate)

    rates = np.array([0.5, 1.0, 2.0, 4.0, 8.0, 16.0]) / deviation
    return max(
        min(width(float(rate), group.low) for rate in rates),
        min(width(-min(float(rate), 0.8 * order), group.high) for rate in rates),
    )


def _wrapped(contour: Contour) -> float:
    """Returns a bound on the wrapping error, relative to Chernoff's bound."""
    return 6 * math.exp(-_NEEDED) / (math.e * contour.order)


def _group_prices(group: _Group) -> tuple[_Floats, _Floats, _Floats]:
    """Returns strikes, and upper and lower bounds on their prices; shapes (n,)."""
    contour = _contour(group)
    total = inversion.invert(group.loss, group.num_steps, contour)
    size = 1 << (2 * contour.count + 1).bit_length()
    spacing = contour.period / size
    first = math.ceil((group.low - total.center) / spacing)
    last = math.floor((group.high - total.center) / spacing)
    stride = max(1, int(math.sqrt(6 * contour.variance) / spacing))
    places = np.arange(first, last + 1, stride)
    strikes = total.center + spacing * places
    means, rounding = total.on_lattice(total.powers / total.poles, size)
    means = means[places % size]
    density, density_rounding = total.on_lattice(total.powers, size)
    density = density[places % size] + total.density_error + density_rounding
    error = total.error + rounding
    added = contour.variance * density + _wrapped(contour)
    chernoff = np.exp(total.log_scale - contour.order * strikes)
    high = total.slack * chernoff * (np.maximum(means, 0.0) + error)
    low = (2 - total.slack) * chernoff * np.maximum(means - error - added, 0.0)
    return strikes, high + group.cut, low + group.cut


def _side(one: Ratios, num_steps: int, sign: int) -> _Floats:
    """Returns strikes K / t, and upper and lower bounds on prices; shape (3, n).

    Of calls, at strikes from 1 upwards, or of puts, at strikes from 1 downwards.
    """
    start, found = float(num_steps), []
    while True:
        group = _group(one, num_steps, sign, start)
        strikes, high, low = _group_prices(group)
        found.append(np.array([sign * strikes, high, low])[:, ::sign])
        # The outermost strike has the least price.
        if float(high.min()) <= _TAIL * num_steps:
            break
        start = abs(group.high)
    rows = np.concatenate(found[::sign], axis=1) / num_steps
    return rows[:, np.concatenate(([True], np.diff(rows[0]) > 0))]


def applies(noise: float, num_steps: int) -> bool:
    """Returns whether this module encloses R; `random_allocation` encloses any R.

    Args:
      noise: Noise multiplier, above 0.
      num_steps: t, number of terms.
    """
    return noise >= (_LEAST_NOISE if num_steps >= _FEW else _FEW_NOISE)


def bounds(noise: float, num_steps: int, upper: bool) -> tuple[Prices, Prices]:
    """Returns upper and lower bounds on the prices of an enclosing distribution.

    Args:
      noise: Noise multiplier for which `applies` is true.
      num_steps: t, number of terms.
      upper: Whether r is discretised for an upper bound on delta, or for a lower one.
    """
    one = random_allocation.single(noise, upper, _NUM_CELLS, _NUM_FAR)
    put, call = _side(one, num_steps, -1), _side(one, num_steps, 1)
    put, call = put[:, put[0] < 1.0], call[:, call[0] > 1.0]
    strikes = np.concatenate((put[0], call[0]))
    found = []
    for puts, calls in ((put[1], call[1]), (put[2], call[2])):
        all_puts = np.concatenate((puts, calls + call[0] - 1))
        all_calls = np.concatenate((puts + 1 - put[0], calls))
        found.append(Prices(strikes, all_puts, all_calls))
    return found[0], found[1]


def enclosed(noise: float, num_steps: int, upper: bool) -> Ratios:
    """Returns an enclosing distribution of the sum of ``num_steps`` likelihood ratios.

    Args:
      noise: Noise multiplier for which `applies` is true.
      num_steps: t, number of terms.
      upper: True for an upper bound on delta, False for a lower one.
    """
    above, below = bounds(noise, num_steps, upper)
    prices = _with_ends(above) if upper else _lines(*_apart(above, below))
    strikes, masses = _convex(prices)
    return Ratios(
        num_terms=num_steps,
        values=strikes[1:] * num_steps,
        masses=masses[1:],
        zero_mass=float(masses[0]),
        lost=float(prices.calls[-1]),
    )


def _with_ends(above: Prices) -> Prices:
    """Returns prices from strike 0; beyond the last strike, calls are constant."""
    return Prices(
        np.append(0.0, above.strikes),
        np.append(0.0, above.puts),
        np.append(1.0, above.calls),
    )


def _apart(above: Prices, below: Prices) -> tuple[Prices, Prices]:
    """Returns the bounds at the strikes whose prices are told apart.

    Where prices are as small as errors, a lower bound does not exceed the upper bound
    at the strike before, and lines fall below 0.  Any strikes are valid.
    """
    puts = (below.strikes[1:] <= 1.0) & (below.puts[1:] <= above.puts[:-1])
    calls = (below.strikes[:-1] >= 1.0) & (below.calls[:-1] <= above.calls[1:])
    first = int(np.max(np.flatnonzero(puts), initial=-1)) + 1
    end = int(np.min(np.flatnonzero(calls), initial=len(calls))) + 1
    kept = slice(first, end)
    left, right = (
        Prices(one.strikes[kept], one.puts[kept], one.calls[kept])
        for one in (above, below)
    )
    return left, right


def _lines(above: Prices, below: Prices) -> Prices:
    """Returns the corners of lines that lie below the prices; 0 is one of the lines.

    Between two strikes, the lines through each and the strike beyond it meet in a
    corner.  If they do not meet there, the chord lies below the higher line.
    """
    x, inner = below.strikes, slice(1, -1)
    corner, put = _corners(x, above.puts, below.puts)
    other, call = _corners(x, above.calls, below.calls)
    in_puts = x[2:-1] <= 1.0
    corner = np.where(in_puts, corner, other)
    put = np.where(in_puts, put, call + corner - 1)
    call = np.where(in_puts, put + 1 - corner, call)
    found = (x[1:-2] < corner) & (corner < x[2:-1])
    # Outside: lines through the first two and the last two strikes, until they reach 0.
    first = x[1] - below.puts[1] * (x[2] - x[1]) / (above.puts[2] - below.puts[1])
    fall = (above.calls[-3] - below.calls[-2]) / (x[-2] - x[-3])
    last = x[-2] + below.calls[-2] / fall
    ends = np.array([0.0, max(first, 0.0), last])
    strikes, order = np.unique(
        np.concatenate((ends, x[inner], corner[found])), return_index=True
    )
    nothing = np.zeros(3)
    puts = np.concatenate(
        (np.maximum(ends - 1, nothing), below.puts[inner], put[found])
    )
    calls = np.concatenate(
        (np.maximum(1 - ends, nothing), below.calls[inner], call[found])
    )
    return Prices(strikes, puts[order], calls[order])


def _corners(x: _Floats, high: _Floats, low: _Floats) -> tuple[_Floats, _Floats]:
    """Returns the points where two lines meet, for each cell but the two outer ones."""
    width = np.diff(x)
    left = ((low[1:] - high[:-1]) / width)[:-2]
    right = ((high[1:] - low[:-1]) / width)[2:]
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = low[2:-1] - low[1:-2] - right * width[1:-1]
        along = rise / (left - right)
    return x[1:-2] + along, low[1:-2] + left * along


def _convex(prices: Prices) -> tuple[_Floats, _Floats]:
    """Returns the corners and kinks of the largest convex function below the prices.

    Neighbouring slopes that fall are pooled.
    """
    puts, calls = prices.slopes
    pooled: list[tuple[float, float, float, int]] = []
    widths = np.diff(prices.strikes)
    for place, (width, put, call) in enumerate(
        zip(widths.tolist(), puts.tolist(), calls.tolist(), strict=True)
    ):
        first = place
        while pooled:
            other, other_put, other_call, start = pooled[-1]
            if (put - other_put if put < 0.5 else call - other_call) > 0:
                break
            share = width / (width + other)
            put = share * put + (1 - share) * other_put
            call = share * call + (1 - share) * other_call
            width, first = width + other, start
            pooled.pop()
        pooled.append((width, put, call, first))
    _, put, call, first = np.array(pooled).T
    rises = np.where(put[1:] < 0.5, np.diff(put), np.diff(call))
    corners = np.append(prices.strikes[first.astype(np.int64)], prices.strikes[-1])
    return corners, np.concatenate((put[:1], rises, -call[-1:]))
