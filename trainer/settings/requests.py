"""What is asked of ``train``, ``audit`` and ``compare``.

A requested run: settings, folders and files.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Annotated

from cyclopts import Parameter

from accounting.core import sampler_registry
from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER, REPLACE_SPECIAL
from accounting.core.plan import DYNAMIC_SHUFFLE, TRUNCATED_POISSON, DpSgdPlan
from accounting.core.settings import (
    OUTPUT,
    RARE,
    Field,
    OfPrivacy,
    check_fields,
    one_of,
)
from accounting.core.validation import InputError, check_choice, check_float, check_int
from pipelines.files.storage import StrPath
from pipelines.job.batch_settings import BatchSettings
from trainer.settings.train_settings import OMV, OPA, WEIGHT_AVERAGES, TrainSettings

#: A path object keeps one of the two slashes after the scheme.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_COPY = "Copy it here, or mount the store."
_ONE_STORE = "Give a folder here; `dpsgd train` alone keeps a run in a store."


def check_local(remedy: str = _COPY, /, **paths: StrPath | None) -> None:
    """Refuses paths that are not on this machine.

    Args:
      remedy: End of the message.
      **paths: Paths by the names of their settings; None for no path.

    Raises:
      InputError: a path is in a store.
    """
    for name, path in paths.items():
        if path and _REMOTE.match(os.fspath(path)):
            raise InputError(
                f"Expected {name}={path} on this machine, not in a store. {remedy}"
            )


def check_batches(path: StrPath) -> None:
    """Checks the path of a folder of batches, here or in a store.

    Raises:
      InputError: a path object was made from a store's path.
    """
    if isinstance(path, os.PathLike) and _REMOTE.match(os.fspath(path)):
        raise InputError(
            f"Expected batches={path} of a store as text: a path object has lost a "
            "slash. Give a str, such as 's3://bucket/batches'."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run of ``dpsgd train``.

    Attributes:
      settings: Training settings.
      batches: Folder that ``dpsgd batches`` wrote; a str if it is in a store.
      held_out: Held-out examples whose metrics are published unprotected: a folder of
        Parquet files with the columns of the batches.  None for none.
      run: Folder for the results: new, empty, or of this run, unfinished.
      store: Folder in a store (``s3://``) that keeps ``run``, which is then new or
        empty; None for a run that stays here.
      batches_used_before: Accept batches that another private run has used.  Nothing is
        proven for both runs together, and the privacy statement says so.
      checkpoint_every: Steps between checkpoints.  [default: one per minute]
    """

    settings: TrainSettings
    batches: StrPath
    held_out: pathlib.Path | None = None
    run: pathlib.Path
    store: str | None = None
    batches_used_before: Annotated[bool, OfPrivacy, RARE] = False
    checkpoint_every: Annotated[
        int | None, Field(ge=1), Parameter(group=OUTPUT), RARE
    ] = None

    def __post_init__(self) -> None:
        check_batches(self.batches)
        check_local(_ONE_STORE, out=self.run)
        check_local(eval=self.held_out)
        if self.held_out is None and self.settings.metric is not None:
            raise InputError(
                f"Expected --eval beside --metric {self.settings.metric}, which is of "
                "held-out examples. Add --eval, or omit --metric."
            )
        check_fields(self)


#: A sampler whose epsilon is claimed of another.
Claim = Annotated[
    Annotated[str, one_of("claim", sampler_registry.names)] | None, Field()
]

#: Default number of trials: about a minute at most, for a few hundred steps.
TRIALS = 20_000
LARGEST_TRIALS = 10**8
#: More noise does not fit the integer grid on which it is added.
LARGEST_NOISE = 2.0**17


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """An audit.  All public.

    Attributes:
      plan: Plan by which the batches are really made.
      noise_multiplier: Noise multiplier of the run, above 0.
      delta: Delta of the claim, in (0, 1).
      claim: Test the epsilon of this sampler at the same noise.  [default: that of the
        audited sampler]
      trials: Number of trials.  [default: 20,000]
      confidence: Probability that a true claim is not called violated.
      max_examples_per_user: k of the claim: largest number of examples of a user.
      neighboring_relation: Relation of the claim, where the claimed sampler is that of
        ``plan``; another one is accounted for under zero-out.
      canary_rows: Examples of the canary user.  With more than the claim allows, the
        audit shows what happens if users are not bounded.  [default: as many as it
        allows]
      bounded: Whether the privacy unit is a user, also one with a single row.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    delta: float
    claim: Claim = None
    trials: Annotated[int | None, Field(ge=100, le=LARGEST_TRIALS)] = None
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.999
    max_examples_per_user: int = 1
    neighboring_relation: str = REPLACE_SPECIAL
    canary_rows: Annotated[int | None, OfPrivacy] = None
    bounded: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_float("noise_multiplier", self.noise_multiplier, at_most=LARGEST_NOISE)
        check_int("max_examples_per_user", self.max_examples_per_user, at_least=1)
        most = min(self.plan.num_examples, MOST_EXAMPLES_PER_USER)
        check_int("canary_rows", self.num_canary_rows, at_least=1, at_most=most)
        claimed_plan(self.plan, self.claim)  # refuses a claim without its cap

    @property
    def num_canary_rows(self) -> int:
        """Number of examples of the canary."""
        rows = self.canary_rows
        return self.max_examples_per_user if rows is None else rows

    @property
    def is_of_users(self) -> bool:
        """Whether canaries are users, with one row or more."""
        return self.bounded or max(self.max_examples_per_user, self.num_canary_rows) > 1

    @property
    def num_trials(self) -> int:
        """Number of all trials."""
        return TRIALS if self.trials is None else self.trials

    @property
    def claimed(self) -> DpSgdPlan:
        """The plan with the claimed sampler; raises as `claimed_plan`."""
        return claimed_plan(self.plan, self.claim)


def claimed_plan(plan: DpSgdPlan, claim: str | None) -> DpSgdPlan:
    """Returns the plan whose epsilon is claimed.

    Args:
      plan: Plan by which the batches are really made.
      claim: Claimed sampler; None for that of the plan.

    Raises:
      InputError: the claimed sampler needs a cap.
    """
    if claim is None or claim == plan.sampler:
        return plan
    if sampler_registry.rules(claim).truncates:
        raise InputError(
            f"--claim {claim} needs a cap, and these batches have none. Take --claim "
            "poisson, whose epsilon is that of a large cap."
        )
    if sampler_registry.rules(claim).cyclic:
        raise InputError(
            f"--claim {claim} needs bands. Take --claim poisson, whose rows are not "
            "in groups."
        )
    return dataclasses.replace(
        plan, sampler=claim, truncated_batch_size=None, bands=None
    )


#: The last iterate, and all averages that may predict.
#: The last weights, among names of averages.
LAST = "last"
AVERAGES = (LAST, *WEIGHT_AVERAGES, OPA, OMV)


#: The first metric of the label's task.
AUTO_METRIC = "auto"


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

    source: str
    held_out: pathlib.Path
    out: pathlib.Path
    seeds: Annotated[int, Field(ge=1)] = 3
    metric: str = AUTO_METRIC
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonSettings(Experiment):
    """A comparison of samplers and of training settings.  All public.

    Runs are all combinations of sampler, size, method and target.

    Attributes:
      batches: Sampling settings, one per batch size and number of epochs.  ``samplers``
        replaces their sampler, and their ``epsilon`` is raised to the largest target.
      trained: Training settings, one per method, target and tried value.  Those with a
        ``target_epsilon`` get the noise that is proven for each sampler; a given
        ``noise_multiplier`` is that of all samplers.
      samplers: Samplers of the batches.
    """

    batches: tuple[BatchSettings, ...]
    trained: tuple[TrainSettings, ...]
    samplers: tuple[str, ...] = (TRUNCATED_POISSON, DYNAMIC_SHUFFLE)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.samplers:
            check_choice("sampler", name, sampler_registry.names())
        if not (self.samplers and self.batches and self.trained):
            raise InputError(
                "Expected samplers, batches and methods to compare; got none."
            )
        for each in self.trained:
            check_seed(each)
        if len(self.deltas) > 1:
            raise InputError(
                f"target_delta={self.deltas[1]!r} differs from {self.deltas[0]!r} of "
                "another method. Give one delta for all."
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
