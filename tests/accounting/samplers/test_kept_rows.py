"""How many rows of a user a truncated step keeps, and the lower bound of it."""

import itertools
import math

import pytest

from accounting import accountant
from accounting.core.plan import DpSgdPlan
from accounting.lower_bounds import kept_rows

USERS = {"max_examples_per_user": 3}


def plan(**changes):
    fields = {
        "num_examples": 9,
        "expected_batch_size": 3,
        "num_steps": 4,
        "truncated_batch_size": 4,
    }
    return DpSgdPlan(sampler="truncated-poisson", **{**fields, **changes})


def test_the_number_of_rows_kept_is_that_of_all_draws():
    """All subsets of nine rows that may be sampled, and all that may be kept."""
    count, rate = 3, 1 / 3
    kept = dict.fromkeys(range(count + 1), 0.0)
    for size in range(10):
        for drawn in itertools.combinations(range(9), size):
            chance = rate**size * (1 - rate) ** (9 - size)
            choices = list(itertools.combinations(drawn, min(size, 4)))
            for chosen in choices:
                own = sum(row < count for row in chosen)
                kept[own] += chance / len(choices)
    for component in kept_rows.components(plan(), count):
        exact = kept[int(component.mean)]
        assert exact * (1 - 1e-8) <= component.upper < exact
        assert component.lower == 0.0


@pytest.mark.parametrize("cap", [100, 125, 170])
def test_bounds_of_users_enclose_and_meet_where_the_cap_does_not_bind(small_plan, cap):
    capped = small_plan("truncated-poisson", truncated_batch_size=cap)
    found = accountant.epsilon(
        capped, noise_multiplier=1.0, delta=1e-5, both=True, **USERS
    )
    # Poisson batches at the same noise have 3.027.
    assert 2.0 < found.lower <= found.guarantee
    if cap == 170:
        assert found.guarantee <= 1.005 * found.lower
    else:
        assert math.isfinite(found.guarantee)
