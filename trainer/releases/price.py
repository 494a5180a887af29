"""What an evaluation costs, and the claim that it makes.

Formal guarantees:
  - noise is that of one Gaussian mechanism with the stated epsilon and delta; with a
    budget, of as many as it has runs, which together have them.
  - the claim of models and metrics is the larger one of both, at one delta: a row that
    was trained on changes models alone, and a held-out one metrics alone.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math

from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import NAMES, REPLACE_SPECIAL
from accounting.core.pld.gaussian import gaussian_noise
from trainer.model.metrics import BINARY, CLASSES
from trainer.releases import estimates
from trainer.releases.held_out_sums import HeldOutRows, default_cap
from trainer.run.budget import Budget

#: Largest standard deviation of the noise of an accuracy.
_MOST_NOISE = 0.05
_APART = "if none is trained on and held out"


def least_rows(num_classes: int, epsilon: float, delta: float) -> int:
    """Returns the number of held-out rows of which noise leaves something.

    Args:
      num_classes: At least 2.
      epsilon: Of their metrics, above 0.
      delta: In (0, 1).
    """
    return least_rows_at(num_classes, gaussian_noise(epsilon, delta))


def least_rows_at(num_classes: int, noise_multiplier: float) -> int:
    """Returns the number of held-out rows of which noise leaves something.

    Args:
      num_classes: At least 2.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
    """
    task = BINARY if num_classes == 2 else CLASSES
    rows = HeldOutRows(task, num_classes, default_cap(num_classes))
    noise = noise_multiplier / math.sqrt(rows.shares["counts"])
    of_one = estimates.noise_of_accuracy(noise, rows.num_cells, num_rows=1)
    return math.ceil(of_one / _MOST_NOISE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What an evaluation costs.

    Attributes:
      epsilon: Of the metrics; of those of all runs of a budget.
      delta: Of metrics and models.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
      claim: The claim in two sentences.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    claim: str

    def least_rows(self, num_classes: int) -> int:
        """Returns the number of held-out rows of which noise leaves something."""
        return least_rows_at(num_classes, self.noise_multiplier)

    @classmethod
    def of_one(cls, epsilon: float, delta: float, *, of_run: float) -> Price:
        """Returns the price of a run's only evaluation.

        Args:
          epsilon: Of the metrics, above 0.
          delta: In (0, 1).
          of_run: Epsilon of the model, at that delta.
        """
        both = upper_text(max(epsilon, of_run))
        claim = (
            f"These metrics are ({upper_text(epsilon)}, {delta!r})-differentially "
            f"private for one held-out row under the {NAMES[REPLACE_SPECIAL]} "
            f"relation. Model and metrics together are ({both}, {delta!r})"
            f"-differentially private for one row, {_APART}."
        )
        noise = gaussian_noise(epsilon, delta)
        return cls(epsilon=epsilon, delta=delta, noise_multiplier=noise, claim=claim)

    @classmethod
    def of_budget(cls, found: Budget) -> Price:
        """Returns the price of one of the evaluations that a budget reserves."""
        both = f"({upper_text(found.epsilon)}, {found.delta!r})"
        claim = (
            f"The metrics of all {found.num_runs} runs of the budget together are "
            f"{both}-differentially private for one held-out row under the "
            f"{NAMES[REPLACE_SPECIAL]} relation. All models and metrics together are "
            f"{both}-differentially private for one row, {_APART}, in whatever runs."
        )
        return cls(
            epsilon=found.epsilon,
            delta=found.delta,
            noise_multiplier=found.noise_of_evaluations,
            claim=claim,
        )
