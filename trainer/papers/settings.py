"""Settings of the experiments of the papers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from accounting.core.plan import POISSON, TRUNCATED_POISSON
from accounting.core.validation import InputError, check_choice, check_float, check_int
from accounting.planning import tan
from pipelines.job.batch_settings import BatchSettings
from trainer.settings import methods
from trainer.settings.comparison_settings import Experiment, check_seed
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.request import Request
from trainer.settings.setting import REQUIRED, setting
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE, TrainSettings

#: Default learning rate, of all runs: for Adam, of any number of steps.
DEFAULT_RATE = 0.01

#: Level of the intervals, unless a setting says another.
LEVEL = 0.95

_One = TypeVar("_One", bound="OneTraining")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTraining(Experiment):
    """An experiment with one training setting.

    Attributes:
      training: Training settings of all runs.
    """

    training: TrainSettings

    @property
    def trained(self) -> TrainSettings:
        """Training settings of all runs, as they are executed."""
        return self.training

    @property
    def all_trained(self) -> tuple[TrainSettings, ...]:
        return (self.trained,)

    def train_as(
        self: _One, change: Callable[[TrainSettings], TrainSettings], **fields: Any
    ) -> _One:
        return dataclasses.replace(self, training=change(self.training), **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationSettings(OneTraining):
    """A costly run, and the cheap runs that predict it.  All public.

    Attributes:
      training: Training settings of the costly run, with ``target_delta``, and with
        ``target_epsilon`` or ``noise_multiplier``.
      expected_batch_size: Expected rows per step of the reference, the run to predict.
      small_batch_sizes: Expected rows per step of the simulated runs: two or more
        sizes.
      num_epochs: Epochs of the reference.
      num_steps: Number of steps of all runs, instead of --epochs.
      learning_rates: Learning rates to compare, instead of that of ``training``.
      sampler: Sampler of all batches.
    """

    expected_batch_size: int = setting(REQUIRED, flag="batch_size", at_least=1)
    small_batch_sizes: tuple[int, ...] = setting(REQUIRED, metavar="B1,B2,...")
    num_epochs: int | None = setting(None, flag="epochs")
    num_steps: int | None = setting(None)
    learning_rates: tuple[float, ...] = (DEFAULT_RATE,)
    sampler: str = setting(TRUNCATED_POISSON, choices=(TRUNCATED_POISSON, POISSON))

    def __post_init__(self) -> None:
        super().__post_init__()
        tan.check_sizes(self.small_batch_sizes, self.expected_batch_size)
        if self.seeds * len(self.small_batch_sizes) < 3:
            raise InputError(
                f"Expected seeds={self.seeds} times {len(self.small_batch_sizes)} "
                "batch sizes to be at least 3 runs: two points lie on a line, however "
                "far they scatter."
            )
        self._check_training()
        self._check_rates()

    def _check_training(self) -> None:
        training = self.training
        check_seed(training)
        check_choice("method", training.method, methods.with_dp_sgd_accounting())
        if training.target_delta is None:
            raise InputError("Expected target_delta of the run that is predicted.")
        if training.noise_multiplier is not None:
            check_float("noise_multiplier", training.noise_multiplier, above=0)

    def _check_rates(self) -> None:
        rates = self.learning_rates
        if not rates or len(set(rates)) != len(rates):
            raise InputError(f"Expected learning_rate={rates} to hold each value once.")
        for rate in rates:
            dataclasses.replace(self.training, learning_rate=rate)

    @property
    def delta(self) -> float:
        """Delta of the costly run."""
        assert self.training.target_delta is not None  # checked
        return self.training.target_delta


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
            raise InputError(
                "No iterates are kept, whose spread is measured. Add --keep-last 10."
            )
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
      period: Period of the shift, in steps.
      shift_by: Column whose small and large values alternate; NAME:INDEX for one
        element of a list.
      data_is_public: Declare that --input needs no protection.  Required: no epsilon
        covers the order of the rows, which depends on all of them.
    """

    expected_batch_size: int = setting(REQUIRED, flag="batch_size", at_least=1)
    period: int = setting(REQUIRED, at_least=2)
    shift_by: str = setting(REQUIRED, metavar="COLUMN[:INDEX]")
    data_is_public: bool = setting(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data_is_public:
            raise InputError(
                "No epsilon covers a run, since the order of the rows is made from all "
                "of them. Use public or synthetic data, and add --data-is-public."
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasSettings:
    """Methods whose clipping bias is measured, each in a run of its own.  All public.

    Attributes:
      batches: Folder that ``dpsgd batches`` wrote.
      held_out: Folder of held-out examples, as for ``dpsgd train``.
      out: New folder, or that of the same diagnostics.
      trained: Settings of one run per method; every method clips.
      data_is_public: Whether the user declares the training examples public.  The
        measurements are functions of them without noise.
      budget: As of ``Experiment``.
    """

    batches: pathlib.Path
    held_out: pathlib.Path
    out: pathlib.Path
    trained: tuple[TrainSettings, ...]
    data_is_public: bool = False
    budget: pathlib.Path | None = None

    def __post_init__(self) -> None:
        if not self.data_is_public:
            raise InputError(
                "No epsilon covers the bias of clipping, which is computed from the "
                "examples without noise. Use public data, and add --data-is-public."
            )
        found = [each.method for each in self.trained]
        if not found or len(set(found)) < len(found):
            raise InputError(
                f"Expected each method once; got {', '.join(found) or 'none'}."
            )
        for each in self.trained:
            _check_clips(each)
        self.requests()

    def requests(self) -> list[Request]:
        """Returns one run per method.

        Raises:
          InputError: a folder is not on this machine.
        """
        return [
            Request(
                settings=dataclasses.replace(
                    each, non_private_diagnostics=True, embedding_noise=DENSE_NOISE
                ),
                batches=self.batches,
                held_out=self.held_out,
                run=self.out / "runs" / each.method,
                batches_used_before=True,  # by other methods: the data is public
            )
            for each in self.trained
        ]


def _check_clips(training: TrainSettings) -> None:
    if training.method == NON_PRIVATE:
        raise InputError(
            "Expected no method='non-private': nothing is clipped. Omit it."
        )
    if training.embedding_noise == LAZY_NOISE:
        raise InputError(
            "Expected no --embedding-noise lazy: rows that wait for their noise would "
            "be measured without it. Omit it for dense noise."
        )
