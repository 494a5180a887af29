"""Constant total noise: what a simulation keeps, the closed form, and its limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import accountant
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from accounting.planning import tan
from accounting.planning.tan import Configuration


def configuration(
    size: int, noise: float, steps: int, num_examples: int, *, cap: int | None = None
) -> Configuration:
    plan = DpSgdPlan(
        sampler="poisson" if cap is None else "truncated-poisson",
        num_examples=num_examples,
        expected_batch_size=size,
        num_steps=steps,
        truncated_batch_size=cap,
    )
    return Configuration(plan=plan, noise_multiplier=noise)


IMAGENET = configuration(16384, 2.5, 72_000, 1_281_167)


@given(
    reference=st.integers(2, 10_000),
    part=st.floats(0, 1),
    noise=st.floats(0.01, 100),
    steps=st.integers(1, 100_000),
)
def test_simulated_keeps_steps_noise_over_batch_size_and_eta(
    reference: int, part: float, noise: float, steps: int
) -> None:
    large = configuration(reference, noise, steps, 20_000)
    size = 1 + int(part * (reference - 2))
    small = large.simulated(size, epsilon=8, delta=1e-6)
    assert small.plan.num_steps == steps
    assert small.plan.num_examples == 20_000
    assert small.plan.expected_batch_size == size
    assert small.noise_multiplier / size == pytest.approx(noise / reference, rel=1e-12)
    assert small.eta == pytest.approx(large.eta, rel=1e-12)


def test_truncated_batches_get_the_cap_that_costs_nothing() -> None:
    large = configuration(256, 2.0, 120, 16_000, cap=400)
    small = large.simulated(32, epsilon=3, delta=1e-6)
    cap = accountant.smallest_truncated_batch_size(
        num_examples=16_000,
        expected_batch_size=32,
        num_steps=120,
        epsilon=3,
        delta=1e-6,
    )
    assert small.plan.truncated_batch_size == cap > 32
    assert small.eta == pytest.approx(large.eta, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "published", "epsilon"),
    [
        (4096, 0.625, 20),
        (512, 0.078, 6.6e5),
        (128, 0.0195, 9.7e7),
    ],
)
def test_published_noise_of_simulated_runs(
    size: int, published: float, epsilon: float
) -> None:
    small = IMAGENET.simulated(size, epsilon=8, delta=8e-7)
    # Three digits are printed.
    assert small.noise_multiplier == pytest.approx(published, rel=6e-3)
    assert small.estimate(delta=8e-7).epsilon == pytest.approx(8.215, abs=6e-4)
    # The closed form is the same; the truth is not.  Renyi accounting, which was
    # published with two digits, is looser.
    found = accountant.epsilon(
        small.plan, noise_multiplier=small.noise_multiplier, delta=8e-7
    ).upper
    assert found is not None
    assert 18 < found <= 1.02 * epsilon


@pytest.mark.parametrize(
    ("size", "noise", "steps", "num_examples", "delta", "eta", "epsilon"),
    [
        (16384, 2.5, 72_000, 1_281_167, 8e-7, 0.9706, 8.215),
        (32768, 2.5, 18_000, 1_281_167, 8e-7, 0.9706, 8.215),
        (4096, 3.0, 2_500, 50_000, 1e-5, 0.9654, 7.484),
    ],
)
def test_published_eta_and_closed_form(
    size: int,
    noise: float,
    steps: int,
    num_examples: int,
    delta: float,
    eta: float,
    epsilon: float,
) -> None:
    estimate = configuration(size, noise, steps, num_examples).estimate(delta=delta)
    assert estimate.eta == pytest.approx(eta, abs=6e-5)
    assert estimate.epsilon == pytest.approx(epsilon, abs=6e-4)
    assert estimate.warning is None


def test_closed_form_warns_below_its_range() -> None:
    small = configuration(128, 0.0195, 72_000, 1_281_167)
    found = small.estimate(delta=8e-7)
    assert found.warning is not None
    assert "below 2" in found.warning
    true = accountant.epsilon(small.plan, noise_multiplier=0.0195, delta=8e-7).upper
    assert true is not None
    assert true > 100 * found.epsilon
    assert (
        configuration(128, 2.0, 72_000, 1_281_167).estimate(delta=8e-7).warning is None
    )


@pytest.mark.parametrize("size", [0, 16384, 20_000])
def test_a_simulated_size_is_at_least_1_and_smaller_than_the_reference(
    size: int,
) -> None:
    with pytest.raises(InputError, match=f"simulated batch size={size}"):
        IMAGENET.simulated(size, epsilon=8, delta=8e-7)
    with pytest.raises(InputError, match=f"simulated batch size={size}"):
        tan.check_sizes((128, size), 16384)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((), "two sizes"), ((128,), "two sizes"), ((8, 16, 8), "once")],
)
def test_sizes_that_give_no_line_are_refused(
    sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tan.check_sizes(sizes, 16384)
    tan.check_sizes((128, 256), 16384)


def test_only_poisson_batches_with_noise(
    small_plan: Callable[[str], DpSgdPlan],
) -> None:
    with pytest.raises(InputError, match="noise_multiplier=0"):
        configuration(10, 0.0, 20, 100)
    with pytest.raises(InputError, match="sampler='dynamic-shuffle'"):
        Configuration(plan=small_plan("dynamic-shuffle"), noise_multiplier=2.0)
