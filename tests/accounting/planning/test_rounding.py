"""Printed numbers err on the safe side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accounting.core.intervals import Bounds, NoiseBounds
from accounting.planning import comparison
from accounting.planning.comparison import DELTA, EPSILON, NOISE, Answer
from tests.accounting.plans import make_plan

PLAN = make_plan("poisson", 10, 1, 1)


@given(value=st.floats(5e-324, 1e4))
def test_what_is_proven_is_rounded_up_and_lower_bounds_down(value: float) -> None:
    bounds = Bounds(upper=value, lower=value, method="m")
    noise = NoiseBounds(sufficient=value, necessary=value, method="m")
    for answer in (
        Answer(plan=PLAN, asked=EPSILON, bounds=bounds),
        Answer(plan=PLAN, asked=DELTA, bounds=bounds),
        Answer(plan=PLAN, asked=NOISE, bounds=noise),
    ):
        assert float(comparison.least_text(answer)) <= value
        assert value <= float(comparison.proven_text(answer))
        assert comparison.is_exact(answer)
    close = Answer(plan=PLAN, asked=DELTA, bounds=bounds)
    assert float(comparison.proven_text(close)) <= value * 1.01
