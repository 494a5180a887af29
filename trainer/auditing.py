"""An audit of a plan and its noise, or of a run: a lower bound on epsilon.

Example:
  >>> from accounting.core.plan import DpSgdPlan
  >>> plan = DpSgdPlan(sampler="poisson", num_examples=400, expected_batch_size=20,
  ...                  num_steps=20)
  >>> settings = AuditSettings(plan=plan, noise_multiplier=1.0, delta=1e-5, trials=200,
  ...                          confidence=1 - 1e-9)
  >>> audit(settings).verdict.violated
  False

An audit runs many trials of the mechanism on its worst-case data set.  One example, the
canary, contributes the whole clip norm to each of its steps, or is a ghost that
contributes nothing.  If the privacy unit is a user, the canary has several such
examples.  Each step releases the sum over its examples plus noise: one number per step,
in clip norms, since other directions do not help to tell the two data sets apart.

Sampler and noise are those of a run (``pipelines.core.choices``,
``trainer.core.step.noise``).  Every trial has its own sampling key, and every chunk of
trials its own secret; within a chunk each trial reads its own values of each step's
noise.  Both data sets are sampled alike: only the canary's contribution differs.  With
samplers that choose rows independently, the other examples contribute nothing.  With
shuffles they contribute the opposite of the canary, which reveals the step in which the
canary replaced one of them; under Poisson sampling, where batch sizes are random, this
would reveal nothing.

Scaling.  Steps, epochs, noise multiplier and sampling probability are those of the
plan.  The attacker's view depends only on the canary's own steps:
  - Poisson, balls-and-bins, deterministic: the canary's choices are a function of its
    own block, so that only a few rows of one block are sampled.  Nothing is scaled.
  - truncated Poisson: if the plan has few enough rows, all are sampled and truncated.
    Otherwise the cap is omitted, which changes any probability by at most ``slack``,
    the probability that any step is truncated; the bounds are lowered by ``slack``.
  - shuffles: if the plan has too many rows for a shuffle per trial, fewer are shuffled,
    into as many equal batches.  The canary's step is uniform either way, exactly so if
    the batch size divides the number of examples.

The score is the log-likelihood ratio of the two data sets, which has the fewest errors
by the Neyman-Pearson lemma.

Public: everything, since nobody's data is in it.

References:
  Nasr et al. (2021), arXiv:2101.04535, and (2023), arXiv:2302.07956, for gradient
  canaries; Chua et al. (2024), arXiv:2403.17673, for the worst case of shuffles;
  Annamalai et al. (2024), arXiv:2411.10614, for audits of shuffles.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from accounting import audits
from accounting.audits import Case, Verdict
from accounting.core import accountant
from accounting.core.intervals import delta_text, lower_text, upper_text
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from pipelines.core.choices import (
    BlockSpan,
    arrange_steps,
    first_places,
    make_sampler,
)
from pipelines.core.keys import KEY_BYTES
from pipelines.core.users import Bounded
from trainer.core.run.run_record import RunRecord
from trainer.core.step import noise
from trainer.report.report import Report, ReportTable
from trainer.run import privacy
from trainer.settings import methods
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.requests import AuditSettings, claimed_plan

#: Largest number of noise values in a chunk of trials (128 MiB), and of its trials.
_CHUNK_VALUES = 1 << 24
_MOST_CHUNK = 1 << 10
#: Unit of the grid of noise, that of a run with clip norm 1.
_UNIT = 2.0**-30


def worst_case(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the worst-case data set of a plan.

    Args:
      plan: The audited plan.
      canary_rows: Examples of the canary; above 1 it is a user.

    Raises:
      InputError: the sampler has no audit.
    """
    audit = audits.audit_of(plan.sampler, canary_rows)
    return audit.worst_case(plan, canary_rows)


def _blocks(case: Case) -> list[BlockSpan]:
    firsts = itertools.accumulate(case.block_rows, initial=case.first_row)
    return [
        BlockSpan(label=f"audit.parquet#{index}", num_rows=size, first_row=first)
        for index, (size, first) in enumerate(
            zip(case.block_rows, firsts, strict=False)
        )
    ]


def sample_sums(case: Case, sampling_key: bytes, *, real: bool) -> np.ndarray:
    """Returns the sums of all steps of one trial before noise, shape (num_steps,).

    Shuffles have known batch sizes: the contribution of full batches of the other
    examples is subtracted.

    Args:
      case: From ``worst_case``.
      sampling_key: Sampling key of the trial, 32 bytes.
      real: Whether the canary is real or a ghost.
    """
    plan = case.plan
    blocks = _blocks(case)
    sampler = make_sampler(plan, sampling_key, blocks)
    first, rows, steps, priorities = 0, [], [], []
    for block in blocks:
        chosen = sampler.choose(block)
        rows.append(first + chosen[0])
        steps.append(chosen[1])
        priorities.append(chosen[2])
        first += block.num_rows
    row, step = np.concatenate(rows), np.concatenate(steps)
    if plan.truncated_batch_size is not None:
        kept = np.concatenate(
            arrange_steps(
                step,
                np.concatenate(priorities),
                range(plan.num_steps),
                plan.truncated_batch_size,
            )
        )
        row, step = row[kept], step[kept]
    contribution = np.full(first, float(case.others))
    own = slice(case.canary, case.canary + case.canary_rows)
    contribution[own] = 1.0 if real else 0.0
    sums = np.bincount(step, contribution[row], plan.num_steps)
    if not case.others:
        return sums
    sizes = np.diff(np.append(first_places(plan), plan.num_examples))
    return sums - case.others * np.tile(sizes, plan.num_epochs)


def simulate(
    case: Case,
    noise_multiplier: float,
    trials: int,
    *,
    real: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Returns ``ln Pr[observed | canary] / Pr[observed | ghost]`` of each trial.

    Args:
      case: From ``worst_case``.
      noise_multiplier: Noise multiplier, above 0.
      trials: Number of trials.
      real: Whether the canary is real or a ghost.
      advance: Called with numbers of finished trials.
    """
    size = max(1, min(_MOST_CHUNK, _CHUNK_VALUES // case.plan.num_steps))
    scores = []
    for start in range(0, trials, size):
        count = min(size, trials - start)
        sums = np.empty((case.plan.num_steps, count), np.float32)
        for trial in range(count):
            key = secrets.token_bytes(KEY_BYTES)
            sums[:, trial] = sample_sums(case, key, real=real)
        scores.append(_score_chunk(case, noise_multiplier, sums))
        advance(count)
    return np.concatenate(scores)


def _score_chunk(case: Case, noise_multiplier: float, sums: np.ndarray) -> np.ndarray:
    secret = secrets.token_bytes(KEY_BYTES)
    shapes = [(sums.shape[1],)]

    def observe(step: int) -> np.ndarray:
        (drawn,) = noise.step_noise(secret, step, shapes, noise_multiplier, _UNIT)
        return sums[step] + drawn * _UNIT

    trials = audits.Trials(
        plan=case.plan,
        noise_multiplier=noise_multiplier,
        observe=observe,
        positions=np.array(case.first_row + case.canary),
        means=case.means,
        canary_rows=case.canary_rows,
    )
    audit = audits.audit_of(case.plan.sampler, case.canary_rows)
    return audit.score(trials)


MEANING = (
    "A lower bound is a fact about this mechanism on its worst-case data; no better "
    "proof can go below it. Its absence proves nothing: privacy comes from the "
    "accountant's upper bound, and an audit looks for faults in code or claim."
)


#: Faults that an audit cannot see, whatever the number of trials; the last one not
#: where canaries are users with all of their rows.
CANNOT_SEE = (
    "faults of training: clipping, padding, physical batches, lazy noise, optimizers "
    "and models",
    "faults of the batch job: files, engines, several machines",
    "examples whose steps depend on other examples, since there is one canary",
    "keys that others know or that two runs share, and a weak random generator",
    "what leaves by other ways than weights: files, messages, logs, timing",
    "several rows of one person",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(Report):
    """The report of one audit.

    Attributes:
      verdict: The findings.
    """

    verdict: Verdict


def _trials(verdict: Verdict) -> ReportTable:
    claim, findings = verdict.claim, verdict.findings
    last = findings[-1]
    rows = [
        [
            f"epsilon at delta {claim.delta!r}",
            *(f">= {lower_text(found.epsilon_lower_bound)}" for found in findings),
            f"<= {upper_text(claim.epsilon)}",
        ],
        [
            f"delta at epsilon {last.other_epsilon!r}",
            *(f">= {delta_text(one.other_delta, math.floor)}" for one in findings),
            f"<= {delta_text(last.other_delta_claimed, math.ceil)}",
        ],
    ]
    sure = [audits.percent(found.confidence) for found in findings]
    return ReportTable(
        title=f"{verdict.trials:,} trials",
        headings=["found, with confidence", *sure, "claimed"],
        rows=rows,
    )


#: Unit of progress.
COUNTED = "trials"
#: Called with the unit of progress, the number done, and the total.
Progress = Callable[[str, int, int], None]


def audit(settings: AuditSettings, progress: Progress = lambda *_: None) -> AuditReport:
    """Attacks a mechanism in many trials, and returns the findings.

    Args:
      settings: Settings of the audit.
      progress: As ``Progress``.

    Raises:
      InputError: there is nothing to audit.
    """
    verdict, notes = _attack(settings, progress)
    unseen = CANNOT_SEE[:-1] if settings.is_of_users else CANNOT_SEE
    plan, claim = settings.plan, verdict.claim
    title = f"{plan.sampler} batches"
    return AuditReport(
        title=title,
        above=[
            f"{title}: n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
            f"T={plan.num_steps:,}, {plan.epochs_in_words}, noise multiplier "
            f"{claim.noise_multiplier:.6g}",
            f"claimed, by the accounting of {claim.plan.sampler}: epsilon <= "
            f"{upper_text(claim.epsilon)} at delta {claim.delta!r}",
            *(f"scale: {one}" for one in notes),
        ],
        tables=[_trials(verdict)],
        notes=[
            f"verdict: {verdict.text}",
            "An audit cannot see:",
            *(f"  - {fault}" for fault in unseen),
            MEANING,
        ],
        fields={
            "audited": plan.to_json(),
            "confidence": settings.confidence,
            "notes": notes,
            "meaning": MEANING,
            "cannot_see": list(unseen),
            **verdict.to_json(),
        },
        verdict=verdict,
    )


def settings_of_plan(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float | None,
    epsilon: float | None,
    delta: float,
    max_examples_per_user: int | None = None,
    **others: Any,
) -> AuditSettings:
    """Returns the settings of an audit of a plan.

    Args:
      plan: Plan by which the batches are made.
      noise_multiplier: Noise of the mechanism; None where the claim determines it.
      epsilon: The claim, in place of noise.
      delta: Delta of the claim.
      max_examples_per_user: Largest number of examples of a user; None for rows.
      **others: Further fields of ``AuditSettings``.

    Raises:
      InputError: a value is refused.
    """
    if (noise_multiplier is None) == (epsilon is None):
        raise InputError("Expected exactly one of --noise-multiplier and --epsilon.")
    count = 1 if max_examples_per_user is None else max_examples_per_user
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = accountant.noise_multiplier(
            claimed_plan(plan, others["claim"]),
            epsilon=epsilon,
            delta=delta,
            max_examples_per_user=count,
        ).guarantee
    return AuditSettings(
        plan=plan,
        noise_multiplier=noise_multiplier,
        delta=delta,
        max_examples_per_user=count,
        bounded=max_examples_per_user is not None,
        **others,
    )


def settings_of_run(
    record: RunRecord,
    manifest: Manifest,
    *,
    delta: float | None = None,
    allow_large_delta: bool = False,
    **others: Any,
) -> AuditSettings:
    """Returns the settings of an audit of a finished run.

    Args:
      record: Record of the run.
      manifest: Manifest of the batches.
      delta: The delta of the claim; that of the record if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      **others: Further fields of ``AuditSettings``.

    Raises:
      InputError: the run is not private, or its releases are not those of DP-SGD alone.
    """
    audited = methods.with_dp_sgd_accounting()
    if record.method not in (*audited, NON_PRIVATE):
        raise InputError(
            f"Expected method={record.method!r} to be one of {', '.join(audited)}: "
            "only what DP-SGD releases is audited."
        )
    if record.selection:
        raise InputError(
            "Expected one run; this one is the best of several, and its epsilon is "
            "that of a choice among all, which no trial of one run attacks. Name no "
            "RUN, and give its plan and noise by flags: that is the claim of each."
        )
    noise, delta = privacy.check_run(
        record, manifest, delta=delta, allow_large_delta=allow_large_delta
    )
    bounded = Bounded.of(manifest.dataset)
    if bounded is not None:
        others["bounded"] = True
        others["neighboring_relation"] = privacy.relation_of(manifest.plan, bounded)
        others["max_examples_per_user"] = bounded.max_examples_per_user
    return AuditSettings(
        plan=manifest.plan, noise_multiplier=noise, delta=delta, **others
    )


def _attack(settings: AuditSettings, progress: Progress) -> tuple[Verdict, list[str]]:
    """Returns the verdict of all trials, and notes on scaling."""
    noise, trials = settings.noise_multiplier, settings.num_trials
    claimed, relation = settings.claimed, settings.neighboring_relation
    claim = audits.claim(
        claimed,
        noise,
        settings.delta,
        settings.max_examples_per_user,
        relation if claimed == settings.plan else REPLACE_SPECIAL,
    )
    case = worst_case(settings.plan, settings.num_canary_rows)
    done = 0

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        progress(COUNTED, done, trials)

    real, ghost = (
        simulate(case, noise, count, real=real, advance=advance)
        for real, count in ((True, trials // 2), (False, trials - trials // 2))
    )
    verdict = audits.judge(
        claim, real, ghost, confidence=settings.confidence, slack=case.slack
    )
    notes = [case.scaled or "nothing is scaled: all steps, examples, noise"]
    return verdict, [*notes, *_of_users(settings, case.canary_rows)]


def _of_users(settings: AuditSettings, rows: int) -> list[str]:
    """Returns notes on canaries of ``rows`` rows."""
    if not settings.is_of_users:
        return []
    return [
        f"canaries are users with {rows:,} row(s); the claim is of users with at most "
        f"{settings.max_examples_per_user:,}"
    ]
