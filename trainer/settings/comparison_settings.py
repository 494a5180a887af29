"""What a comparison or a simulation is asked to do: frozen, public, checked."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from accounting import sampler_registry
from accounting.plan import DYNAMIC_SHUFFLE, TRUNCATED_POISSON
from accounting.planning import tan
from accounting.validation import InputError, check_choice, check_float, check_int
from pipelines.job.batch_settings import BatchSettings
from trainer.settings import methods
from trainer.settings.train_settings import TrainSettings
from trainer.settings.user_levels import UserLevels

#: Of the last weights, beside the names of averages.
LAST = "last"

#: The metric that the label's task is judged by first.
AUTO_METRIC = "auto"

#: How the noise of a sampler follows from a target: that of the first sampler, what is
#: proven to suffice for its own batches, or what no lower bound refutes.
SAME = "same"
OWN = "own"
OPTIMISTIC = "optimistic"
NOISE_RULES = (SAME, OWN, OPTIMISTIC)


_E = TypeVar("_E", bound="Experiment")
_One = TypeVar("_One", bound="OneTraining")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a comparison and a simulation have in common.

    Attributes:
      source: Parquet of the training examples: a folder, a file or a glob.
      held_out: Folder of held-out examples.
      out: New folder, or that of the same experiment.
      seeds: Repetitions, each with batches, initial weights and noise of its own.
      metric: Name of the held-out metric; "auto" is AUC, accuracy or the loss, as the
        loss says of the label.
      noise_key_file: As in ``preflight.Request``, as is the next; of all runs.
      checkpoint_every: Steps between checkpoints.
    """

    source: str
    held_out: pathlib.Path
    out: pathlib.Path
    seeds: int = 3
    metric: str = AUTO_METRIC
    noise_key_file: pathlib.Path | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        check_int("seeds", self.seeds, at_least=1)

    @property
    def all_trained(self) -> tuple[TrainSettings, ...]:
        """How its runs are trained."""
        raise NotImplementedError

    def train_as(
        self: _E, change: Callable[[TrainSettings], TrainSettings], **fields: Any
    ) -> _E:
        """Returns the same experiment on runs that are trained otherwise.

        Args:
          change: Change of the settings of every run.
          **fields: Others that change.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTraining(Experiment):
    """An experiment whose runs are trained by the same settings.

    Attributes:
      training: Training settings of all runs.
    """

    training: TrainSettings

    @property
    def trained(self) -> TrainSettings:
        """Of all runs, as they are made."""
        return self.training

    @property
    def all_trained(self) -> tuple[TrainSettings, ...]:
        """See `Experiment.all_trained`."""
        return (self.trained,)

    def train_as(
        self: _One, change: Callable[[TrainSettings], TrainSettings], **fields: Any
    ) -> _One:
        """See `Experiment.train_as`."""
        return dataclasses.replace(self, training=change(self.training), **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Experiment):
    """Ways of sampling and of training that are compared.  All public.

    Every sampler, size, method and target is combined with every other one.

    Attributes:
      batches: How to sample: one for each batch size and number of epochs.  Samplers
        are those below, and ``epsilon`` is at least the largest target.
      trained: How to train: one for each method, target, and value that is tried.  The
        noise of those with ``target_epsilon`` is chosen by ``noise``; a
        ``noise_multiplier`` that is given is that of all samplers.
      samplers: Ways of making batches.
      noise: How a target chooses noise, of ``NOISE_RULES``: ``same`` for all samplers,
        what the first one needs; each its ``own``, what is proven to suffice; or
        ``optimistic``, what lower bounds allow, which guarantees nothing.
      users: Rows or users, and how many rows of each; None if ``source`` is sampled as
        it is.  The batch sizes are then those of rows; see ``comparison.levels``.
      jobs: Runs at once, each in a process of its own; 1 trains in this process.
      memory_limit: Bytes of all runs at once: fewer start where they would need more.

    Raises:
      InputError: name, value, bound, remedy.
    """

    batches: tuple[BatchSettings, ...]
    trained: tuple[TrainSettings, ...]
    samplers: tuple[str, ...] = (TRUNCATED_POISSON, DYNAMIC_SHUFFLE)
    noise: tuple[str, ...] = (SAME,)
    users: UserLevels | None = None
    jobs: int = 1
    memory_limit: int = 4 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.samplers:
            check_choice("sampler", name, sampler_registry.names())
        for rule in self.noise:
            check_choice("noise", rule, NOISE_RULES)
        if not (self.samplers and self.batches and self.trained and self.noise):
            raise InputError(
                "Expected samplers, batches, methods and noise to compare; got none."
            )
        check_int("jobs", self.jobs, at_least=1)
        check_int("memory_limit", self.memory_limit, at_least=1)
        for each in self.trained:
            _check_seed(each)
        if len(self.deltas) > 1:
            raise InputError(
                f"Expected target_delta={self.deltas[1]!r} to be {self.deltas[0]!r}, "
                "as that of all methods."
            )

    @property
    def all_trained(self) -> tuple[TrainSettings, ...]:
        """See `Experiment.all_trained`."""
        return self.trained

    def train_as(
        self, change: Callable[[TrainSettings], TrainSettings], **fields: Any
    ) -> ComparisonSettings:
        """See `Experiment.train_as`."""
        return dataclasses.replace(
            self, trained=tuple(map(change, self.trained)), **fields
        )

    @property
    def deltas(self) -> list[float]:
        """Different deltas of the targets: one, or none without privacy."""
        found = [each.target_delta for each in self.trained]
        return [delta for delta in dict.fromkeys(found) if delta is not None]

    def batches_of(self, sampler: str) -> list[BatchSettings]:
        """Returns how one sampler makes batches, which are safe for every target."""
        targets = [each.target_epsilon or 0.0 for each in self.trained]
        delta = next(iter(self.deltas), None)
        return [
            dataclasses.replace(
                each,
                sampler=sampler,
                epsilon=max(each.epsilon, *targets),
                delta=delta if each.delta is None else each.delta,
            )
            for each in self.batches
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationSettings(OneTraining):
    """A costly run, and the cheap ones that predict it.  All public.

    Attributes:
      training: Training settings of the run that is predicted; with ``target_delta``,
        and with ``target_epsilon`` or ``noise_multiplier``.
      expected_batch_size: Expected batch size of that run.
      small_batch_sizes: Batch sizes of the simulated runs: two sizes or more.
      num_epochs: Number of epochs of that run; None if ``num_steps`` is given.
      num_steps: Number of steps of all runs; None if ``num_epochs`` is given.
      learning_rates: In place of that of ``training``: which one is best?
      sampler: Poisson, truncated or not.
      weights: "last", or the average of iterates that is judged.
      confidence: Confidence of the interval, in (0, 1).
      run_reference: Whether to train the costly run too, at the best learning rate.

    Raises:
      InputError: name, value, bound, remedy.
    """

    expected_batch_size: int
    small_batch_sizes: tuple[int, ...]
    num_epochs: int | None = None
    num_steps: int | None = None
    learning_rates: tuple[float, ...] = (TrainSettings.learning_rate,)
    sampler: str = TRUNCATED_POISSON
    weights: str = LAST
    confidence: float = 0.95
    run_reference: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("expected_batch_size", self.expected_batch_size, at_least=1)
        tan.check_sizes(self.small_batch_sizes, self.expected_batch_size)
        if self.seeds * len(self.small_batch_sizes) < 3:
            raise InputError(
                f"Expected seeds={self.seeds} times {len(self.small_batch_sizes)} "
                "batch sizes to be at least 3 runs: two points lie on a line, however "
                "far they scatter."
            )
        check_float("confidence", self.confidence, above=0, below=1)
        self._check_training()
        self._check_rates()

    def _check_training(self) -> None:
        training = self.training
        _check_seed(training)
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
        """Of the run that is predicted."""
        assert self.training.target_delta is not None  # checked
        return self.training.target_delta


def _check_seed(training: TrainSettings) -> None:
    """Refuses what an experiment sets for every run."""
    for name in ("init_seed", "simulates"):
        if value := getattr(training, name):
            raise InputError(
                f"Expected no {name}={value!r}: it is set for every run. Omit it."
            )
