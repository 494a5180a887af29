"""How many rows of a user a truncated step keeps, and the lower bound of it."""

import itertools
import math

import pytest

from accounting import lower_bounds
from tests.accounting.plans import make_plan

USERS = {"max_examples_per_user": 3}


@pytest.mark.parametrize(
    ("rows", "expected", "cap", "count"),
    [(9, 3, 4, 3), (4, 1, 1, 1), (5, 2, 2, 1), (4, 4, 4, 1), (4, 3, 4, 1)],
)
def test_the_number_of_rows_kept_is_that_of_all_draws(rows, expected, cap, count):
    """All subsets of the rows that may be sampled, and all that may be kept."""
    rate = expected / rows
    kept = dict.fromkeys(range(count + 1), 0.0)
    for size in range(rows + 1):
        for drawn in itertools.combinations(range(rows), size):
            chance = rate**size * (1 - rate) ** (rows - size)
            choices = list(itertools.combinations(drawn, min(size, cap)))
            for chosen in choices:
                own = sum(row < count for row in chosen)
                kept[own] += chance / len(choices)
    asked = make_plan("truncated-poisson", rows, expected, 4, cap=cap)
    for component in lower_bounds.kept_rows(asked, count):
        exact = kept[int(component.mean)]
        assert exact * (1 - 1e-8) <= component.upper < exact
        assert component.lower == 0.0


@pytest.mark.parametrize("cap", [100, 125, 170])
def test_bounds_of_users_enclose_and_meet_where_the_cap_does_not_bind(small_plan, cap):
    capped = small_plan("truncated-poisson", truncated_batch_size=cap)
    found = lower_bounds.epsilon(capped, noise_multiplier=1.0, delta=1e-5, **USERS)
    # Poisson batches at the same noise have 3.027.
    assert 2.0 < found.lower <= found.guarantee
    if cap == 170:
        assert found.guarantee <= 1.005 * found.lower
    else:
        assert math.isfinite(found.guarantee)
