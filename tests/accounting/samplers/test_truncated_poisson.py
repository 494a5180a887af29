"""Truncated Poisson subsampling: both routes, and the tail behind them."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from accounting import audits, lower_bounds
from accounting.core import accountant
from accounting.core import plan as plans
from accounting.core.pld import dominating_pairs
from accounting.core.pld.privacy_profile import StepsProfile
from accounting.core.samplers import poisson, truncated_poisson
from accounting.core.validation import InputError
from accounting.lower_bounds import delta_of
from tests.accounting.plans import composed, make_plan
from tests.accounting.published import DELTA


def plan(size, cap, num_examples, steps):
    return make_plan("truncated-poisson", num_examples, size, steps, cap=cap)


def crowded_and_kept(num_examples, rate, cap):
    """That B others are sampled, and that the example is then kept (Ganesh 2025)."""
    crowded = stats.binom.sf(cap - 1, num_examples - 1, rate)
    truncated = stats.binom.sf(cap, num_examples, rate)
    return crowded, truncated * cap / (num_examples * crowded)


def published_steps(num_examples, rate, cap, noise):
    """Ganesh's own mixture: a ghost that displaces another counts as an example."""
    crowded, kept = crowded_and_kept(num_examples, rate, cap)
    pair = dominating_pairs.replace_pair(kept, noise / 2)
    return tuple(
        [(1 - crowded, alone), (crowded, pair)]
        for [(_, alone)] in poisson.steps(rate, noise)
    )


@pytest.mark.parametrize(
    ("cap", "published"),
    [
        (1024, 6.87451),
        (1056, 4.06910),
        (1088, 2.45377),
        (1120, 2.11659),
        (1152, 2.0931),
    ],
)
def test_published_epsilon_of_the_mixture(cap, published):
    """Ghosts displace rows by less than examples do: ours is at most the published."""
    steps = published_steps(50_000, 1024 / 50_000, cap, 4.0)
    found = StepsProfile(directions=steps, num_steps=10_000).epsilon(1e-5)
    assert found == pytest.approx(published, rel=5e-5)
    answer = accountant.epsilon(
        plan(1024, cap, 50_000, 10_000), noise_multiplier=4.0, delta=1e-5
    )
    assert answer.upper <= found * (1 + 1e-6)
    assert answer.method == truncated_poisson.MIXTURE


def masses(weight, mean, edges, noise):
    """Probabilities between edges of a normal that is moved with this weight."""
    at, moved = (np.diff(special.ndtr((edges - to) / noise)) for to in (0, mean))
    return (1 - weight) * at + weight * moved


def test_the_mixture_is_what_dp_accounting_composes():
    """Both members cut into cells.  Seen to fail with a ghost that displaces 2 or 0."""
    examples, size, cap, steps, noise = 50, 2, 3, 20, 1.5
    rate = size / examples
    crowded, kept = crowded_and_kept(examples, rate, cap)
    edges = np.concatenate(([-np.inf], np.linspace(-6, 6, 1201) * noise, [np.inf]))
    present, ghost = (
        np.concatenate(
            [
                (1 - crowded) * masses(rate, own, edges, noise),
                crowded * masses(kept, other, edges, noise),
            ]
        )
        for own, other in ((1, 2), (0, -1))
    )
    low, high = composed((present, ghost), steps, 1e-6)
    found = accountant.epsilon(
        plan(size, cap, examples, steps), noise_multiplier=noise, delta=1e-6
    )
    assert found.method == truncated_poisson.MIXTURE
    assert low * 0.998 <= found.upper <= high * 1.002


@pytest.mark.parametrize(
    ("deviations", "tail", "published"),
    [
        (0, 4.990e-01, 32.865),
        (2, 2.265e-02, 19.347),
        (4, 3.224e-05, 11.179),
        (6, 1.084e-09, 4.995),
        (7, 1.504e-12, 4.994),
        (8, 8.023e-16, 4.994),
    ],
)
def test_published_cost_of_a_small_truncated_batch_size(deviations, tail, published):
    example = plan(65_536, 65_536 + 256 * deviations, 36_800_000, 562)
    assert truncated_poisson.truncation_probability(example) == pytest.approx(
        tail, rel=1e-3
    )
    # The zero-out column.  Those of other relations are not claimed: under replace-one
    # the privacy unit differs and Poisson itself costs more; under add-or-remove n is
    # not public, and Pr[Bin(n, q) > B] depends on it.
    rate, cap = 65_536 / 36_800_000, 65_536 + 256 * deviations
    mixture = published_steps(36_800_000, rate, cap, 0.5472)
    found = StepsProfile(directions=mixture, num_steps=562).epsilon(DELTA)
    assert found == pytest.approx(published, abs=1.5e-3)
    answer = accountant.epsilon(example, noise_multiplier=0.5472, delta=DELTA)
    # Revealed rows are better for so little noise.
    assert 0.5 * found < answer.upper <= found * (1 + 1e-4)
    additive = truncated_poisson.OF_EXAMPLE.additive_epsilon(example, 0.5472, DELTA)
    if deviations < 8:
        assert additive == float("inf")
    else:
        assert additive == pytest.approx(4.994, abs=1.5e-3)


#: Expected batch size -> steps of an epoch, smallest truncated batch size at one and at
#: five epochs, and the first of them over the expected batch size.
SMALLEST = {
    1024: (35938, 1328, 1334, 1.2969),
    8192: (4492, 9007, 9023, 1.0995),
    65536: (562, 67754, 67801, 1.0338),
    262144: (140, 266474, 266569, 1.0165),
}


@pytest.mark.parametrize("size", SMALLEST)
def test_published_smallest_truncated_batch_size(size):
    steps, *published, ratio = SMALLEST[size]
    assert published[0] / size == pytest.approx(ratio, abs=5.1e-5)
    for epochs, expected in zip((1, 5), published, strict=True):
        arguments = {
            "num_examples": 36_800_000,
            "expected_batch_size": size,
            "num_steps": steps * epochs,
            "epsilon": 5.0,
            "delta": DELTA,
        }
        assert accountant.smallest_truncated_batch_size(**arguments) == expected


@pytest.mark.parametrize(
    ("trials", "rate", "threshold"),
    [(1000, 0.01, 40), (50_000, 0.02, 1200), (36_800_000, 65536 / 36.8e6, 68_600)],
)
def test_binomial_tail_far_out(trials, rate, threshold):
    """Against fifty digits, down to 1e-30 and beyond; and never below."""
    mpmath.mp.dps = 50
    q, first = mpmath.mpf(rate), threshold + 1
    term = mpmath.binomial(trials, first) * q**first * (1 - q) ** (trials - first)
    exact = mpmath.mpf(0)
    while first <= trials and term > exact * mpmath.mpf("1e-20"):
        exact += term
        term *= q * (trials - first) / ((1 - q) * (first + 1))
        first += 1
    tail = truncated_poisson.tail_probability(trials, rate, threshold)
    assert float(exact) <= tail <= float(exact) * (1 + 1e-8)


def test_no_plan_has_more_examples_than_tails_are_accurate_for():
    """Beyond 1e12 tails were seen 3e-9 below the exact ones, at 7e15 9e-8."""
    below = truncated_poisson.tail_probability(
        7_203_563_127_191_110, 0.4311040879474748, 3_105_486_557_984_963
    )
    assert below < 5.10740992e-137  # fifty digits: 5.10740992800...e-137
    assert make_plan("poisson", plans.MOST_EXAMPLES, 1, 1).num_examples == 10**12
    with pytest.raises(InputError, match="num_examples=1000000000001 <= 1000000000000"):
        make_plan("truncated-poisson", plans.MOST_EXAMPLES + 1, 1, 1, cap=1)


def test_probability_that_any_step_is_truncated_by_hand():
    """Both of two examples are in a step with probability 1/4; at most one is kept."""
    for steps, expected in ((1, 0.25), (3, 0.75), (10, 1.0)):
        found = audits.any_truncation_probability(plan(1, 1, 2, steps))
        assert found == pytest.approx(expected, rel=1e-8)
    open_plan = make_plan("poisson", 2, 1, 3)
    assert audits.any_truncation_probability(open_plan) == 0.0


@pytest.mark.parametrize(
    ("relation", "distance"), [("REPLACE_SPECIAL", 1), ("ADD_OR_REMOVE_ONE", 2)]
)
def test_less_noise_than_is_composed_has_a_closed_form(relation, distance):
    """A ghost keeps the place of what is absent; without one, another row takes it."""
    # Truncation alone costs more than delta: the additive bound has no epsilon.
    small = plan(100, 110, 10_000, 10)
    assert truncated_poisson.OF_EXAMPLE.additive_epsilon(small, 0.004, 1e-5) == math.inf
    asked = {"noise_multiplier": 0.004, "neighboring_relation": relation}
    answer = accountant.epsilon(small, delta=1e-5, **asked)
    assert answer.method == truncated_poisson.CLOSED
    # Ten steps in which the example takes part.
    noise = 0.004 / distance / math.sqrt(10)
    assert answer.upper == dominating_pairs.gaussian_epsilon(noise, 1e-5) < math.inf
    delta = accountant.delta(small, epsilon=answer.upper, **asked)
    assert delta.method == truncated_poisson.CLOSED
    assert delta.upper <= 1e-5


@pytest.mark.parametrize(
    ("example", "noise", "delta", "published"),
    [
        (plan(100, 120, 10_000, 100), 1.0, 1e-5, 0.717),
        (plan(5_000, 5_100, 50_000, 50), 2.0, 1e-6, 1.913),
        (plan(600, 620, 60_000, 1000), 1.1, 1e-5, 1.507),
    ],
)
def test_published_lower_bound_where_the_cap_binds(example, noise, delta, published):
    def log_excess(epsilon):
        value = delta_of(example, noise, epsilon)
        return math.log(value / delta)

    assert log_excess(published + 6e-4) < 0.0 < log_excess(published - 6e-4)
    most = accountant.delta(example, noise_multiplier=noise, epsilon=published)
    assert delta < most.guarantee


@pytest.mark.parametrize("noise", [0.0, 0.004, 0.5, 2.0])
@pytest.mark.parametrize("cap", [1, 2, 4])
def test_a_lower_bound_is_below_the_exact_delta_of_one_step(cap, noise):
    """Under both relations: where other gradients are zero, only being kept counts."""
    for epsilon in (0.0, 1.0):
        example = plan(1, cap, 4, 1)
        rate = lower_bounds.kept_rows(example, 1)[0].upper * (1 + 2e-9)
        exact = poisson.steps(rate, max(noise, 1e-3))[0][0][1]
        x = np.linspace(-30, 31, 400_001) * max(noise, 1e-3)
        density = exact.upper_density(x)
        gain = -np.expm1(np.minimum(epsilon - exact.loss(x), 0.0))
        truth = float(density @ gain) * (x[1] - x[0]) if noise > 0.1 else rate
        found = delta_of(example, noise, epsilon)
        assert found <= truth * (1 + 1e-9)
        if noise == 0.0 or noise > 0.1:
            assert found >= 0.999 * truth


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_delta_never_rises_with_epsilon(noise):
    """Though the correction does.  Seen to fail with it taken at epsilon itself."""
    capped = plan(100, 180, 10_000, 200)
    deltas = [
        accountant.delta(capped, noise_multiplier=noise, epsilon=epsilon).guarantee
        for epsilon in (0.5, 4.0, 12.0, 20.0, 40.0, 60.0)
    ]
    for before, after in itertools.pairwise(deltas):
        assert after <= before * (1 + 1e-5)
