"""Random plans over all that is accounted for, and how consistent their bounds are.

`epsilon`, `delta` and `noise_multiplier` of the accountant choose contours, cells and
what counts as infinite loss each for itself.  What they answer must agree all the same.

Run:  python -m tests.accounting.random_plans [--first 0] [--last 2000] [--near-zero]

Prints what disagrees, and at the end how far answers were apart at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from typing import Any

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan

#: How far answers may be apart, relatively.
TOLERANCE = 1e-4
#: Where epsilon is 0, delta and noise may be anything below and above.
_LEAST_EPSILON = 1e-12


@dataclasses.dataclass(frozen=True)
class Question:
    """A plan with its noise and delta."""

    plan: DpSgdPlan
    noise: float
    delta: float


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far answers are apart, relatively.

    Attributes:
      delta: ``delta(epsilon(d)) / d - 1``.
      noise: Calibrated noise over the noise whose epsilon was the target, less 1.
      spare: Relative distance of the target from delta at the calibrated noise, if
        ``noise`` exceeds the tolerance; else 0.
    """

    delta: float
    noise: float
    spare: float


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


def draw_near_zero(seed: int) -> Question:
    """Returns a question whose epsilon is below 0.001: a few steps, hardly any noise.

    Delta is nearly the probability that the example takes part at all.
    """
    rng = random.Random(f"near zero {seed}")
    examples = round(math.exp(rng.uniform(math.log(100), math.log(3e8))))
    size, steps = rng.randint(1, 9), rng.randint(1, 10)
    spread = rng.uniform(0, 6) if rng.random() < 0.6 else None
    plan = DpSgdPlan(**_poisson(examples, size, steps, spread))
    noise = rng.uniform(0.05, 0.2)
    epsilon = 10 ** rng.uniform(-9, -3)
    delta = accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon)
    return Question(plan=plan, noise=noise, delta=delta.guarantee)


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


def agreement(question: Question) -> Agreement | None:
    """Returns how well the answers agree; None where epsilon is 0 or infinite."""
    plan, noise, delta = question.plan, question.noise, question.delta
    epsilon = accountant.epsilon(plan, noise_multiplier=noise, delta=delta).guarantee
    if not _LEAST_EPSILON < epsilon < math.inf:
        return None
    back = accountant.delta(plan, noise_multiplier=noise, epsilon=epsilon).guarantee
    found = accountant.noise_multiplier(plan, epsilon=epsilon, delta=delta).guarantee
    other, spare = found / noise - 1, 0.0
    if abs(other) >= TOLERANCE:
        reached = accountant.delta(plan, noise_multiplier=found, epsilon=epsilon)
        spare = 1 - reached.guarantee / delta
    return Agreement(delta=back / delta - 1, noise=other, spare=spare)


def agrees(one: Agreement) -> bool:
    """Returns whether answers agree.

    If what decides is whether the example takes part at all, delta hardly depends on
    noise, and noise of a wide range has nearly the same delta.  The calibrated noise is
    then right if delta at it is right.
    """
    same_noise = abs(one.noise) < TOLERANCE or 0 <= one.spare < TOLERANCE
    return abs(one.delta) < TOLERANCE and same_noise


def main() -> None:
    """Asks about a range of plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=2000)
    parser.add_argument("--near-zero", action="store_true", help="epsilon near 0")
    asked = parser.parse_args()
    draw_one = draw_near_zero if asked.near_zero else draw
    found = []
    for seed in range(asked.first, asked.last):
        one = agreement(draw_one(seed))
        if one is not None:
            found.append(one)
            if not agrees(one):
                print(f"plan {seed} disagrees: {one}", flush=True)
    delta = max(abs(one.delta) for one in found)
    flat = [one for one in found if agrees(one) and abs(one.noise) >= TOLERANCE]
    noise = max(abs(one.noise) for one in found if one not in flat)
    print(f"{asked.last - asked.first} plans, {len(found)} with epsilon above 0")
    print(f"delta of epsilon within {delta:.2g}, noise of epsilon within {noise:.2g}")
    print(f"but for {len(flat)} plans whose delta hardly depends on noise")


if __name__ == "__main__":
    main()
