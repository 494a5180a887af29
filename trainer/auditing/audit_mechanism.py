"""Repeated trials of the mechanism on its worst-case data set.

One example, the canary, contributes the whole clip norm to each of its steps, or is a
ghost that contributes nothing.  If the unit is a user, the canary has several such
examples.  Each step releases the sum over its examples plus noise.  In units of the
clip norm that is one number per step, since directions in which the two worlds do not
differ do not help a test.

The sampler is ``pipelines.sampling.samplers`` and the noise is
``trainer.gradients.noise``, as a run uses them, each trial with a sampling key of its
own.  With samplers that choose rows independently, the other examples contribute
nothing.  With shuffles they contribute the opposite of the canary, which reveals the
step in which the canary replaced one of them; under Poisson sampling, where batch sizes
are random, this would reveal nothing.

Scaling.  Steps, epochs, the noise multiplier and the sampling probability are those of
the plan.  The attacker's view depends only on the canary's own steps:
  - Poisson, balls-and-bins, deterministic: the canary's choices are a function of its
    own block, so that only a few rows of one block are sampled, under the plan as it
    is.  Nothing is scaled.
  - truncated Poisson: where all rows of the plan are few enough, they are sampled and
    truncated.  Else the cap is left out; that changes any probability by at most the
    probability that any step is truncated, ``slack``, which is taken off the bounds.
  - shuffles: where the rows are too many for a shuffle per trial, fewer are shuffled,
    in as many equal batches.  The canary's step is uniform either way (exactly where
    the batch size divides the examples).

The score is the logarithm of the likelihood ratio of this pair of data sets: by Neyman
and Pearson's lemma no score has fewer errors.

Formal guarantees:
  - fresh keys: every trial has its own sampling key, every chunk of trials its own
    noise key; in a chunk each trial reads its own values of each step's noise.
  - both worlds are sampled alike; only the canary's contribution differs.

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

from accounting import neighboring_relation, sampler_registry
from accounting.plan import DpSgdPlan
from accounting.samplers import audit_case
from accounting.samplers.audit_case import Audit, Case, Observe
from pipelines.sampling import samplers
from pipelines.sampling.keys import KEY_BYTES
from pipelines.sampling.samplers import BlockRows
from pipelines.sampling.shuffle import first_positions
from trainer.gradients import noise

#: Values of a chunk of trials: 128 MiB of noise at most.
_CHUNK_VALUES = 1 << 24
_MOST_CHUNK = 1 << 14
#: Of the grid on which noise is added, as that of a run whose clip is 1.
_UNIT = 2.0**-30


def worst_case(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the data set on which ``plan`` is audited.

    Args:
      plan: That is audited.
      canary_rows: Examples of the canary, which is a user if they are several.

    Raises:
      InputError: the sampler brings no audit.
    """
    return _audit(plan, canary_rows).worst_case(plan)


def _audit(plan: DpSgdPlan, canary_rows: int) -> Audit:
    brought = neighboring_relation.brought(
        plan.sampler, max_examples_per_user=canary_rows
    )
    audit = brought.audit
    if audit is None:
        sampler_registry.refuse(
            plan.sampler,
            "a worst case and a score for audits",
            "Give its Sampler an Audit.",
        )
    return audit


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

    Under shuffles the attacker knows the sizes of the batches: what full batches of the
    other examples contribute is subtracted.

    Args:
      case: From ``worst_case``.
      sampling_key: Sampling key of the trial, 32 bytes.
      real: With the canary, or with a ghost.
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
    """Returns the scores of independent trials, shape (trials,).

    Args:
      case: From ``worst_case``.
      noise_multiplier: Above 0.
      trials: How many.
      real: With the canary, or with a ghost.
      advance: Is told of finished trials.
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
    noise_key = secrets.token_bytes(KEY_BYTES)
    shapes = [(sums.shape[1],)]

    def observe(step: int) -> np.ndarray:
        (drawn,) = noise.step_noise(noise_key, step, shapes, noise_multiplier, [_UNIT])
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

    Args:
      plan: How the canary was sampled.
      noise_multiplier: Above 0.
      observe: What was released.
      positions: The canary's row in the data, one for all trials or one for each.
      means: Means of a step with the canary, and with the ghost, beside steps without.
      canary_rows: Examples of the canary.
    """
    return _audit(plan, canary_rows).score(
        plan, noise_multiplier, observe, positions, means
    )
