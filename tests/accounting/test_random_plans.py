"""Epsilon, delta and noise of random plans agree to a ten-thousandth.

The accountant chooses contours, cells and what counts as infinite loss for each of
them.  What it answers must agree all the same.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan
from tests.accounting.plans import make_plan

#: How far answers may be apart, relatively.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Question:
    """A plan with its noise and delta."""

    plan: DpSgdPlan
    noise: float
    delta: float


def draw(seed: int) -> Question:
    """Returns a question: few expected samples, single steps, all noise from 0.05."""
    rng = random.Random(seed)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    steps = 1 if rng.random() < 0.1 else round(log_uniform(1, 1e5))
    examples = round(log_uniform(100, 3e8))
    few = rng.random() < 0.3
    size = rng.randint(1, 5) if few else round(log_uniform(1, examples / 2))
    spread = rng.uniform(1, 9) if rng.random() < 0.4 else None
    fields = _poisson(examples, size, steps, spread)
    noise, delta = log_uniform(0.05, 1000.0), log_uniform(1e-12, 1e-3)
    if rng.random() < 0.1:
        fields = _balls_and_bins(steps, log_uniform(1, 500))
    return Question(plan=DpSgdPlan(**fields), noise=noise, delta=delta)


def _poisson(
    examples: int, size: int, steps: int, spread: float | None
) -> dict[str, Any]:
    """Returns a plan with a cap of ``spread`` deviations above ``size``, if given."""
    fields = {
        "sampler": "poisson",
        "num_examples": examples,
        "expected_batch_size": size,
        "num_steps": steps,
    }
    if spread is None:
        return fields
    cap = min(examples, size + math.ceil(spread * math.sqrt(size)))
    return {**fields, "sampler": "truncated-poisson", "truncated_batch_size": cap}


def _balls_and_bins(steps: int, epochs: float) -> dict[str, Any]:
    """Returns a plan of as many steps, or a few more, in equal epochs."""
    per_epoch = max(2, round(steps / epochs))
    count = max(1, steps // per_epoch)
    return {
        "sampler": "balls-and-bins",
        "num_examples": 100 * per_epoch,
        "expected_batch_size": 100,
        "num_steps": per_epoch * count,
        "num_epochs": count,
    }


#: Where delta of epsilon was 1.54 and 114 times too large, and noise 2.9 % too high.
KNOWN = [
    Question(
        plan=make_plan("truncated-poisson", 194_734, 4, 4650, cap=10),
        noise=1.087,
        delta=9.1e-9,
    ),
    Question(
        plan=make_plan("poisson", 116_000_000, 1, 1986),
        noise=192.0,
        delta=1e-10,
    ),
]
#: Of the random plans: bulk and tail of very different sizes, T = 1, tiny and huge
#: noise, truncation that counts, balls and bins.
SAMPLE = [1, 4, 12, 32, 512]


def agree(question: Question) -> None:
    plan, noise, delta = question.plan, question.noise, question.delta
    epsilon = accountant.epsilon(plan, noise_multiplier=noise, delta=delta).guarantee
    assert 0 < epsilon < math.inf
    back = accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon).guarantee
    assert back == pytest.approx(delta, rel=TOLERANCE)
    found = accountant.noise_multiplier(plan, epsilon=epsilon, delta=delta).guarantee
    assert found == pytest.approx(noise, rel=TOLERANCE)


@pytest.mark.parametrize("question", KNOWN)
def test_known_corners_agree(question: Question) -> None:
    # Seen to fail with losses clipped at a third of what counts.
    agree(question)


def test_epsilon_is_tight_where_the_first_guess_is_far_too_large() -> None:
    """Rare steps lose most.  Seen to fail (0.0382) where a search ends after 8 sums."""
    question = draw(1575)
    plan, noise, delta = question.plan, question.noise, question.delta
    epsilon = accountant.epsilon(plan, noise_multiplier=noise, delta=delta).guarantee
    back = accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon).guarantee
    assert epsilon < 0.00154
    assert abs(back / delta - 1) < TOLERANCE


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_agrees(seed: int) -> None:
    agree(draw(seed))


def test_epsilon_is_zero_where_the_example_hardly_takes_part() -> None:
    """Seen to fail (7.8e-8; delta 0.028 at 0) without the bound of participation."""
    question = draw(1743)
    plan, noise = question.plan, question.noise
    found = accountant.epsilon(plan, noise_multiplier=noise, delta=question.delta)
    assert found.guarantee == 0.0
    takes_part = -math.expm1(plan.num_steps * math.log1p(-5 / plan.num_examples))
    delta = accountant.delta(plan, noise_multiplier=noise, epsilon=0.0).guarantee
    assert 0.99 * takes_part < delta < (1 + 1e-9) * takes_part < question.delta


def test_delta_is_monotone_in_epsilon_noise_and_steps() -> None:
    def delta(epsilon: float = 1.0, noise: float = 1.0, steps: int = 400) -> float:
        plan = make_plan("poisson", 10_000, 60, steps)
        answer = accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon)
        return answer.guarantee

    changes = [1 + 1e-5 * change for change in range(-3, 4)]
    for falling in (
        [delta(epsilon=one) for one in changes],
        [delta(noise=one) for one in changes],
        [delta(steps=400 - change) for change in range(-3, 4)],
    ):
        assert falling == sorted(falling, reverse=True)
