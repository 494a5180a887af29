"""Random plans over all samplers, relations and users: are answers right, and how fast?

Run:  python -m tests.benchmarks.random_answers [--first 0] [--last 500] [--limit 10]

Asks for epsilon at a delta, for delta at that epsilon, for the noise that the epsilon
needs and for a lower bound, and again with more noise, more steps, a larger delta, a
larger cap and more rows of a user.  Prints what is on the wrong side of another answer,
answers above ``--limit`` seconds, and at the end the slowest answer of each sampler.
Every fifth plan is also compared with dp_accounting, where it has an event for it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Iterator

from accounting.core import accountant, neighboring_relation
from accounting.core.plan import (
    BALLS_AND_BINS,
    SAMPLERS,
    TRUNCATED_POISSON,
    DpSgdPlan,
    goes_through_epochs,
    steps_per_epoch,
)
from accounting.core.validation import InputError
from accounting.cross_check import check

#: Answers of different questions come from different grids.
TOLERANCE = 1e-3
#: Below, epsilon is told from 0 by delta alone.
LEAST_EPSILON = 1e-6
#: Where epsilon has a search for its noise.
LEAST_TARGET, LARGEST_TARGET = 1e-3, 1e3


@dataclasses.dataclass(frozen=True)
class Question:
    """A plan with its noise, delta, and unit."""

    plan: DpSgdPlan
    noise: float
    delta: float
    relation: str
    rows: int

    def epsilon(self, *, both: bool = False) -> accountant.Bounds:
        """Bounds on epsilon."""
        return accountant.epsilon(
            self.plan,
            noise_multiplier=self.noise,
            delta=self.delta,
            neighboring_relation=self.relation,
            max_examples_per_user=self.rows,
            both=both,
        )

    def delta_at(self, epsilon: float) -> float:
        """The guarantee at ``epsilon``."""
        return accountant.delta(
            self.plan,
            noise_multiplier=self.noise,
            epsilon=epsilon,
            neighboring_relation=self.relation,
            max_examples_per_user=self.rows,
        ).guarantee

    def noise_for(self, epsilon: float) -> float:
        """The noise that suffices for ``epsilon``."""
        return accountant.noise_multiplier(
            self.plan,
            epsilon=epsilon,
            delta=self.delta,
            neighboring_relation=self.relation,
            max_examples_per_user=self.rows,
        ).guarantee


def draw(seed: int) -> Question:
    """Returns a question that the accountant answers."""
    rng = random.Random(f"answers {seed}")

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    sampler = rng.choice(SAMPLERS)
    asked = [
        (relation, rows)
        for relation in neighboring_relation.RELATIONS
        for rows in (1, 2)
        if neighboring_relation.is_supported(sampler, relation, rows)
    ]
    relation, rows = rng.choice(asked)
    if rows == 2:
        rows = round(log_uniform(2, neighboring_relation.MOST_EXAMPLES_PER_USER))
    examples = round(log_uniform(60, 1e9))
    size = round(log_uniform(1, examples / 2))
    if rng.random() < 0.1:
        size = rng.randint(1, min(5, examples))
    if goes_through_epochs(sampler):
        size = max(size, examples // 10**6)
        epochs = round(log_uniform(1, 50))
        steps = epochs * steps_per_epoch(examples, size)
    else:
        epochs, steps = 1, round(log_uniform(1, 1e6))
    cap = None
    if sampler == TRUNCATED_POISSON:
        cap = min(examples, size + round(rng.uniform(0, 9) * math.sqrt(size)))
    return Question(
        plan=DpSgdPlan(
            sampler=sampler,
            num_examples=examples,
            expected_batch_size=size,
            num_steps=steps,
            num_epochs=epochs,
            truncated_batch_size=cap,
        ),
        noise=log_uniform(0.2, 50.0) * rows ** rng.random(),
        delta=log_uniform(1e-12, 1e-3),
        relation=relation,
        rows=rows,
    )


def changes(asked: Question) -> Iterator[tuple[str, bool, Question]]:
    """Yields what changes, whether epsilon must not fall, and the other question."""
    plan, replace = asked.plan, dataclasses.replace
    yield "noise", False, replace(asked, noise=asked.noise * 1.1)
    yield "delta", False, replace(asked, delta=asked.delta * 2)
    if goes_through_epochs(plan.sampler):
        epochs = plan.num_epochs + 1
        longer = replace(
            plan, num_epochs=epochs, num_steps=epochs * plan.steps_per_epoch
        )
    else:
        longer = replace(plan, num_steps=plan.num_steps + -(-plan.num_steps // 10))
    yield "steps", True, replace(asked, plan=longer)
    cap = plan.truncated_batch_size
    if cap is not None and cap < plan.num_examples:
        more = min(plan.num_examples, cap + -(-plan.expected_batch_size // 20))
        wider = replace(plan, truncated_batch_size=more)
        yield "cap", False, replace(asked, plan=wider)
    most = neighboring_relation.MOST_EXAMPLES_PER_USER
    if asked.rows < most and neighboring_relation.is_supported(
        plan.sampler, asked.relation, 2
    ):
        yield "rows of a user", True, replace(asked, rows=asked.rows + 1)


class Study:
    """Asks, and remembers how long answers take."""

    def __init__(self, limit: float) -> None:
        """Remembers answers of more than ``limit`` processor seconds."""
        self.limit = limit
        self.slowest: dict[str, tuple[float, str]] = {}
        self.wrong: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def timed(self, what: str, asked: Question, answer: Callable[[], float]) -> float:
        """Returns an answer."""
        wall, start = time.perf_counter(), time.process_time()
        found = answer()
        taken = time.process_time() - start
        said = f"{what} of {asked}: {time.perf_counter() - wall:.1f} s of the wall"
        kind = f"{asked.plan.sampler}, {what}"
        self.slowest[kind] = max(self.slowest.get(kind, (0.0, "")), (taken, said))
        self.counts[what] += 1
        if taken > self.limit:
            print(f"slow, {taken:.1f} s: {said}", flush=True)
        return found

    def note(self, seed: int, text: str) -> None:
        """Notes what is wrong."""
        self.wrong.append(f"plan {seed}: {text}")
        print(self.wrong[-1], flush=True)

    def ask(self, seed: int) -> None:
        """Asks all questions about a plan."""
        asked = draw(seed)
        epsilon = self.timed("epsilon", asked, lambda: asked.epsilon().guarantee)
        if math.isfinite(epsilon):
            back = self.timed("delta", asked, lambda: asked.delta_at(epsilon))
            if back > asked.delta * (1 + TOLERANCE):
                self.note(seed, f"delta(epsilon(d)) is {back / asked.delta:.4g} d")
        for what, rises, other in changes(asked):
            found = self.timed("epsilon", other, lambda o=other: o.epsilon().guarantee)
            low, high = (epsilon, found) if rises else (found, epsilon)
            if low > high * (1 + TOLERANCE) + LEAST_EPSILON:
                self.note(seed, f"{what}: {epsilon} becomes {found}, {other}")
        if LEAST_TARGET < epsilon < LARGEST_TARGET:
            needed = self.timed("noise", asked, lambda: asked.noise_for(epsilon))
            if needed > asked.noise * (1 + TOLERANCE):
                self.note(seed, f"noise for its epsilon is {needed}, not {asked.noise}")
        try:
            both = functools.partial(asked.epsilon, both=True)
            self.timed("lower bound", asked, lambda: both().lower or 0.0)
        except ArithmeticError as error:
            self.note(seed, str(error))
        except InputError:
            pass  # a sampler without one
        if seed % 5 == 0 and 0 < epsilon < LARGEST_TARGET:
            self.compare(seed, asked)

    def compare(self, seed: int, asked: Question) -> None:
        """Compares with dp_accounting."""
        if asked.plan.sampler == BALLS_AND_BINS or asked.plan.num_steps > 10**5:
            return
        unit = asked.relation, asked.rows
        try:
            check.check_plan(asked.plan, None, *unit)
        except InputError:
            return
        found = check.cross_check(
            asked.plan,
            noise_multiplier=asked.noise,
            delta=asked.delta,
            ours=asked.epsilon(),
            neighboring_relation=asked.relation,
            max_examples_per_user=asked.rows,
        )
        self.counts["compared"] += 1
        for text in found.disagreements:
            self.note(seed, f"dp_accounting: {text}")


def main() -> None:
    """Asks about a range of plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=500)
    parser.add_argument("--limit", type=float, default=10.0, help="processor seconds")
    flags = parser.parse_args()
    study = Study(flags.limit)
    for seed in range(flags.first, flags.last):
        study.ask(seed)
    for kind, (taken, said) in sorted(study.slowest.items()):
        print(f"slowest {kind}: {taken:.2f} s, {said}")
    print(f"{flags.last - flags.first} plans, {dict(study.counts)}")
    print(f"{len(study.wrong)} on the wrong side")


if __name__ == "__main__":
    main()
