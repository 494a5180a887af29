"""The published setting that many tests share, and how hypothesis runs."""

import pytest
from hypothesis import settings

from accounting.plan import DpSgdPlan

# The machines that run this are shared: a slow example is not a failure.
settings.register_profile("accounting", deadline=None, derandomize=True)
settings.load_profile("accounting")

#: Batch size -> steps of one epoch over 36.8 million examples.
_STEPS = {
    1024: 35938,
    2048: 17969,
    4096: 8984,
    8192: 4492,
    16384: 2246,
    32768: 1123,
    65536: 562,
    131072: 281,
    262144: 140,
}


@pytest.fixture(scope="session")
def criteo_plan():
    """Makes plans with sampling probability exactly 1 / steps per epoch."""

    def make(sampler, batch_size=65536, num_epochs=1, **changes):
        steps = _STEPS[batch_size]
        fields = {
            "sampler": sampler,
            "num_examples": batch_size * steps,
            "expected_batch_size": batch_size,
            "num_steps": steps * num_epochs,
            "num_epochs": num_epochs,
        }
        return DpSgdPlan(**{**fields, **changes})

    return make


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
