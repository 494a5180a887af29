"""Second opinions: Renyi accounting is looser, TAN's form warns outside its range."""

import pytest

from accounting import bounds, cross_checks
from accounting.plan import DpSgdPlan
from accounting.validation import InputError


def plan(size, num_examples, steps):
    return DpSgdPlan(
        sampler="poisson",
        num_examples=num_examples,
        expected_batch_size=size,
        num_steps=steps,
    )


@pytest.mark.parametrize(
    ("size", "noise", "steps", "num_examples", "delta", "eta", "tan", "renyi"),
    [
        (16384, 2.5, 72_000, 1_281_167, 8e-7, 0.9706, 8.215, 7.954),
        (32768, 2.5, 18_000, 1_281_167, 8e-7, 0.9706, 8.215, 7.980),
        (4096, 3.0, 2_500, 50_000, 1e-5, 0.9654, 7.484, 7.098),
    ],
)
def test_published_values(size, noise, steps, num_examples, delta, eta, tan, renyi):
    example = plan(size, num_examples, steps)
    arguments = {"noise_multiplier": noise, "delta": delta}
    estimate = cross_checks.tan_estimate(example, **arguments)
    assert estimate.eta == pytest.approx(eta, abs=6e-5)
    assert estimate.epsilon == pytest.approx(tan, abs=6e-4)
    assert estimate.warning is None
    found = cross_checks.renyi_epsilon(example, **arguments)
    # Finer orders than the published ones: at most as large, hardly smaller.
    assert found == pytest.approx(renyi, rel=5e-4)
    assert bounds.epsilon(example, **arguments).upper < found


@pytest.mark.parametrize("eta_and_epsilon", [(0.13, 0.991), (0.95, 8.021)])
def test_closed_form_by_hand(eta_and_epsilon):
    eta, expected = eta_and_epsilon
    # q = 1/10 and T = 200 make eta = 1 / s.
    example = plan(100, 1000, 200)
    found = cross_checks.tan_estimate(example, noise_multiplier=1 / eta, delta=8e-7)
    assert found.eta == pytest.approx(eta)
    assert found.epsilon == pytest.approx(expected, abs=6e-4)


def test_tan_warns_below_its_range():
    example = plan(128, 1_281_167, 72_000)
    found = cross_checks.tan_estimate(example, noise_multiplier=0.0195, delta=8e-7)
    assert "below 2" in found.warning
    true = bounds.epsilon(example, noise_multiplier=0.0195, delta=8e-7).upper
    assert true > 100 * found.epsilon


@pytest.mark.parametrize("order", [1.5, 4.0, 32.0])
def test_renyi_divergence_agrees_with_dp_accounting(order):
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant([order])
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.02, gaussian), 50)
    found = cross_checks.renyi_divergence(
        plan(20, 1000, 50), noise_multiplier=1.3, order=order
    )
    assert found == pytest.approx(accountant._rdp[0], rel=1e-6)


def test_only_for_poisson(small_plan):
    with pytest.raises(InputError, match="sampler='deterministic'"):
        cross_checks.renyi_epsilon(
            small_plan("deterministic"), noise_multiplier=1.0, delta=1e-5
        )
