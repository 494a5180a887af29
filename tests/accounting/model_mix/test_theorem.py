"""ModelMix's accountant: the authors' numbers, its limits, and the exact mechanism."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting.claims import model_mix
from accounting.claims.model_mix import Mixing, log_density
from accounting.core import accountant
from accounting.core.samplers import truncated_poisson
from tests.accounting.plans import make_plan

#: The authors' repository junwan0224/ModelMix: CIFAR-10 with a residual network.
DEFAULT = make_plan("poisson", 50_000, 1500, 3400)
NOISE, CLIP = 0.335, 20.0


def mixing(mix_width=0.15, linf_factor=100):
    return Mixing(mix_width=mix_width, l2_norm_clip=CLIP, linf_factor=linf_factor)


def papers_epsilon(plan, mixed, noise, delta, most_order=19):
    """The conversion that the paper and its MATLAB code use, and the order."""
    divergences = plan.num_steps * model_mix.renyi_divergences(
        float(plan.sampling_probability),
        noise,
        mixed.width(plan),
        mixed.linf_factor,
        most_order,
        slack=0.0,
    )
    orders = np.arange(2, most_order + 1)
    values = divergences + math.log(1 / delta) / (orders - 1)
    return float(values.min()), int(orders[values.argmin()])


def test_the_authors_default_configuration_has_epsilon_8():
    epsilon, order = papers_epsilon(DEFAULT, mixing(), NOISE, 1e-5)
    assert epsilon == pytest.approx(7.99997, abs=5e-6)
    assert order == 4
    without_cap = papers_epsilon(DEFAULT, mixing(linf_factor=1), NOISE, 1e-5)[0]
    assert without_cap == pytest.approx(450, abs=1)


@pytest.mark.parametrize(
    ("linf_factor", "noise", "expected"),
    [
        # Section 4.3 does not state its noise; these are for noise at which a Renyi
        # accountant of all orders, or of integers alone, gives DP-SGD epsilon 200.
        (25, 0.387, (16.1, 8.3, 5.1)),
        (100, 0.387, (14.3, 7.6, 4.7)),
        (1, 0.387, (141, 77, 44)),
        (25, 0.4675, (12.2, 6.9, 4.3)),
        (100, 0.4675, (11.6, 6.5, 4.1)),
    ],
)
def test_the_example_of_section_4_3(linf_factor, noise, expected):
    plan = make_plan("poisson", 50_000, 1000, 5000)
    for width, epsilon in zip((0.075, 0.15, 0.3), expected, strict=True):
        mixed = mixing(width, linf_factor)
        found = papers_epsilon(plan, mixed, noise, 1e-5, most_order=32)[0]
        # The noise has three digits.
        assert found == pytest.approx(epsilon, rel=0.015)


@pytest.mark.parametrize("rate", [0.001, 0.03, 0.5, 1.0])
def test_width_0_is_the_poisson_subsampled_gaussian(rate):
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant

    orders = list(range(2, 33))
    accountant = rdp_privacy_accountant.RdpAccountant(orders)
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian))
    # The cap on coordinates changes nothing without mixing.
    for linf_factor in (1, 100):
        found = model_mix.renyi_divergences(rate, 1.3, 0.0, linf_factor, 32, slack=0.0)
        np.testing.assert_allclose(found, accountant._rdp, rtol=1e-9)
        assert (found >= accountant._rdp * (1 - 1e-12)).all()


# -- the exact mechanism ---------------------------------------------------------------


def pair(noise, width, shift):
    """Log-densities without and with the shift, in clip norms, on a fine grid."""
    reach = width / 2 + 14 * noise
    x = np.arange(-reach, reach + 9 * shift, noise / 40)
    here, there = (log_density((x - s) / noise, width / noise) for s in (0.0, shift))
    return x[1] - x[0], here - math.log(noise), there - math.log(noise)


def both_moments(rate, first, second, weight, order):
    mixture = np.logaddexp(math.log(1 - rate) + first, math.log(rate) + second)
    remove = np.exp(order * mixture + (1 - order) * first).sum() * weight
    add = np.exp(order * first + (1 - order) * mixture).sum() * weight
    return remove, add


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize(("noise", "width"), [(0.4, 0.5), (1.0, 8.0), (2.0, 3.0)])
def test_removing_is_the_worse_direction_and_bounded(rate, noise, width):
    weight, first, second = pair(noise, width, 1.0)
    found = model_mix.renyi_divergences(rate, noise, width, 1, 9, slack=0.0)
    for order in range(2, 10):
        remove, add = both_moments(rate, first, second, weight, order)
        assert remove >= add * (1 - 1e-9)
        exact = math.log(remove) / (order - 1)
        assert found[order - 2] == pytest.approx(exact, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_delta_is_above_that_of_the_exact_pair_of_one_step(epsilon):
    plan = make_plan("poisson", 100, 20, 1)
    mixed = Mixing(mix_width=0.15, l2_norm_clip=1.0)
    weight, first, second = pair(0.5, 3.0, 1.0)
    first, second = np.exp(first), np.exp(second)
    mixture = 0.8 * first + 0.2 * second
    found = mixed.delta(plan, noise_multiplier=0.5, epsilon=epsilon)
    bound = math.exp(model_mix._log_delta(plan, mixed, 0.5, epsilon)[0])
    for p, q in ((mixture, first), (first, mixture)):
        exact = np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * weight
        assert exact <= bound
        assert exact <= found.guarantee


def test_no_split_of_a_gradient_over_coordinates_loses_more():
    random = np.random.default_rng(0)
    noise, width, linf_factor, rate, order = 0.4, 6.0, 4, 0.1, 4
    limit = model_mix.renyi_divergences(
        rate, noise, width, linf_factor, order, slack=0.0
    )[-1]
    k = np.arange(order + 1)
    chances = stats.binom.pmf(k, order, rate)
    for _ in range(30):
        # Squared coordinates of a gradient of norm 1, capped, and any wider gaps.
        squares = np.minimum(random.dirichlet(np.full(8, 0.5)), 1 / linf_factor)
        moments = np.ones(order + 1)
        for square in squares:
            wider = width * random.choice([1.0, 1.2, 3.0])
            weight, first, second = pair(noise, wider, math.sqrt(square))
            powers = first + np.multiply.outer(k, second - first)
            moments *= np.exp(powers).sum(axis=1) * weight
        assert math.log(chances @ moments) / (order - 1) <= limit * (1 + 1e-9)


# -- what the answers promise ----------------------------------------------------------


@settings(max_examples=15)
@given(
    noise=st.floats(0.2, 3.0),
    width=st.floats(0.01, 1.0),
    linf_factor=st.integers(1, 200),
    num_steps=st.integers(1, 3000),
)
def test_epsilon_falls_with_width_noise_and_p_and_rises_with_steps(
    noise, width, linf_factor, num_steps
):
    def epsilon(**changes):
        fields = {
            "noise": noise, "width": width, "p": linf_factor, "steps": num_steps,
        }  # fmt: skip
        fields |= changes
        plan = make_plan("poisson", 50_000, 1500, fields["steps"])
        mixed = mixing(fields["width"], fields["p"])
        return model_mix._untruncated_epsilon(plan, mixed, fields["noise"], 1e-5)[0]

    here = epsilon()
    assert epsilon(width=width * 1.3) <= here * (1 + 1e-9)
    assert epsilon(noise=noise * 1.3) <= here * (1 + 1e-9)
    assert epsilon(p=linf_factor + 7) <= here * (1 + 1e-9)
    assert epsilon(steps=num_steps + 50) >= here


def test_truncation_costs_what_the_coupling_says(small_plan):
    mixed = Mixing(mix_width=0.2, l2_norm_clip=1.0, linf_factor=50)
    free = small_plan("poisson")
    epsilon = 2.0
    without = math.exp(model_mix._log_delta(free, mixed, 0.6, epsilon)[0])
    for cap in (130, 150, 190):
        plan = small_plan("truncated-poisson", truncated_batch_size=cap)
        cost = truncated_poisson.truncation_delta(plan, epsilon)
        with_it = math.exp(model_mix._log_delta(plan, mixed, 0.6, epsilon)[0])
        assert with_it == pytest.approx(without + cost, rel=1e-12)
    # The mixture of Ganesh (2025) is of DP-SGD alone: it takes over where it is less.
    tight = small_plan("truncated-poisson", truncated_batch_size=130)
    found = mixed.epsilon(tight, noise_multiplier=0.6, delta=1e-6)
    assert found == accountant.epsilon(tight, noise_multiplier=0.6, delta=1e-6)


def test_where_the_cover_fails_the_bound_without_mixing_answers(monkeypatch):
    monkeypatch.setattr(model_mix, "equal_coordinates_lose_most", lambda *_: False)
    plain = accountant.epsilon(DEFAULT, noise_multiplier=NOISE, delta=1e-5)
    found = mixing().epsilon(DEFAULT, noise_multiplier=NOISE, delta=1e-5)
    assert found == plain
    delta = mixing().delta(DEFAULT, noise_multiplier=NOISE, epsilon=8.0)
    assert delta == accountant.delta(DEFAULT, noise_multiplier=NOISE, epsilon=8.0)
    noise = mixing().noise_multiplier(DEFAULT, epsilon=8.0, delta=1e-5)
    assert noise == accountant.noise_multiplier(DEFAULT, epsilon=8.0, delta=1e-5)


@pytest.mark.parametrize("cap", [None, 175, 190])
def test_the_cover_is_asked_for_every_order_that_was_used(cap, small_plan, monkeypatch):
    used, asked = [], []
    original = model_mix._untruncated_epsilon

    def spy(*arguments):
        answer = original(*arguments)
        used.append(answer[1])
        return answer

    def cover(*arguments):
        asked.append(arguments)
        return True

    monkeypatch.setattr(model_mix, "_untruncated_epsilon", spy)
    monkeypatch.setattr(model_mix, "equal_coordinates_lose_most", cover)
    sampler = "poisson" if cap is None else "truncated-poisson"
    plan = small_plan(sampler, truncated_batch_size=cap)
    mixed = Mixing(mix_width=0.2, l2_norm_clip=1.0, linf_factor=49)
    found = mixed.epsilon(plan, noise_multiplier=0.4, delta=1e-6)
    ((shift, width, order),) = asked
    assert order == max(used)
    assert f"Rényi order {order}" in found.method
    assert shift == pytest.approx(1 / (7 * 0.4))
    assert width == pytest.approx(0.2 * 100 / 0.4, rel=1e-5)


def test_the_noise_meets_its_target_and_hardly_more():
    epsilon = 2.0
    found = mixing().noise_multiplier(DEFAULT, epsilon=epsilon, delta=1e-5)
    reached, less = (
        mixing().epsilon(DEFAULT, noise_multiplier=noise, delta=1e-5).guarantee
        for noise in (found.guarantee, found.guarantee * 0.999)
    )
    assert reached <= epsilon < less
