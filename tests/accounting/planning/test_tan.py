"""Constant total noise: the closed form, and its limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from accounting.planning.sweeps import Configuration


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


def test_only_poisson_batches_with_noise(
    small_plan: Callable[[str], DpSgdPlan],
) -> None:
    with pytest.raises(InputError, match="noise_multiplier=0"):
        configuration(10, 0.0, 20, 100)
    with pytest.raises(InputError, match="sampler='dynamic-shuffle'"):
        Configuration(plan=small_plan("dynamic-shuffle"), noise_multiplier=2.0)
