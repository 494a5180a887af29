"""The data set on which an audit of a sampler is sharpest, and the score of its trials.

One example, the canary, contributes 1 to its steps in units of the clip norm, or is a
ghost that contributes nothing; every other example contributes the same constant.
Where the unit is a user, the canary is one with several such examples.  The score is
the logarithm of the likelihood ratio of both worlds, given what was observed in every
step: by Neyman and Pearson's lemma no score has fewer errors.

Public: everything, since nobody's data is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from accounting.plan import DpSgdPlan
from accounting.validation import check_int

if TYPE_CHECKING:
    import numpy as np

#: Rows, times epochs, that are sampled in a trial at most.
MOST_ROWS = 4096
#: Rows that are sampled where only the canary's own choices matter.
_FEW_ROWS = 8
#: Contributions of the canary, and of the ghost, beside steps without.
MEANS = (1.0, 0.0)

#: Step -> what is observed there in each trial, shape (trials,), in clip norms.
Observe = Callable[[int], "np.ndarray"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The data set on which a plan is audited, but for the canary.

    Attributes:
      plan: Of the batches that are sampled; of fewer rows than the audited one if
        ``scaled`` says so.
      block_rows: Rows of each block that is sampled.
      canary: Its row among them, or the first one of a user.
      canary_rows: Rows of the canary, one after the other; several of a user.
      first_row: Rows of the data set before the first block.
      others: What every other row contributes to its steps: 0; or -1, where each epoch
        is cut into steps whose sizes are known and as equal as can be.
      means: Of a step with the canary, and with the ghost, beside steps without.
      slack: By how much any probability may differ from that under the audited plan.
      scaled: What is not as in the audited plan, in words; None if nothing.
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
          noise_multiplier: Above 0.
          observe: What was released.
          positions: The canary's row in the data, one for all trials or one for each.
          means: Of a step with the canary, and with the ghost, beside steps without.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """How a sampler is audited.

    Attributes:
      worst_case: Plan -> the data set.
      score: Of what is observed on it.
    """

    worst_case: Callable[[DpSgdPlan], Case]
    score: Score


def own_block(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the case of samplers where a row's steps depend on its own block alone.

    A few rows of one block are sampled, under the plan as it is.

    Args:
      plan: That is audited.
      canary_rows: Rows of the canary.

    Raises:
      InputError: the data set has fewer rows.
    """
    check_int("canary_rows", canary_rows, at_least=1, at_most=plan.num_examples)
    few = min(plan.num_examples, _FEW_ROWS - 1 + canary_rows)
    # In the middle of the data, where first and last rows are not special.
    first = (plan.num_examples - few) // 2
    return Case(
        plan=plan,
        block_rows=(few,),
        first_row=first,
        canary=(few - canary_rows + 1) // 2,
        canary_rows=canary_rows,
    )


def two_blocks(num_rows: int) -> tuple[int, ...]:
    """Returns the sizes of two blocks of as many rows; of one row, a single block."""
    half = num_rows // 2
    return (half, num_rows - half) if half else (num_rows,)
