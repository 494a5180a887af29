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

if TYPE_CHECKING:
    import numpy as np

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
