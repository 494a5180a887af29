"""The published setting that many tests share."""

import pytest

from accounting.core.plan import DpSgdPlan
from tests.accounting import published


@pytest.fixture(scope="session")
def criteo_plan():
    """Makes plans with sampling probability exactly 1 / steps per epoch."""
    return published.criteo_plan


@pytest.fixture(scope="session")
def small_plan():
    """Makes plans of 200 steps on 10,000 examples."""

    def make(sampler, **changes):
        fields = {
            "sampler": sampler,
            "num_examples": 10_000,
            "expected_batch_size": 100,
            "num_steps": 200,
            "num_epochs": 2,
        }
        return DpSgdPlan(**{**fields, **changes})

    return make
