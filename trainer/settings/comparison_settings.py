"""Settings of a comparison."""

from __future__ import annotations

import dataclasses
import pathlib

from accounting.core import sampler_registry
from accounting.core.plan import DYNAMIC_SHUFFLE, TRUNCATED_POISSON
from accounting.core.validation import InputError, check_choice
from pipelines.job.batch_settings import BatchSettings
from trainer.settings.setting import REQUIRED, check_declared, setting
from trainer.settings.train_settings import TrainSettings

#: The last weights, among names of averages.
LAST = "last"

#: The first metric of the label's task.
AUTO_METRIC = "auto"

#: The noise of a sampler for a target: that of the first sampler, what is proven to
#: suffice for its own batches, or the least that no lower bound refutes.
SAME = "same"
OWN = "own"
OPTIMISTIC = "optimistic"
NOISE_RULES = (SAME, OWN, OPTIMISTIC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Where the runs of a comparison, or of a benchmark, read and write.

    Attributes:
      source: Training Parquet: a folder, a file or a quoted glob.
      held_out: Held-out Parquet, such as the test split: a folder, a file or a quoted
        glob.
      out: New folder, or of a stopped run.
      seeds: Number of repetitions, each with its own batches, initial weights and
        noise.
      metric: Held-out metric; auto: AUC, accuracy or the loss, depending on the label.
      checkpoint_every: Steps between checkpoints; by time if None.
    """

    source: str = setting(REQUIRED, flag="input")
    held_out: pathlib.Path = setting(REQUIRED, flag="eval")
    out: pathlib.Path = setting(REQUIRED)
    seeds: int = setting(3, at_least=1)
    metric: str = setting(AUTO_METRIC)
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        check_declared(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Experiment):
    """A comparison of samplers and of training settings.  All public.

    Runs are all combinations of sampler, size, method, target and noise rule.

    Attributes:
      batches: Sampling settings, one per batch size and number of epochs.  ``samplers``
        replaces their sampler, and their ``epsilon`` is raised to the largest target.
      trained: Training settings, one per method, target and tried value.  ``noise``
        chooses the noise for those with ``target_epsilon``; a given
        ``noise_multiplier`` is that of all samplers.
      samplers: Samplers of the batches.
      noise: How a target chooses noise, from ``NOISE_RULES``: ``same`` for all
        samplers, as the first one needs; each its ``own``, which is proven to suffice;
        or ``optimistic``, which lower bounds allow but nothing guarantees.
    """

    batches: tuple[BatchSettings, ...]
    trained: tuple[TrainSettings, ...]
    samplers: tuple[str, ...] = (TRUNCATED_POISSON, DYNAMIC_SHUFFLE)
    noise: tuple[str, ...] = (SAME,)

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
        self._check_rules()
        for each in self.trained:
            check_seed(each)
        if len(self.deltas) > 1:
            raise InputError(
                f"target_delta={self.deltas[1]!r} differs from {self.deltas[0]!r} of "
                "another method. Give one delta for all."
            )

    def _check_rules(self) -> None:
        """Refuses rules that choose the noise if all of it is given."""
        given = [e.noise_multiplier for e in self.trained if e.noise_multiplier]
        targets = [each.target_epsilon for each in self.trained]
        if self.noise != (SAME,) and given and not any(targets):
            raise InputError(
                f"noise={','.join(self.noise)!r} needs a target_epsilon: a given "
                f"noise_multiplier={given[0]!r} is that of all samplers. Omit --noise, "
                "or give --epsilon in place of --noise-multiplier."
            )

    @property
    def deltas(self) -> list[float]:
        """The delta of the targets in a list, which is empty without one."""
        found = [each.target_delta for each in self.trained]
        return [delta for delta in dict.fromkeys(found) if delta is not None]

    def batches_of(self, sampler: str) -> list[BatchSettings]:
        """Returns the sampling settings of one sampler, which suit every target."""
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


def check_seed(training: TrainSettings) -> None:
    """Refuses a seed, which an experiment chooses, and runs that share no batches.

    Raises:
      InputError: a seed is given, or the run is one of several declared together.
    """
    if training.of_runs != 1:
        raise InputError(
            f"Expected of_runs={training.of_runs} to be 1: runs of an experiment share "
            "batches, and no epsilon covers them together. Omit it."
        )
    if training.init_seed:
        raise InputError(
            f"init_seed={training.init_seed!r} is set for every run. Omit it."
        )
