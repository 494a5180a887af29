"""A case of a comparison, and its runs.

A case is one line of the table: how batches are made, the settings of training, and the
rule that chose the noise.  Its runs differ only in their seed.

Formal guarantees:
  - Two different cases with one name are refused.
  - Cases that share sampler, batch size, epochs and seed share their batches.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import TrainSettings, number_in_words

#: In addition to ``comparison_settings.NOISE_RULES``: the noise multiplier was given.
GIVEN = "given"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One run.

    Attributes:
      name: Name of its folder.
      batches: Name of the folder of its batches.
      settings: Settings of its training.
    """

    name: str
    batches: str
    settings: TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Runs that differ only in their seed.

    Attributes:
      batches: How batches are made.
      settings: Settings of training, with the noise.
      target_epsilon: Target that the noise was chosen for; None without a target.
      noise_rule: One of ``NOISE_RULES`` or ``GIVEN``; None without privacy.
    """

    batches: BatchSettings
    settings: TrainSettings
    target_epsilon: float | None = None
    noise_rule: str | None = None

    @property
    def name(self) -> str:
        """Name of the runs, without the seed."""
        settings = self.settings
        words = [name_of_batches(self.batches), settings.method]
        if self.target_epsilon is not None:
            words += [f"eps{self.target_epsilon:g}", f"{self.noise_rule}"]
        elif self.noise_rule is not None:
            words.append(f"noise{settings.noise_multiplier:g}")
        words.append(f"lr{number_in_words(settings.learning_rate)}")
        if settings.l2_norm_clip is not None:
            words.append(f"clip{number_in_words(settings.l2_norm_clip)}")
        words += [
            f"{name.replace('_', '-')}{value}"
            for name, value in settings.method_settings.items()
        ]
        # A setting that is text must not change the folder.
        return re.sub(r"[^\w.+-]", "_", "-".join(words))

    def name_of_batches(self, seed: int) -> str:
        """Returns the name of the folder of the batches."""
        return f"{name_of_batches(self.batches)}-seed{seed}"

    def trial(self, seed: int) -> Trial:
        """Returns the run of one seed, with its own initial weights."""
        return Trial(
            name=f"{self.name}-seed{seed}",
            batches=self.name_of_batches(seed),
            settings=dataclasses.replace(self.settings, init_seed=seed),
        )


def name_of_batches(batches: BatchSettings) -> str:
    """Returns the name of a way of making batches.

    Example:
      >>> name_of_batches(BatchSettings(expected_batch_size=256, num_epochs=3))
      'truncated-poisson-b256-e3'
    """
    length = f"e{batches.num_epochs}" if batches.num_epochs else f"t{batches.num_steps}"
    return f"{batches.sampler}-b{batches.expected_batch_size}-{length}"


def without_repetition(cases: Iterable[Case]) -> list[Case]:
    """Returns every case once, in order of first occurrence.

    Raises:
      InputError: two different cases have the same name.
    """
    found: dict[str, Case] = {}
    for case in cases:
        if found.setdefault(case.name, case) != case:
            raise InputError(
                f"Expected runs {case.name} to have the same settings: they differ in "
                "more than method, target, noise, learning rate, clip norm, settings "
                "of the method, batch size and epochs. Compare them in separate --out "
                "folders."
            )
    return list(found.values())


def is_private(settings: TrainSettings) -> bool:
    """Returns whether a run clips and adds noise."""
    return settings.method != NON_PRIVATE
