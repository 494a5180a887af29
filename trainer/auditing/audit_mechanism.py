"""Repeated trials of the mechanism on its worst-case data set.

One example, the canary, contributes the whole clip norm to each of its steps, or is a
ghost that contributes nothing.  If the privacy unit is a user, the canary has several
such examples.  Each step releases the sum over its examples plus noise: one number per
step, in clip norms, since other directions do not help to tell the two data sets apart.

Sampler and noise are those of a run (``pipelines.sampling.samplers``,
``trainer.core.step.noise``).  With samplers that choose rows independently, the other
examples contribute nothing.  With shuffles they contribute the opposite of the canary,
which reveals the step in which the canary replaced one of them; under Poisson sampling,
where batch sizes are random, this would reveal nothing.

Scaling.  Steps, epochs, noise multiplier and sampling probability are those of the
plan.  The attacker's view depends only on the canary's own steps:
  - Poisson, balls-and-bins, deterministic: the canary's choices are a function of its
    own block, so that only a few rows of one block are sampled.  Nothing is scaled.
  - truncated Poisson: if the plan has few enough rows, all are sampled and truncated.
    Otherwise the cap is omitted, which changes any probability by at most ``slack``,
    the probability that any step is truncated; the bounds are lowered by it.
  - shuffles: if the plan has too many rows for a shuffle per trial, fewer are shuffled,
    into as many equal batches.  The canary's step is uniform either way, exactly so if
    the batch size divides the number of examples.

The score is the log-likelihood ratio of the two data sets, which has the fewest errors
by the Neyman-Pearson lemma.

Formal guarantees:
  - Fresh keys: every trial has its own sampling key, every chunk of trials its own
    secret; in a chunk each trial reads its own values of each step's noise.
  - Both data sets are sampled alike; only the canary's contribution differs.

Public: everything, since nobody's data is in it.

References:
  Nasr et al. (2021), arXiv:2101.04535, and (2023), arXiv:2302.07956, for gradient
  canaries; Chua et al. (2024), arXiv:2403.17673, for the worst case of shuffles;
  Annamalai et al. (2024), arXiv:2411.10614, for audits of shuffles.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

import numpy as np

from accounting.auditing import audit_case, audits
from accounting.auditing.audit_case import Case, Observe
from accounting.core.plan import DpSgdPlan
from pipelines.core.keys import KEY_BYTES
from pipelines.sampling import samplers
from pipelines.sampling.samplers import BlockRows
from pipelines.sampling.shuffle import first_positions
from trainer.core.step import noise

#: Largest number of noise values in a chunk of trials (128 MiB), and of its trials.
_CHUNK_VALUES = 1 << 24
_MOST_CHUNK = 1 << 14
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
    return audits.audit_of(plan.sampler, canary_rows).worst_case(plan)


def _blocks(case: Case) -> list[BlockRows]:
    firsts = itertools.accumulate(case.block_rows, initial=case.first_row)
    return [
        BlockRows(name=f"audit.parquet#{index}", num_rows=size, first_row=first)
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
    boundaries = samplers.find_boundaries(plan, sampling_key, blocks)
    first, rows, steps, priorities = 0, [], [], []
    for block in blocks:
        chosen = samplers.sample_block(plan, sampling_key, block, boundaries)
        rows.append(first + chosen.row)
        steps.append(chosen.step)
        priorities.append(chosen.priority)
        first += block.num_rows
    row, step = np.concatenate(rows), np.concatenate(steps)
    if plan.truncated_batch_size is not None:
        kept = np.concatenate(
            samplers.arrange_steps(
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
    return sums - case.others * _known_sizes(plan) if case.others else sums


def _known_sizes(plan: DpSgdPlan) -> np.ndarray:
    starts = first_positions(plan.num_examples, plan.steps_per_epoch)
    sizes = np.diff(np.append(starts, plan.num_examples))
    return np.tile(sizes, plan.num_epochs)


def simulate(
    case: Case,
    noise_multiplier: float,
    trials: int,
    *,
    real: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Returns the scores of independent trials, shape (trials,); see `sample_sums`.

    Args:
      noise_multiplier: Noise multiplier, above 0.
      trials: Number of trials.
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
            if trial % 100 == 99:
                advance(50)  # the other half of the work is noise and scores
        scores.append(_score_chunk(case, noise_multiplier, sums))
        advance(count - count // 100 * 50)
    return np.concatenate(scores)


def _score_chunk(case: Case, noise_multiplier: float, sums: np.ndarray) -> np.ndarray:
    secret = secrets.token_bytes(KEY_BYTES)
    shapes = [(sums.shape[1],)]

    def observe(step: int) -> np.ndarray:
        (drawn,) = noise.step_noise(secret, step, shapes, noise_multiplier, _UNIT)
        return sums[step] + drawn * _UNIT

    return score(
        case.plan,
        noise_multiplier,
        observe,
        positions=np.array(case.first_row + case.canary),
        means=case.means,
        canary_rows=case.canary_rows,
    )


def score(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    *,
    positions: np.ndarray,
    means: tuple[float, float] = audit_case.MEANS,
    canary_rows: int = 1,
) -> np.ndarray:
    """Returns ``ln Pr[observed | canary] / Pr[observed | ghost]`` of each trial.

    Other arguments as for `worst_case` and as for `simulate`.

    Args:
      observe: Step -> released values of all trials.
      positions: Row of the canary in the data, one for all trials or one per trial.
      means: Means of a step with the canary and with the ghost, relative to steps
        without.
    """
    audit = audits.audit_of(plan.sampler, canary_rows)
    return audit.score(plan, noise_multiplier, observe, positions, means)
