"""Where the order of two lines of a sweep flips, and whether that is proven.

Formal guarantees:
  - A line is called below another only where its proven value is below the other's
    lower bound.
  - A crossover is called proven only between two values at which a pair has opposite
    proven orders; everywhere else the order is called not proven.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

from accounting.core import accountant
from accounting.core.neighboring_relation import brought
from accounting.planning.rounding import swept_text
from accounting.planning.sweeps import Point, Sweep, SweepLine

#: Proven values with a smaller relative difference are one line in a plot.
_TIE = 1e-4
#: Best relative distance of Poisson's lower bounds; closer ones are not computed.
_SLACK = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossover:
    """A pair of lines, and two values between which their order may flip.

    Attributes:
      lower, upper: Names of the lines; ``lower`` is proven to be below ``upper`` at
        ``start`` or, if the crossover is not proven, at a value near it.
      start, end: If proven, the values before and after the crossover; else the first
        and last value at which the order is not proven.
      proven: Whether ``upper`` is proven to be below ``lower`` at ``end``.
    """

    lower: str
    upper: str
    start: float
    end: float
    proven: bool

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return dataclasses.asdict(self)


def find(sweep: Sweep) -> list[Crossover]:
    """Returns the crossovers of every pair of samplers, all else being equal."""
    found = []
    for first, second in itertools.combinations(range(len(sweep.lines)), 2):
        if not _differ_in_sampler(sweep.lines[first], sweep.lines[second]):
            continue
        orders = _orders(sweep.points[first], sweep.points[second])
        names = sweep.lines[first].name, sweep.lines[second].name
        found += _of_pair(orders, sweep.values, names)
    return found


def _differ_in_sampler(first: SweepLine, second: SweepLine) -> bool:
    if first.sampler == second.sampler:
        return False
    return _all_but_sampler(first) == _all_but_sampler(second)


def _all_but_sampler(line: SweepLine) -> tuple[Any, ...]:
    return line.theorem, line.total_noise_steps, line.max_examples_per_user


def _orders(first: tuple[Point, ...], second: tuple[Point, ...]) -> list[int | None]:
    """Returns -1 where the first is proven to be below, 1 above, and 0 if unknown.

    None where both are equal up to ``_TIE``.
    """
    pairs = list(zip(first, second, strict=True))
    # If proven values never change their order, no lower bounds are computed.
    seen = {_compared(*pair) for pair in pairs} - {0}
    return [_order(*pair, compute=len(seen) == 2) for pair in pairs]


def _compared(first: Point, second: Point) -> int:
    """Returns the order of the proven values; 0 if they tie, or one is missing."""
    one, other = first.answer.proven, second.answer.proven
    if one is None or other is None or math.isclose(one, other, rel_tol=_TIE):
        return 0
    return -1 if one < other else 1


def _order(first: Point, second: Point, *, compute: bool) -> int | None:
    order = _compared(first, second)
    if order == 0 and None not in (first.answer.proven, second.answer.proven):
        return None
    if _is_below(first, second, compute=compute):
        return -1
    return 1 if _is_below(second, first, compute=compute) else 0


def _is_below(first: Point, second: Point, *, compute: bool) -> bool:
    """Whether the proven value of the first is below a lower bound of the second."""
    proven = first.answer.proven
    if proven is None:
        return False
    if second.answer.least is not None:
        return proven < second.answer.least
    most = second.answer.proven
    if not compute or most is None or proven >= most * (1 - _SLACK):
        return False
    return _needs_more(second, proven)


def _needs_more(point: Point, value: float) -> bool:
    """Whether ``value`` is refuted by a lower bound that is computed for it."""
    question, plan = point.question, point.answer.plan
    line = point.answer.line
    sampler = brought(plan.sampler, **question.unit)
    if sampler.lower_bound is None or (line is not None and line.theorem is not None):
        return False
    noise, epsilon, delta = question.noise_multiplier, question.epsilon, question.delta
    if noise is None:
        noise = value
    elif epsilon is None:
        epsilon = value
    else:
        delta = value
    assert epsilon is not None
    found = accountant.delta(
        plan, noise_multiplier=noise, epsilon=epsilon, both=True, **question.unit
    )
    return found.lower is not None and found.lower > delta


def _of_pair(
    orders: list[int | None], values: tuple[float, ...], names: tuple[str, str]
) -> list[Crossover]:
    """Returns the flips between proven orders, and the runs of unknown ones."""
    known = [place for place, order in enumerate(orders) if order]
    flips = [
        (start, end)
        for start, end in itertools.pairwise(known)
        if orders[start] != orders[end]
    ]
    flipping = {place for start, end in flips for place in range(start, end + 1)}
    groups = itertools.groupby(range(len(orders)), key=orders.__getitem__)
    runs = [list(places) for order, places in groups if order == 0]
    unknown = [
        (run[0], run[-1]) for run in runs if known and not flipping.intersection(run)
    ]

    found = functools.partial(_crossover, orders, values, names)
    return [
        *(found(ends, proven=True) for ends in flips),
        *(found(ends, proven=False) for ends in unknown),
    ]


def _crossover(
    orders: list[int | None],
    values: tuple[float, ...],
    names: tuple[str, str],
    ends: tuple[int, int],
    *,
    proven: bool,
) -> Crossover:
    start, end = ends
    known = [place for place, order in enumerate(orders) if order]
    nearest = min(known, key=lambda place: abs(place - start))
    lower, upper = names if orders[nearest] == -1 else names[::-1]
    return Crossover(
        lower=lower, upper=upper, start=values[start], end=values[end], proven=proven
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Crossovers of the same kind, at the same values.

    Attributes:
      lowers, uppers: Each of the ones makes a crossover with each of the others.
      start, end, proven: As of each `Crossover`.
    """

    lowers: tuple[str, ...]
    uppers: tuple[str, ...]
    start: float
    end: float
    proven: bool

    def sentence(self, axis: str) -> str:
        """Returns what is known, in words; ``axis`` is what was varied."""
        lowers, uppers = ", ".join(self.lowers), ", ".join(self.uppers)
        start, end = swept_text(self.start), swept_text(self.end)
        if self.proven:
            return (
                f"Proven crossover between {axis}={start} and {end}: of "
                f"{lowers}, which come first, with {uppers}."
            )
        where = f"at {axis}={start}"
        if self.start < self.end:
            where = f"from {axis}={start} to {end}"
        return f"Order not proven {where}: of {lowers} and {uppers}."


def grouped(found: list[Crossover]) -> list[Group]:
    """Returns crossovers together that say the same of several lines."""
    uppers: dict[tuple[Any, ...], list[str]] = {}
    for each in found:
        key = (each.proven, each.start, each.end, each.lower)
        uppers.setdefault(key, []).append(each.upper)
    lowers: dict[tuple[Any, ...], list[str]] = {}
    for (*where, lower), names in uppers.items():
        lowers.setdefault((*where, tuple(names)), []).append(lower)
    return [
        Group(lowers=tuple(names), uppers=above, start=start, end=end, proven=proven)
        for (proven, start, end, above), names in lowers.items()
    ]
