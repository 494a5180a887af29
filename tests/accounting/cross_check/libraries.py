"""dp_accounting's opinions: its privacy loss distributions and its Renyi divergences.

The privacy loss distribution gives an upper bound on a grid.  Its change on a grid
twice as coarse estimates its distance from the limit, which is the true epsilon if the
event's dominating pair is attained.  The Renyi divergences give an upper bound, which
our epsilon must not exceed.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
from importlib import metadata

from dp_accounting import pld, rdp

from accounting.core.intervals import Bounds
from accounting.cross_check import epsilon_of
from accounting.events import EventQuestion
from tests.accounting.cross_check.opinion import Opinion

#: Spacing of the grid of privacy losses, relative to epsilon above 10: a grid that is
#: much finer than epsilon takes minutes.
_INTERVAL = 1e-4
_SLOW_INTERVAL = 5e-4
#: Relative rounding error of both accountants together.
_ROUNDING = 1e-3
#: Above, dp_accounting's e^epsilon overflows in part of its losses, and its answer has
#: an error that no grid shows.
_LARGEST_EPSILON = 600.0
#: Probability mass that dp_accounting may truncate in a composition.
_TAIL = 1e-14


def opinions(
    question: EventQuestion, delta: float, ours: Bounds
) -> tuple[Opinion, ...]:
    """Returns dp_accounting's opinions on epsilon at ``delta``.

    Args:
      question: A result of `events.ask`.
      delta: In (0, 1).
      ours: Our bounds on epsilon at ``delta``.
    """
    found = [_distribution(question, delta, ours)]
    renyi = rdp.RdpAccountant(neighboring_relation=question.relation)
    if question.cost is None and renyi.supports(question.event):
        epsilon = float(renyi.compose(question.event).get_epsilon(delta))
        found.append(_opinion("Renyi", question, delta, ours, epsilon, (0.0, epsilon)))
    return tuple(found)


def _distribution(question: EventQuestion, delta: float, ours: Bounds) -> Opinion:
    guarantee = ours.guarantee
    if _LARGEST_EPSILON < guarantee < math.inf:
        return _no_opinion(question, delta, ours)
    interval = _SLOW_INTERVAL if question.slow else _INTERVAL
    interval *= max(1.0, guarantee / 10) if guarantee < math.inf else 1.0
    fine, coarse = (
        pld.PLDAccountant(question.relation, spacing).compose(question.event)
        for spacing in (interval, 2 * interval)
    )
    value = epsilon_of(question, fine, delta)
    error = _ROUNDING * value
    if math.isfinite(value):
        error += 2 * abs(epsilon_of(question, coarse, delta) - value)
        error += value - epsilon_of(question, fine, delta + _TAIL)
    low = max(0.0, value - error) if question.tight else 0.0
    if math.isinf(value):
        low = math.inf if question.tight else 0.0
    return _opinion(
        "loss distribution", question, delta, ours, value, (low, value + error)
    )


def _no_opinion(question: EventQuestion, delta: float, ours: Bounds) -> Opinion:
    whole = (0.0, math.inf)
    found = _opinion("loss distribution", question, delta, ours, math.inf, whole)
    note = f"Its numbers overflow near epsilon {_LARGEST_EPSILON:g}: it says nothing"
    return dataclasses.replace(found, note=note)


def _opinion(
    kind: str,
    question: EventQuestion,
    delta: float,
    ours: Bounds,
    value: float,
    interval: tuple[float, float],
) -> Opinion:
    note = "Error from a grid twice as coarse, and rounding"
    if interval[0] == 0:
        note = "An upper bound: it says nothing from below"
    return Opinion(
        source=f"dp-accounting {metadata.version('dp-accounting')}, {kind}",
        about=question.text,
        quantity="epsilon",
        at=delta,
        value=value,
        low=interval[0],
        high=interval[1],
        ours=ours,
        note=note,
    )
