"""The worst-case data sets of audits, for each kind of sampler."""

from __future__ import annotations

import dataclasses

from accounting.auditing.audit_case import Case
from accounting.claims.shuffles import shuffle
from accounting.core import sampler_registry
from accounting.core.plan import DpSgdPlan
from accounting.core.samplers.truncation import truncation_probability
from accounting.core.validation import check_int

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
