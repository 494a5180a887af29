"""The worst-case data set of an audit, and the score of its trials.

One example, the canary, contributes 1 to its steps, in units of the clip norm, or is a
ghost that contributes nothing.  Every other example contributes the same constant.  If
the privacy unit is a user, the canary is a user with several such examples.  The score
is the log-likelihood ratio of canary and ghost, given the observations of all steps; by
the Neyman-Pearson lemma no score has fewer errors.

Public: everything, since the data set is synthetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import check_int

if TYPE_CHECKING:
    import numpy as np

#: Largest number of rows times epochs that are sampled in a trial.
MOST_ROWS = 4096
#: Number of rows that are sampled if only the canary's sampling matters.
_FEW_ROWS = 8
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
    """

    worst_case: Callable[[DpSgdPlan], Case]
    score: Score


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


def two_blocks(num_rows: int) -> tuple[int, ...]:
    """Returns the sizes of two blocks of ``num_rows`` in all; a single one for 1."""
    half = num_rows // 2
    return (half, num_rows - half) if half else (num_rows,)
