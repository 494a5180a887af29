"""Poisson subsampling: published numbers, dp_accounting, and a bound from below."""

import math

import pytest

from accounting import lower_bounds, profiles
from accounting.core import accountant
from accounting.core.samplers import poisson
from accounting.core.samplers.poisson import probability
from accounting.lower_bounds import delta_of
from tests.accounting.plans import delta_bounds, make_plan
from tests.accounting.published import DELTA

#: Noise multipliers at epsilon 5, delta 2.7e-8: (batch size, epochs) -> value.  They
#: were found with a tolerance of 5e-4 and a coarser grid.
NOISE = {
    (1024, 1): 0.4156,
    (8192, 1): 0.4698,
    (65536, 1): 0.5472,
    (262144, 1): 0.6245,
    (1024, 5): 0.4322,
    (8192, 5): 0.4921,
    (65536, 5): 0.5850,
    (262144, 5): 0.6888,
}
#: epsilon -> noise at one and at five epochs of batches of 65,536.
NOISE_BY_EPSILON = {
    0.5: (0.9665, 1.1807),
    1: (0.8378, 0.8964),
    4: (0.5895, 0.6264),
    10: (0.4323, 0.4753),
    32: (0.2924, 0.3390),
}


def check_least_noise(plan, epsilon, low, high):
    """The least noise lies between: delta falls with it, and is asked at both."""
    at_low, at_high = (
        accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon).guarantee
        for noise in (low, high)
    )
    assert at_high <= DELTA < at_low


@pytest.mark.parametrize(("batch_size", "epochs"), NOISE)
def test_published_noise_by_batch_size(criteo_plan, batch_size, epochs):
    plan, expected = (
        criteo_plan("poisson", batch_size, epochs),
        NOISE[batch_size, epochs],
    )
    check_least_noise(plan, 5.0, 0.999 * expected, 1.001 * expected)


@pytest.mark.parametrize("epsilon", NOISE_BY_EPSILON)
def test_published_noise_by_epsilon(criteo_plan, epsilon):
    for epochs, expected in zip((1, 5), NOISE_BY_EPSILON[epsilon], strict=True):
        plan = criteo_plan("poisson", num_epochs=epochs)
        # One published value (epsilon 0.5, five epochs) is off; see the next test.
        if (epsilon, epochs) != (0.5, 5):
            # Published on a coarse grid, so up to 0.1 % too high: dp_accounting on one
            # of 2e-5 agrees with ours (0.8955 at epsilon 1, where 0.8964 is listed).
            check_least_noise(plan, epsilon, 0.9985 * expected, 1.0005 * expected)


#: noise 0.35, T = 1000, q = 1/1000: epsilon -> dp_accounting's pessimistic and
#: optimistic delta at a spacing of 1e-3.
EXAMPLE = {
    0.5: (1.129927e-01, 9.206332e-02),
    2: (3.248833e-02, 2.735203e-02),
    6: (1.100657e-03, 8.981048e-04),
    10: (2.487235e-05, 2.011457e-05),
}


@pytest.mark.parametrize("epsilon", EXAMPLE)
def test_published_delta_curve(epsilon):
    plan = make_plan("poisson", 1000, 1, 1000)
    answer = delta_bounds(plan, noise_multiplier=0.35, epsilon=epsilon)
    pessimistic, optimistic = EXAMPLE[epsilon]
    assert optimistic <= answer.lower <= answer.upper <= pessimistic * (1 + 1e-4)
    assert answer.upper <= answer.lower * 1.01


@pytest.mark.parametrize(
    ("noise", "size", "steps", "delta", "published"),
    [
        (4.0, (1024, 50_000), 10_000, 1e-5, 2.09245),
        (2.5, (16384, 1_281_167), 72_000, 8e-7, 7.490),
        (2.5, (32768, 1_281_167), 18_000, 8e-7, 7.492),
        (3.0, (4096, 50_000), 2_500, 1e-5, 6.580),
    ],
)
def test_published_epsilon(noise, size, steps, delta, published):
    plan = make_plan("poisson", size[1], size[0], steps)
    answer = lower_bounds.epsilon(plan, noise_multiplier=noise, delta=delta)
    # The published values are upper bounds too, on coarser grids: 0.4 % at most.
    assert answer.lower <= answer.upper <= published * (1 + 1e-5)
    assert published <= answer.upper * 1.005
    assert answer.upper <= answer.lower * 1.001


def test_without_noise_only_absence_protects():
    plan = make_plan("poisson", 10**6, 1, 10)
    took_part = -math.expm1(10 * math.log1p(-1e-6))
    answer = delta_bounds(plan, noise_multiplier=0.0, epsilon=1.0)
    assert answer.upper == pytest.approx(took_part, rel=1e-9)
    assert answer.lower == pytest.approx(took_part, rel=1e-9)
    assert accountant.epsilon(plan, noise_multiplier=0.0, delta=1e-6).upper == math.inf
    assert accountant.epsilon(plan, noise_multiplier=0.0, delta=1e-4).upper < 1e-4


@pytest.mark.parametrize("noise", [0.3, 1.0, 30.0])
def test_bounds_are_tight(noise):
    """Fails if either side forgets an error: they would cross, or move apart."""
    plan = make_plan("poisson", 2000, 13, 700)
    for delta in (1e-2, 1e-6, 1e-12):
        answer = lower_bounds.epsilon(plan, noise_multiplier=noise, delta=delta)
        assert answer.lower <= answer.upper
        assert answer.upper <= answer.lower * 1.002 + 1e-4


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_raw_bounds_meet_within_their_errors(steps):
    """Before the lower is cut to the upper: seen to fail with a rate off by 2 %."""
    plan = make_plan("poisson", 100, 3, steps)
    for epsilon in (0.1, 0.5, 2.0):
        upper = poisson.OF_EXAMPLE.delta(plan, 0.8, epsilon).guarantee
        lower = delta_of(plan, 0.8, epsilon)
        assert upper * 0.995 <= lower <= upper


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.01, 5.0])
def test_losses_that_hardly_vary_have_a_delta(epsilon):
    """Next to no noise: adding an example is a loss of one value, but for 1e-291."""
    plan = make_plan("poisson", 16_000, 32, 50)
    found, added = profiles.run(plan, 0.078125).deltas(epsilon)
    q, steps = 0.002, 50
    # Without noise one sees whether the example took part: (1 - q)^T e^epsilon is left.
    seen = max(0.0, 1 - (1 - q) ** steps * math.exp(epsilon))
    assert added == pytest.approx(seen, rel=1e-4, abs=1e-12)
    assert seen * (1 - 1e-6) <= found <= 1 - (1 - q) ** steps + 1e-12


def test_one_step_with_next_to_no_noise_has_an_epsilon():
    """The loss of a step is a constant but for one example in a million."""
    plan = make_plan("poisson", 1_000_000, 1, 1)
    rare = accountant.epsilon(plan, noise_multiplier=0.0078, delta=1e-4)
    assert rare.guarantee == 0.0  # above the probability of taking part
    assert accountant.epsilon(
        plan, noise_multiplier=0.0078, delta=1e-7
    ).guarantee == pytest.approx(8235, rel=0.1)


def test_the_sampling_probability_is_never_rounded_down():
    """Half of all fractions are nearer to the float below."""
    plans = [make_plan("poisson", 10**6 + n, 1 + n, 10) for n in range(200)]
    assert all(probability(plan) >= plan.sampling_probability for plan in plans)
    assert any(float(p.sampling_probability) < p.sampling_probability for p in plans)
