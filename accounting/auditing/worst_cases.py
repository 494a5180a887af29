"""How each sampler is audited: its worst-case data set, and the score of a trial.

Another package calls `register` beside `accounting.core.sampler_registry.register`.

One example, the canary, contributes 1 to its steps, in units of the clip norm, or is a
ghost that contributes nothing.  Every other example contributes the same constant.  If
the privacy unit is a user, the canary is a user with several such examples.  The score
is the log-likelihood ratio of canary and ghost, given the observations of all steps; by
the Neyman-Pearson lemma no score has fewer errors.

Formal guarantees:
  - nothing by default: a sampler without an audit is refused.
  - one meaning per name: an audit cannot be registered twice.

Public: everything, since the data set is synthetic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from accounting.claims import shuffle
from accounting.core import sampler_registry
from accounting.core.neighboring_relation import brought
from accounting.core.plan import (
    BALLS_AND_BINS,
    CYCLIC_POISSON,
    DETERMINISTIC,
    DYNAMIC_SHUFFLE,
    PERSISTENT_SHUFFLE,
    POISSON,
    TRUNCATED_CYCLIC_POISSON,
    TRUNCATED_POISSON,
    DpSgdPlan,
)
from accounting.core.pld import dominating_pairs
from accounting.core.pld.dominating_pairs import Step
from accounting.core.samplers import poisson
from accounting.core.samplers.truncated_steps import truncation_probability
from accounting.core.validation import InputError, check_int

#: Mean of a step with the canary, and with the ghost, relative to other steps.
MEANS = (1.0, 0.0)

#: Step -> observations of the step in each trial, shape (trials,), in clip norms.
Observe = Callable[[int], "np.ndarray"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The data set of an audit, without the canary.

    Attributes:
      plan: The plan to sample; if ``scaled`` says so, it has fewer rows than the
        audited plan.
      block_rows: Number of rows of each sampled block.
      canary: Row of the canary among them; of a user, the first row.
      canary_rows: Number of consecutive rows of the canary; several for a user.
      first_row: Number of rows of the data set before the first block.
      others: Contribution of every other row to its steps: 0; or -1 if each epoch is
        cut into steps of known, nearly equal sizes.
      means: Mean of a step with the canary, and with the ghost, relative to others.
      slack: Largest difference of any probability from that under the audited plan.
      scaled: How the case differs from the audited plan, in words; None if not.
    """

    plan: DpSgdPlan
    block_rows: tuple[int, ...]
    canary: int
    canary_rows: int = 1
    first_row: int = 0
    others: int = 0
    means: tuple[float, float] = MEANS
    slack: float = 0.0
    scaled: str | None = None


class Score(Protocol):
    """The logarithm of the likelihood ratio of canary and ghost."""

    def __call__(
        self,
        plan: DpSgdPlan,
        noise_multiplier: float,
        observe: Observe,
        positions: np.ndarray,
        means: tuple[float, float],
    ) -> np.ndarray:
        """Returns ``ln Pr[observed | canary] / Pr[observed | ghost]`` of each trial.

        Args:
          plan: How the canary was sampled.
          noise_multiplier: Noise standard deviation over the clip norm, above 0.
          observe: Step -> observations, shape (trials,), in clip norms.
          positions: The canary's row in the data set, shape () or (trials,).
          means: As in `Case`.

        Returns:
          Shape (trials,).
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """How a sampler is audited.

    Attributes:
      worst_case: Plan -> the worst-case data set.
      score: Score of the observations on it.
      users: k -> the audit with a canary of k rows; None if there is none.
    """

    worst_case: Callable[[DpSgdPlan], Case]
    score: Score
    users: Callable[[int], Audit] | None = None


#: Largest number of rows times epochs that are sampled in a trial.
_MOST_ROWS = 4096
#: Number of rows that are sampled if only the canary's sampling matters.
_FEW_ROWS = 8


def own_block(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the case of samplers where a row's steps depend only on its own block.

    A few rows of one block are sampled, under the audited plan.

    Args:
      plan: The audited plan.
      canary_rows: Number of rows of the canary.

    Raises:
      InputError: the data set has fewer rows than the canary.
    """
    check_int("canary_rows", canary_rows, at_least=1, at_most=plan.num_examples)
    few = min(plan.num_examples, _FEW_ROWS - 1 + canary_rows)
    # In the middle, since the first and last rows may be special.
    first = (plan.num_examples - few) // 2
    return Case(
        plan=plan,
        block_rows=(few,),
        first_row=first,
        canary=(few - canary_rows + 1) // 2,
        canary_rows=canary_rows,
    )


def any_truncation_probability(plan: DpSgdPlan) -> float:
    """Returns a bound on the probability that any step is truncated; 0 without a cap.

    No probability differs by more from its value under untruncated sampling.
    """
    if plan.truncated_batch_size is None:
        return 0.0
    return min(1.0, plan.num_steps * truncation_probability(plan))


def truncated(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the data set of truncated Poisson: all rows, or a few without the cap.

    Omitting the cap changes any probability by at most the probability that any step is
    truncated.

    Args:
      plan: The audited plan.
      canary_rows: Number of rows of the canary.

    Raises:
      InputError: the data set has fewer rows than the canary.
    """
    check_int("canary_rows", canary_rows, at_least=1, at_most=plan.num_examples)
    drawn = max(plan.num_examples, plan.expected_batch_size * plan.num_steps)
    if drawn <= _MOST_ROWS:
        rows = plan.num_examples
        sizes = _two_blocks(rows)
        first = (rows - canary_rows + 1) // 2
        return Case(plan=plan, block_rows=sizes, canary=first, canary_rows=canary_rows)
    slack = any_truncation_probability(plan)
    truncation = sampler_registry.get(plan.sampler).truncation
    assert truncation is not None  # the plan has a cap
    return dataclasses.replace(
        own_block(truncation.without(plan), canary_rows),
        slack=slack,
        scaled=(
            f"steps are not truncated at {plan.truncated_batch_size:,} examples; they "
            f"would be with probability {slack:.1g} or less, which is taken off"
        ),
    )


def shuffled(plan: DpSgdPlan) -> Case:
    """Returns the data set of shuffles: all other gradients are opposite.

    If shuffling all rows in each trial is too expensive, fewer rows are shuffled into
    the same number of equal batches: the canary's step is uniform either way (exactly,
    if the batch size divides the number of examples).
    """
    if plan.num_examples * plan.num_epochs <= _MOST_ROWS:
        rows, scaled = plan.num_examples, None
        sizes = _two_blocks(rows)
    else:
        rows = min(2 * plan.steps_per_epoch, plan.num_examples)
        sizes = (rows,)
        scaled = (
            f"{rows:,} of {plan.num_examples:,} examples are shuffled, in as many "
            "equal batches: the canary's step follows the same law"
        )
    smaller = dataclasses.replace(
        plan,
        num_examples=rows,
        expected_batch_size=max(1, rows // plan.steps_per_epoch),
    )
    return Case(
        plan=smaller,
        block_rows=sizes,
        canary=rows // 2,
        others=-1,
        means=shuffle.MEANS,
        scaled=scaled,
    )


def _two_blocks(num_rows: int) -> tuple[int, ...]:
    """Returns the sizes of two blocks of ``num_rows`` in all; a single one for 1."""
    half = num_rows // 2
    return (half, num_rows - half) if half else (num_rows,)


def known_steps(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score where the example's steps are known.

    Arguments as for `Score.__call__`.
    """
    del means  # others contribute nothing
    # Step t starts at row ceil(t n / T).
    own = positions * plan.steps_per_epoch // plan.num_examples
    pair = dominating_pairs.remove_pair(1.0, noise_multiplier)
    total = np.zeros(())
    for step in range(plan.num_steps):
        takes_part = own == step % plan.steps_per_epoch
        if takes_part.any():
            total = total + np.where(takes_part, pair.loss(observe(step)), 0.0)
    return total


def _independent_steps(
    steps: Callable[[float, float], tuple[Step, ...]],
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score given the pair of a step with the canary first."""
    del positions, means  # every row is alike, and others contribute nothing
    ((_, pair),), *_ = steps(float(plan.sampling_probability), noise_multiplier)
    total = pair.loss(observe(0))
    for step in range(1, plan.num_steps):
        total += pair.loss(observe(step))
    return total


def hidden_group(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score of cyclic Poisson batches, whose groups are uniform.

    Arguments as for `Score.__call__`.
    """
    del positions, means  # every row is alike, and others contribute nothing
    assert plan.bands is not None
    pair = dominating_pairs.remove_pair(
        float(plan.sampling_probability), noise_multiplier
    )
    # A group without steps has the same outputs with and without the canary.
    groups = [np.zeros(()) for _ in range(plan.bands)]
    for step in range(plan.num_steps):
        group = step % plan.bands
        groups[group] = groups[group] + pair.loss(observe(step))
    return functools.reduce(np.logaddexp, groups) - math.log(plan.bands)


#: The score for one example of Poisson batches.
independent_steps: Score = functools.partial(_independent_steps, poisson.steps)


def user_steps(count: int) -> Score:
    """Returns the score for users with ``count`` examples of Poisson batches."""
    return functools.partial(
        _independent_steps, functools.partial(dominating_pairs.steps, count)
    )


def hidden_step(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score of shuffles and of balls and bins.

    The canary's step of an epoch is uniform; a persistent shuffle has one for all.
    Arguments as for `Score.__call__`.
    """
    del positions  # every row is alike
    per_epoch = plan.steps_per_epoch
    starts = range(0, plan.num_steps, per_epoch)
    together = plan.num_shuffles == 1
    groups = [list(starts)] if together else [[start] for start in starts]
    total = np.zeros(())
    for group in groups:
        # The sum over k epochs has k times the mean and the variance.
        sums = [
            np.sum([observe(start + step) for start in group], axis=0)
            for step in range(per_epoch)
        ]
        upper, lower = (
            _log_mean_ratio(sums, mean, len(group), noise_multiplier) for mean in means
        )
        total = total + upper - lower
    return total


def _log_mean_ratio(
    sums: list[np.ndarray], mean: float, epochs: int, noise_multiplier: float
) -> np.ndarray:
    """Returns ``ln sum_t exp((mean x_t - epochs mean^2 / 2) / s^2)``."""
    total = np.full(sums[0].shape, -np.inf)
    for observed in sums:
        exponent = (mean * observed - epochs * mean**2 / 2) / noise_multiplier**2
        np.logaddexp(total, exponent, out=total)
    return total


# -- what each sampler has -------------------------------------------------------------


def _of_users(worst_case: Callable[..., Case], count: int) -> Audit:
    """Returns the audit of users with ``count`` examples, of Poisson batches."""
    return Audit(
        worst_case=functools.partial(worst_case, canary_rows=count),
        score=user_steps(count),
    )


_SHUFFLED = Audit(worst_case=shuffled, score=hidden_step)
_AUDITS = {
    DETERMINISTIC: Audit(worst_case=own_block, score=known_steps),
    PERSISTENT_SHUFFLE: _SHUFFLED,
    DYNAMIC_SHUFFLE: _SHUFFLED,
    POISSON: Audit(
        worst_case=own_block,
        score=independent_steps,
        users=functools.partial(_of_users, own_block),
    ),
    TRUNCATED_POISSON: Audit(
        worst_case=truncated,
        score=independent_steps,
        users=functools.partial(_of_users, truncated),
    ),
    BALLS_AND_BINS: Audit(worst_case=own_block, score=hidden_step),
    CYCLIC_POISSON: Audit(worst_case=own_block, score=hidden_group),
    TRUNCATED_CYCLIC_POISSON: Audit(worst_case=truncated, score=hidden_group),
}


def register(name: str, audit: Audit) -> None:
    """Registers, in this process, how a sampler is audited.

    Args:
      name: As registered with `accounting.core.sampler_registry`.
      audit: The worst case and its score.

    Raises:
      InputError: the name has an audit, or is not registered with the accountant.
    """
    sampler_registry.rules(name)
    if name in _AUDITS:
        raise InputError(
            f"Expected sampler={name!r} not to have an audit yet. Choose another name."
        )
    _AUDITS[name] = audit


def audit_of(sampler: str, canary_rows: int = 1) -> Audit:
    """Returns the audit of a sampler.

    Args:
      sampler: Name of a registered sampler.
      canary_rows: Examples of the canary; above 1 it is a user.

    Raises:
      InputError: the sampler has no audit, or is not accounted for with such users.
    """
    brought(sampler, max_examples_per_user=canary_rows)
    found = _AUDITS.get(sampler)
    if found is not None and canary_rows > 1:
        found = found.users and found.users(canary_rows)
    if found is None:
        sampler_registry.refuse(
            sampler,
            "a worst case and a score for audits",
            "Register them with accounting.auditing.worst_cases.register.",
        )
    return found
