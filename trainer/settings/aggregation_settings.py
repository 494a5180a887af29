"""Settings of the averages of a run's iterates, and of the iterates that it keeps.

The iterate theta_t is the weights after t steps.  Averages are functions of released
iterates, so that no setting here changes epsilon.  Names are those of Recycling Scraps.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, sections 3 and 5.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from accounting.validation import InputError, check_choice, check_float, check_int
from trainer.model.user_code import check_name

#: While training: exponential moving average, uniform tail average, and a user's
#: function of the same last iterates.
EMA = "ema"
UTA = "uta"
CUSTOM = "custom"
TRAINING_AVERAGES = (EMA, UTA, CUSTOM)

#: Over kept iterates: two averages of weights, the user's, and two of outputs.
PAST_EMA = "past_ema"
UPA = "upa"
PAST_CUSTOM = "past_custom"
OPA = "opa"
OMV = "omv"
PAST_WEIGHT_AVERAGES = (PAST_EMA, UPA, PAST_CUSTOM)

WEIGHT_AVERAGES = (*TRAINING_AVERAGES, *PAST_WEIGHT_AVERAGES)

#: Averages in words.
MEANINGS = {
    EMA: "moving average of the weights",
    UTA: "mean of the last weights, while training",
    CUSTOM: "custom aggregate, while training",
    PAST_EMA: "moving average of kept weights",
    UPA: "mean of kept weights",
    PAST_CUSTOM: "custom aggregate of kept weights",
    OPA: "mean of predictions",
    OMV: "majority vote",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """Averages of the iterates of a run.  All public.

    Attributes:
      ema_decay: Decay of the moving average of the weights, in [0, 1); None for none.
      tail: Number of last iterates in the uniform average, at least 1, each of which
        takes the memory of a copy of the weights; None for none.
      aggregate: "module:function" of a user's aggregate, of the ``tail`` last iterates
        while training and of the ``keep_last`` kept ones; None for none.
      train_over: "ema", "uta" or "custom": steps start at this average instead of the
        last iterate; None for ordinary training.
      aggregate_from: First step that starts at the average; 0 if None.
      evaluate_averages: Whether the curve also has the metrics of these averages.
      keep_last: Number of iterates to keep in the run's folder; None for none.
      keep_every: Steps between kept iterates, counted back from the last step; if None,
        kept iterates are spread over the second half of the run.
      keep_decay: Decay per iterate of the moving average over kept ones, in [0, 1).
      uncertainty: Level of the intervals of held-out predictions, in (0, 1); None for
        none.
      export: Averages over kept iterates to export as models.
    """

    ema_decay: float | None = None
    tail: int | None = None
    aggregate: str | None = None
    train_over: str | None = None
    aggregate_from: int | None = None
    evaluate_averages: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    keep_decay: float = 0.9
    uncertainty: float | None = None
    export: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ema_decay is not None:
            check_float("ema_decay", self.ema_decay, at_least=0, below=1)
        for name, least in (
            ("tail", 1), ("aggregate_from", 0), ("keep_last", 1), ("keep_every", 1),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=least)
        check_float("keep_decay", self.keep_decay, at_least=0, below=1)
        self._check_aggregate()
        self._check_train_over()
        self._check_past()
        if self.evaluate_averages and not self.averages_every_step:
            raise InputError(
                "Expected --ema-decay or --tail beside --evaluate-averages: which "
                "averages?"
            )

    def _check_aggregate(self) -> None:
        if self.aggregate is None:
            return
        check_name(self.aggregate, "aggregate")
        if self.tail is None and self.keep_last is None:
            raise InputError(
                f"Expected --tail or --keep-last beside aggregate={self.aggregate!r}: "
                "which iterates should it get?"
            )

    def _check_train_over(self) -> None:
        if self.train_over is None:
            if self.aggregate_from is not None:
                raise InputError(
                    f"Expected --train-over beside aggregate_from="
                    f"{self.aggregate_from}: which average should steps start at?"
                )
            return
        check_choice("train_over", self.train_over, TRAINING_AVERAGES)
        if self.train_over not in self._while_training:
            flag = {EMA: "--ema-decay", UTA: "--tail", CUSTOM: "--aggregate and --tail"}
            raise InputError(
                f"Expected {flag[self.train_over]} beside train_over="
                f"{self.train_over!r}."
            )

    @property
    def _while_training(self) -> list[str]:
        made = {
            EMA: self.ema_decay is not None,
            UTA: self.tail is not None,
            CUSTOM: self.tail is not None and self.aggregate is not None,
        }
        return [name for name, is_made in made.items() if is_made]

    def _check_past(self) -> None:
        for name in self.export:
            check_choice("export", name, PAST_WEIGHT_AVERAGES)
            if name == PAST_CUSTOM and self.aggregate is None:
                raise InputError(f"Expected --aggregate beside export={name!r}.")
        wanted = {
            "keep_every": self.keep_every,
            "uncertainty": self.uncertainty,
            "export": self.export or None,
        }
        for name, value in wanted.items():
            if value is not None and self.keep_last is None:
                raise InputError(
                    f"Expected --keep-last beside {name}={value}: it is made from kept "
                    "iterates."
                )
        if self.uncertainty is not None and self.keep_last is not None:
            check_float("uncertainty", self.uncertainty, above=0, below=1)
            # One iterate has no variance.
            check_int("keep_last", self.keep_last, at_least=2)

    @property
    def averages_every_step(self) -> bool:
        """Whether every step reads all weights, which lazy noise does not allow."""
        return self.ema_decay is not None or self.tail is not None

    @property
    def average_names(self) -> tuple[str, ...]:
        """Names of the averages that a run may report; only classes have "omv".

        Example:
          >>> AggregationSettings(ema_decay=0.9).average_names
          ('ema',)
        """
        if self.keep_last is None:
            return tuple(self._while_training)
        custom = (PAST_CUSTOM,) if self.aggregate is not None else ()
        return (*self._while_training, PAST_EMA, UPA, *custom, OPA, OMV)

    def kept_steps(self, num_steps: int) -> tuple[int, ...]:
        """Returns the numbers of steps after which an iterate is kept, in order.

        They are known before the run, so that no file has to be removed and a resumed
        run keeps the same iterates.

        Example:
          >>> AggregationSettings(keep_last=3, keep_every=20).kept_steps(100)
          (60, 80, 100)
          >>> AggregationSettings(keep_last=5).kept_steps(100)
          (60, 70, 80, 90, 100)

        Raises:
          InputError: the run has too few steps.
        """
        if self.keep_last is None:
            return ()
        every = self.keep_every or max(1, num_steps // (2 * self.keep_last))
        first = num_steps - (self.keep_last - 1) * every
        if first < 1:
            raise InputError(
                f"Expected keep_last={self.keep_last} iterates, {every} steps apart, "
                f"to fit into num_steps={num_steps}. Lower --keep-last or --keep-every."
            )
        return tuple(range(first, num_steps + 1, every))

    def check_steps(self, num_steps: int) -> None:
        """Checks these settings for a run of ``num_steps`` steps.

        Raises:
          InputError: name, value, bound, remedy.
        """
        self.kept_steps(num_steps)
        if self.aggregate_from is not None:
            check_int("aggregate_from", self.aggregate_from, at_most=num_steps - 1)

    def describe_past(self) -> dict[str, Any]:
        """Returns the settings of averages of kept iterates, for the run record."""
        return {} if self.keep_last is None else {"keep_decay": self.keep_decay}

    def describe_feedback(self) -> dict[str, Any]:
        """Returns the settings that change the iterates, for the run record."""
        if self.train_over is None:
            return {}
        return {
            "train_over": self.train_over,
            "aggregate_from": self.aggregate_from or 0,
            "tail": self.tail,
            **({"aggregate": self.aggregate} if self.train_over == CUSTOM else {}),
        }
