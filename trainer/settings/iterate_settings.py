"""Settings of experiments on the iterates of runs."""

from __future__ import annotations

import dataclasses

from accounting.validation import InputError, check_int
from pipelines.job.batch_settings import BatchSettings
from trainer.settings.comparison_settings import OneTraining
from trainer.settings.train_settings import TrainSettings

#: Default level of the intervals.
LEVEL = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarianceSettings(OneTraining):
    """A comparison of the variance of runs with that of their iterates.  All public.

    Attributes:
      batches: Sampling settings; every run has its own batches.
      training: Training settings of all runs, which keep two iterates or more and start
        at the weights of its ``init_seed``.
    """

    batches: BatchSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        # One run has no variance.
        check_int("seeds", self.seeds, at_least=2)
        if self.training.keep_last is None:
            raise InputError("Expected --keep-last 2 or more: which iterates vary?")
        check_int("keep_last", self.training.keep_last, at_least=2)

    @property
    def trained(self) -> TrainSettings:
        """Training settings of all runs, which write intervals."""
        level = self.training.uncertainty or LEVEL
        return dataclasses.replace(self.training, uncertainty=level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftSettings(OneTraining):
    """Runs on a stream whose distribution shifts periodically.  All public.

    Attributes:
      training: Training settings of all runs.  If they ask for no average, runs have
        the average of the last period, and an exponential one of about its length.
      expected_batch_size: Rows per step.
      period: Steps per period.
      shift_by: Column whose small and large values alternate; "name:index" for one
        element of a list.
      data_is_public: Whether the user declares the rows public: their order depends on
        their values.
    """

    expected_batch_size: int
    period: int
    shift_by: str
    data_is_public: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("batch_size", self.expected_batch_size, at_least=1)
        check_int("period", self.period, at_least=2)
        if not self.data_is_public:
            raise InputError(
                "Expected --data-is-public: the order of the rows is made from all of "
                "them, so that no epsilon covers a run. Use public or synthetic data, "
                "and add that flag."
            )

    @property
    def trained(self) -> TrainSettings:
        """Training settings of all runs, whose curves have the averages."""
        training = self.training
        if not training.averages_every_step:
            decay = 1 - 2 / (self.period + 1)
            training = dataclasses.replace(training, ema_decay=decay, tail=self.period)
        every = training.eval_every or max(1, self.period // 8)
        return dataclasses.replace(training, evaluate_averages=True, eval_every=every)
