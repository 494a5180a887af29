"""An audit of the whole trainer: real batches, real runs, and their releases.

A table of canaries goes through the batch job and the trainer like any other: sampling,
Beam job, batch files, padding, clipping, noise, optimizer, checkpoints.  Every canary
has its own weights in several layers (see ``audit_model``); a fair coin decides whether
it is real or a ghost.  The releases are tested in two ways:

  - Trials: the change of the weights along the gradient of a canary, times b over the
    learning rate and the clip norm, is 1 for each step of the canary, plus noise.  One
    trial per canary, scored as in ``audit_mechanism``, bounds epsilon without any
    assumption.
  - Checks: without the contributions of the canaries in its batches, a release must be
    noise (see ``audit_release``).  Checks find small faults, and refute that the
    trainer is the mechanism that epsilon was proven for.

If the privacy unit is a user, a canary has many rows, of which `dpsgd prepare` keeps at
most k; an example is one of them, or the record of all.  For a run with views, every
example has as many, in columns of the batches: the canary's gradient is their mean.

There are four kinds of small runs, each judged separately: with dense and with lazy
noise, with many canaries and with so few that steps are empty.  One of them computes
gradients one example at a time.  Sampler, noise multiplier and clip norm are those of
the audited run; examples and steps are fewer.  The claim is the accountant's for the
small run.

Formal guarantees:
  - The only inputs are the iterates that the run released, its batches and manifest.
  - The labels are fair coin flips from the operating system; every run has new keys.
  - The trials of one run are as independent as the sampler's rows and the noise's
    values, which their modules guarantee and their tests check.  Under shuffles, whose
    batch sizes are fixed, and under truncation, rows are nearly independent.
  - Each fault that ``tests/trainer/auditing/test_audit_faults.py`` plants is found.

Public: everything, since nobody's data is in it.

References:
  Steinke, Nasr and Jagielski (2023), arXiv:2305.08846, for many canaries in one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from accounting.auditing import audits
from accounting.core.plan import DpSgdPlan
from pipelines.core.users.bounded import ROWS
from tests.trainer.auditing.joint_tests import Evidence
from tests.trainer.auditing.residuals import Check
from trainer.settings.train_settings import DENSE_NOISE, LAZY_NOISE

#: Canaries, hence trials, of a run.
NUM_CANARIES = 4096
#: Rows of a user before the bound, over those that are kept.
_TIMES_AS_MANY = 10
#: Largest number of rows per user, and of views per example, in a small run: more take
#: longer and show the same.
MOST_ROWS = 8
#: Canaries, and steps, of a run with few canaries: a third of the steps are empty.
_NUM_FEW = 32
_MOST_STEPS = 16
_MOST_EPOCHS = 2
#: Steps per release of a lazy run, in which rows wait for their noise.
_LAZY_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A small run that resembles the audited one.

    Attributes:
      sampler: Sampler of the audited plan.
      steps_per_epoch: At most that of the audited plan, except for few canaries.
      num_epochs: At most that of the audited plan.
      noise_multiplier: Noise multiplier of the audited run.
      l2_norm_clip: Clip norm of the audited run, or "auto".
      embedding_noise: Noise of the tables: "dense" or "lazy".
      num_canaries: Number of canaries.
      physical_batch_size: Examples per physical batch.
      model: Function of ``audit_model``.
      sampled: One of ``bounded.SAMPLED``; None if the privacy unit is an example.
      rows_per_user: Rows kept per user; 1 without users.
      views: Views per example, all equal.
    """

    sampler: str
    steps_per_epoch: int
    num_epochs: int
    noise_multiplier: float
    l2_norm_clip: float | str
    embedding_noise: str
    num_canaries: int
    physical_batch_size: int
    model: str
    sampled: str | None = None
    rows_per_user: int = 1
    views: int = 1

    @property
    def raw_rows(self) -> int:
        """Rows of a user before the bound."""
        return self.rows_per_user * (_TIMES_AS_MANY if self.sampled else 1)

    @property
    def canary_rows(self) -> int:
        """Number of examples of a canary."""
        return self.rows_per_user if self.sampled == ROWS else 1

    @property
    def num_examples(self) -> int:
        """Number of slots: users, or rows before the bound, which suffice."""
        return self.num_canaries * (self.raw_rows if self.sampled == ROWS else 1)

    @property
    def name(self) -> str:
        """Name of its kind."""
        return (
            self.embedding_noise if self.has_trials else f"{self.embedding_noise}, few"
        )

    @property
    def has_trials(self) -> bool:
        """Whether it has enough canaries to bound epsilon."""
        return self.num_canaries == NUM_CANARIES

    @property
    def expected_batch_size(self) -> int:
        """Expected examples per step."""
        return self.num_examples // self.steps_per_epoch

    @property
    def steps_per_release(self) -> int:
        """Steps per release: several with lazy noise, so that some is late."""
        lazy = self.embedding_noise == LAZY_NOISE
        return min(_LAZY_STEPS, self.steps_per_epoch) if lazy else 1


_WEIGHTS, _UNPROVEN = "weights", "unproven_weights"


def small_runs(
    plan: DpSgdPlan,
    noise_multiplier: float,
    l2_norm_clip: float | str,
    sampled: str | None = None,
    rows_per_user: int = 1,
    *,
    views: int = 1,
) -> list[SmallRun]:
    """Returns one small run of every kind for an audited plan.

    Args:
      plan: Plan of the audited batches.
      noise_multiplier: Noise multiplier of the audited run.
      l2_norm_clip: Clip norm of the audited run.
      sampled: As in ``SmallRun``.
      rows_per_user: As in ``SmallRun``.
      views: As in ``SmallRun``.
    """
    each = rows_per_user if sampled == ROWS else 1
    # A power of two, which divides the number of canaries.
    steps = 1 << (min(plan.steps_per_epoch, _MOST_STEPS).bit_length() - 1)
    size = NUM_CANARIES // steps
    kinds = (
        # If sizes vary, half of the steps have one physical batch; below, none has.
        (DENSE_NOISE, NUM_CANARIES, steps, size, _WEIGHTS),
        (LAZY_NOISE, NUM_CANARIES, steps, -(-3 * size // 8), _WEIGHTS),
        # One batch per step, except in one step of 10^14.
        (DENSE_NOISE, _NUM_FEW, _NUM_FEW, 16, _UNPROVEN),
        (LAZY_NOISE, _NUM_FEW, _NUM_FEW, 2, _WEIGHTS),
    )
    return [
        SmallRun(
            sampler=plan.sampler,
            steps_per_epoch=steps_per_epoch,
            num_epochs=min(plan.num_epochs, _MOST_EPOCHS),
            noise_multiplier=noise_multiplier,
            l2_norm_clip=l2_norm_clip,
            embedding_noise=noise,
            num_canaries=canaries,
            physical_batch_size=physical * each,
            model=model,
            sampled=sampled,
            rows_per_user=rows_per_user,
            views=views,
        )
        for noise, canaries, steps_per_epoch, physical, model in kinds
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one small run.

    Attributes:
      run: The small run.
      plan: Plan of its batches.
      real: Scores of real canaries, (canaries,); empty without trials.
      ghost: Scores of ghosts, (ghosts,); empty without trials.
      checks: Checks of its releases.
    """

    run: SmallRun
    plan: DpSgdPlan
    real: np.ndarray
    ghost: np.ndarray
    checks: list[Check]

    @property
    def slack(self) -> float:
        """Probability that a step is truncated, which makes rows dependent."""
        return audits.any_truncation_probability(self.plan)


def runs(kinds: Sequence[SmallRun], trials: int) -> list[SmallRun]:
    """Returns the small runs of an audit: one of every kind, and more for more trials.

    Args:
      kinds: From ``small_runs``.
      trials: Least number of trials, in equal shares for each kind that has trials.
    """
    with_trials = [run for run in kinds if run.has_trials]
    times = max(1, -(-trials // (len(with_trials) * NUM_CANARIES)))
    return [*kinds, *with_trials * (times - 1)]


def evidence(outcomes: Sequence[Outcome]) -> list[Evidence]:
    """Returns the evidence of all outcomes, by kind of run."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.run.name, []).append(outcome)
    return [
        Evidence(
            name=name,
            real=np.concatenate([outcome.real for outcome in found]),
            ghost=np.concatenate([outcome.ghost for outcome in found]),
            slack=sum(outcome.slack for outcome in found),
            checks=tuple(check for outcome in found for check in outcome.checks),
        )
        for name, found in by_kind.items()
    ]


def carry_out(run: SmallRun) -> Outcome:
    """Makes batches, trains, scores every canary and checks the releases.

    Raises:
      InputError: the batch job or the training was refused.
    """
    # Imported here: it loads TensorFlow.
    from tests.trainer.auditing import audit_run

    return audit_run.carry_out(run)
