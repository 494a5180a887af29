"""What an evaluation costs, and the claim that it makes.

Formal guarantees:
  - noise is that of one Gaussian mechanism with the stated epsilon and delta or, of N
    runs that were declared together, of N of them, which together have these: N
    Gaussian releases of one sensitivity are exactly one, with the noise of each divided
    by the root of N.
  - the claim of models and metrics is the larger one of both, at one delta: a row that
    was trained on changes models alone, and a held-out one metrics alone, if it neither
    scored runs nor gave statistics.
  - of users, whose number of rows is not public, it is released first, and bounds the
    sensitivity of the other sums: see `Price.most_rows`.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    NAMES,
    REPLACE_SPECIAL,
)
from accounting.core.pld.gaussian import gaussian_noise
from accounting.core.validation import InputError
from pipelines.core.users.bounded import Bounded
from trainer.model.metrics import OTHER
from trainer.releases.estimates import Count
from trainer.releases.held_out_numbers import CAP, HeldOutNumbers
from trainer.releases.held_out_sums import HeldOutRows, KeptRows, default_cap

#: Largest standard deviation of the noise of an accuracy, or of a squared error as a
#: share of the largest variance.
_MOST_NOISE = 0.05
#: Share of delta for a bound on the number of rows of users.
_OF_ROWS = 0.01
#: The others change what was trained, too: a model is a function of its ranges, and the
#: best of several of the rows that scored them.
_APART = "if none that is held out was trained on, scored runs, or gave statistics"


def kept_rows(
    task: str,
    num_classes: int = 0,
    cap: float | None = None,
    most: int | None = None,
    *,
    has_range: bool = True,
) -> KeptRows:
    """Returns what is kept of held-out rows, before there are any.

    Args:
      task: "binary", "classes", or "other" of a regression.
      num_classes: Number of classes, at least 2; 0 of a regression.
      cap: Largest loss that counts; None for the default.
      most: Largest number of rows of one user; None if the unit is a row.
      has_range: Whether the labels of a regression have a public range.
    """
    if task == OTHER:
        return HeldOutNumbers(cap or CAP, most, has_range=has_range)
    return HeldOutRows(task, num_classes, cap or default_cap(num_classes), most)


def least_rows(rows: KeptRows, noise_multiplier: float) -> int:
    """Returns the number of held-out rows of which noise leaves something.

    Args:
      rows: What is kept of them.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
    """
    return math.ceil(rows.noise_of_one(noise_multiplier) / _MOST_NOISE)


def check_rows(
    rows: KeptRows, noise_multiplier: float, num_rows: int, where: str
) -> None:
    """Refuses so few held-out rows that noise would hide every metric.

    Args:
      rows: What is kept of them.
      noise_multiplier: As for `least_rows`.
      num_rows: Their number, or a bound on it.
      where: The flag that names them, with its value.

    Raises:
      InputError: they are fewer than `least_rows`.
    """
    least = least_rows(rows, noise_multiplier)
    if num_rows < least:
        raise InputError(
            f"Expected at least {least} rows in {where}, for noise to leave something "
            f"of their metrics; it has at most {num_rows}. Give more, or a larger "
            "epsilon of them."
        )


def relations(bounded: Bounded | None) -> str:
    """Returns the neighbouring relations under which sums of rows are private."""
    relation = NAMES[REPLACE_SPECIAL]
    if bounded is None:
        return f"the {relation} relation"
    # The number of rows is not public, so that both relations move the sums alike.
    return f"the {relation} and the {NAMES[ADD_OR_REMOVE_ONE]} relation"


def _units(bounded: Bounded | None) -> tuple[str, str]:
    """Returns the privacy unit of the metrics with its relation, and its name."""
    if bounded is None:
        return f"one held-out row under {relations(None)}", "row"
    return f"{bounded.unit}, under {relations(bounded)}", "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What an evaluation costs.

    Attributes:
      epsilon: Of the metrics; of those of all runs that were declared together.
      delta: Of metrics and models.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
      claim: The claim in two sentences.
      of_rows: Part of delta for a bound on the number of rows by a release of it.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    claim: str
    of_rows: float = 0.0

    def most_rows(self, rows: Count, bounded: Bounded) -> int:
        """Returns a bound on the number of rows, with and without any one user.

        It is the public one, or that of a release of the number: n with noise of
        standard deviation s, plus k, plus as many s as normal noise falls short by with
        probability ``of_rows``.  So with that probability at most the sums that are
        bounded by it have another sensitivity, for either of two neighbours: given
        that it holds, number and sums are one Gaussian mechanism with (epsilon, delta -
        of_rows), and events where it does not add ``of_rows``.

        Args:
          rows: The number, with noise.
          bounded: How users are bounded.
        """
        if not self.of_rows:
            return bounded.num_examples
        sides = -statistics.NormalDist().inv_cdf(self.of_rows)
        # Noise is rounded to integers.
        most = math.ceil(rows.value + rows.most + sides * rows.noise + 1)
        return max(1, min(bounded.num_examples, most))

    @classmethod
    def of_one(
        cls,
        epsilon: float,
        delta: float,
        *,
        of_run: float,
        bounded: Bounded | None = None,
        of_runs: int = 1,
    ) -> Price:
        """Returns the price of a run's only evaluation.

        Args:
          epsilon: Of the metrics of all runs, above 0.
          delta: In (0, 1).
          of_run: Epsilon of the models of all runs, at that delta.
          bounded: How the users of held-out rows are bounded; None if the unit is a
            row.
          of_runs: Number of runs that were declared together.
        """
        both = upper_text(max(epsilon, of_run))
        unit, one = _units(bounded)
        metrics, models = "These metrics", "Model"
        if of_runs != 1:
            metrics = f"The metrics of at most {of_runs:,} such runs together"
            models = "Their models"
        claim = (
            f"{metrics} are ({upper_text(epsilon)}, {delta!r})-differentially "
            f"private for {unit}. {models} and metrics together are ({both}, {delta!r})"
            f"-differentially private for one {one}, {_APART}."
        )
        of_rows = delta * _OF_ROWS if bounded else 0.0
        noise = gaussian_noise(epsilon, delta - of_rows) * math.sqrt(of_runs)
        return cls(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise,
            claim=claim,
            of_rows=of_rows / of_runs,  # each may fall short
        )
