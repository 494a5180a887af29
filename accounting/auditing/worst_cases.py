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
from accounting.core.samplers.truncated_poisson import truncation_probability
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What is observed in independent trials of a `Case`.

    Attributes:
      plan: How the canary was sampled.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      observe: Step -> observations, shape (trials,), in clip norms.
      positions: The canary's row in the data set, shape () or (trials,).
      means: As in `Case`.
      canary_rows: As in `Case`.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    observe: Observe
    positions: np.ndarray
    means: tuple[float, float] = MEANS
    canary_rows: int = 1


#: Trials -> ``ln Pr[observed | canary] / Pr[observed | ghost]`` of each of them.
Score = Callable[[Trials], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """How a sampler is audited.

    Attributes:
      worst_case: (plan, rows of the canary) -> the worst-case data set.
      score: Score of the observations on it.
      users: Whether the canary may have several rows.
    """

    worst_case: Callable[[DpSgdPlan, int], Case]
    score: Score
    users: bool = False


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


def shuffled(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the data set of shuffles: all other gradients are opposite.

    If shuffling all rows in each trial is too expensive, fewer rows are shuffled into
    the same number of equal batches: the canary's step is uniform either way (exactly,
    if the batch size divides the number of examples).

    Args:
      plan: The audited plan.
      canary_rows: 1, since no bound for users is known.
    """
    del canary_rows
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


def known_steps(trials: Trials) -> np.ndarray:
    """Returns the score where the example's steps are known."""
    plan = trials.plan
    # Step t starts at row ceil(t n / T).
    own = trials.positions * plan.steps_per_epoch // plan.num_examples
    pair = dominating_pairs.remove_pair(1.0, trials.noise_multiplier)
    total = np.zeros(())
    for step in range(plan.num_steps):
        takes_part = own == step % plan.steps_per_epoch
        if takes_part.any():
            total = total + np.where(takes_part, pair.loss(trials.observe(step)), 0.0)
    return total


def _loss(trials: Trials) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the loss of a step of Poisson batches, with the canary first."""
    rate = float(trials.plan.sampling_probability)
    if trials.canary_rows == 1:
        return dominating_pairs.remove_pair(rate, trials.noise_multiplier).loss
    asked = trials.canary_rows, rate, trials.noise_multiplier
    ((_, pair),), _ = dominating_pairs.steps(*asked)
    return pair.loss


def independent_steps(trials: Trials) -> np.ndarray:
    """Returns the score of Poisson batches, for an example or a user."""
    loss = _loss(trials)
    total = loss(trials.observe(0))
    for step in range(1, trials.plan.num_steps):
        total += loss(trials.observe(step))
    return total


def hidden_group(trials: Trials) -> np.ndarray:
    """Returns the score of cyclic Poisson batches, whose groups are uniform."""
    loss, bands = _loss(trials), trials.plan.bands
    assert bands is not None
    # A group without steps has the same outputs with and without the canary.
    groups = [np.zeros(()) for _ in range(bands)]
    for step in range(trials.plan.num_steps):
        groups[step % bands] = groups[step % bands] + loss(trials.observe(step))
    return functools.reduce(np.logaddexp, groups) - math.log(bands)


def hidden_step(trials: Trials) -> np.ndarray:
    """Returns the score of shuffles and of balls and bins.

    The canary's step of an epoch is uniform; a persistent shuffle has one for all.
    """
    plan = trials.plan
    per_epoch = plan.steps_per_epoch
    starts = range(0, plan.num_steps, per_epoch)
    together = plan.num_shuffles == 1
    groups = [list(starts)] if together else [[start] for start in starts]
    total = np.zeros(())
    for group in groups:
        # The sum over k epochs has k times the mean and the variance.
        sums = [
            np.sum([trials.observe(start + step) for start in group], axis=0)
            for step in range(per_epoch)
        ]
        upper, lower = (
            _log_mean_ratio(sums, mean, len(group), trials.noise_multiplier)
            for mean in trials.means
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


_SHUFFLED = Audit(worst_case=shuffled, score=hidden_step)
_AUDITS = {
    DETERMINISTIC: Audit(worst_case=own_block, score=known_steps),
    PERSISTENT_SHUFFLE: _SHUFFLED,
    DYNAMIC_SHUFFLE: _SHUFFLED,
    POISSON: Audit(worst_case=own_block, score=independent_steps, users=True),
    TRUNCATED_POISSON: Audit(worst_case=truncated, score=independent_steps, users=True),
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
    if found is None or (canary_rows > 1 and not found.users):
        sampler_registry.refuse(
            sampler,
            "a worst case and a score for audits",
            "Register them with accounting.auditing.worst_cases.register.",
        )
    return found
