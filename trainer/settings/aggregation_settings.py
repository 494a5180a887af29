"""Settings of the averages of a run's iterates, and of the iterates that it keeps.

The iterate theta_t is the weights after t steps.  Averages are functions of released
iterates, so that no setting here changes epsilon.  Names are those of Recycling Scraps.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, sections 3 and 5.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from cyclopts import Parameter

from accounting.core.settings import RARE, RECORDED, Field, check_fields, choice
from accounting.core.validation import InputError, check_int
from trainer.settings.option_groups import AVERAGES, code

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

_K = Parameter(metavar="K")
_Exported = Annotated[str, choice("export", *PAST_WEIGHT_AVERAGES)]
_FUNCTION = Parameter(metavar="MODULE:FUNCTION")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """Averages of the iterates of a run.  All public.

    Attributes:
      ema_decay: Average the weights while training, as by 0.999.  An exponential moving
        average with warm-up.  Costs no privacy, like all averages
        here.
      tail: Average the weights of the last K steps while training; needs K+2 copies of
        them in memory and in checkpoints.
      aggregate: Your own aggregate, of the last --tail iterates while training and of
        the --keep-last kept iterates: a function that takes a list of iterates, oldest
        first, each a list of NumPy arrays, and returns one.
      train_over: Start each step at this average instead of at the last weights.
      aggregate_from: First step that starts at the average.  [default: 0]
      evaluate_averages: Also evaluate these averages at every point of OUT/curve.json.
      keep_last: Keep K iterates, and evaluate averages of them.  They are in
        OUT/iterates; averages are of their weights and of their predictions.
      keep_every: Steps between kept iterates, of which the last is the final one.
        [default: spread over the second half of the run]
      keep_decay: Decay per iterate of the moving average over kept iterates.
      uncertainty: Write intervals of this level, such as 0.95, for all held-out
        predictions, from kept iterates: how much the predictions vary with the noise.
      export: Also export this average of kept weights; may be repeated.
    """

    ema_decay: Annotated[float | None, Field(ge=0, lt=1), RECORDED, AVERAGES] = None
    tail: Annotated[int | None, Field(ge=1), AVERAGES, RARE, _K] = None
    aggregate: Annotated[str | None, code("aggregate"), AVERAGES, RARE, _FUNCTION] = (
        None
    )
    train_over: Annotated[
        str | None, choice("train_over", *TRAINING_AVERAGES), AVERAGES, RARE
    ] = None
    aggregate_from: Annotated[
        int | None, Field(ge=0), AVERAGES, RARE, Parameter(metavar="TAU")
    ] = None
    evaluate_averages: Annotated[bool, AVERAGES, RARE] = False
    keep_last: Annotated[int | None, Field(ge=1), AVERAGES, _K] = None
    keep_every: Annotated[
        int | None, Field(ge=1), AVERAGES, RARE, Parameter(metavar="S")
    ] = None
    keep_decay: Annotated[float, Field(ge=0, lt=1), AVERAGES, RARE] = 0.9
    uncertainty: Annotated[
        float | None, Field(gt=0, lt=1), AVERAGES, RARE, Parameter(metavar="LEVEL")
    ] = None
    export: Annotated[
        tuple[Annotated[str, choice("export", *PAST_WEIGHT_AVERAGES)], ...],
        AVERAGES,
        RARE,
    ] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_aggregate()
        self._check_train_over()
        self._check_past()
        if self.evaluate_averages and not self.averages_every_step:
            raise InputError(
                "--evaluate-averages needs an average: add --ema-decay or --tail."
            )

    def _check_aggregate(self) -> None:
        if self.aggregate is None:
            return
        if self.tail is None and self.keep_last is None:
            raise InputError(
                f"aggregate={self.aggregate!r} gets no iterates. Add --tail or "
                "--keep-last."
            )

    def _check_train_over(self) -> None:
        if self.train_over is None:
            if self.aggregate_from is not None:
                raise InputError(
                    f"aggregate_from={self.aggregate_from} does not say at which "
                    "average steps start. Add --train-over."
                )
            return
        if self.train_over not in self._while_training:
            flag = {EMA: "--ema-decay", UTA: "--tail", CUSTOM: "--aggregate and --tail"}
            raise InputError(
                f"train_over={self.train_over!r} needs that average. Add "
                f"{flag[self.train_over]}."
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
            if name == PAST_CUSTOM and self.aggregate is None:
                raise InputError(f"export={name!r} needs --aggregate. Add it.")
        wanted = {
            "keep_every": self.keep_every,
            "uncertainty": self.uncertainty,
            "export": self.export or None,
        }
        for name, value in wanted.items():
            if value is not None and self.keep_last is None:
                raise InputError(
                    f"{name}={value} is made from kept iterates, and none are kept. "
                    "Add --keep-last."
                )
        if self.uncertainty is not None and self.keep_last is not None:
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

        They are known before the run, so that no file has to be removed.

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
