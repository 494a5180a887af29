"""How far a coarser grid is from the limit of fine ones."""

from __future__ import annotations

import pytest

from accounting.pld.privacy_profile import COARSE, FINE, MEDIUM, Profile
from accounting.samplers import poisson
from tests.accounting.published import DELTA, criteo_plan


@pytest.mark.parametrize(("size", "noise"), [(65536, 0.5472), (262144, 0.8)])
def test_the_cost_of_a_grid_is_what_its_fineness_says(size: int, noise: float) -> None:
    plan = criteo_plan("poisson", batch_size=size)

    def epsilon(fineness: float) -> float:
        step = poisson.steps(poisson.probability(plan), noise)
        return Profile(
            directions=step, num_steps=plan.num_steps, fineness=fineness
        ).epsilon(DELTA)

    limit = epsilon(1e-7)
    for fineness, cost in ((FINE, 1e-4), (MEDIUM, 2e-4), (COARSE, 2e-3)):
        assert limit <= epsilon(fineness) <= limit * (1 + cost)
