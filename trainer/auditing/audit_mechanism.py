"""The mechanism on the data set that is worst for it, run many times over.

One example, the canary, pushes every step by the whole clip norm, or is a ghost that
contributes nothing.  What is released is, for every step, the sum over its examples
plus noise.  In units of the clip norm that is one number per step, since a test gains
nothing from directions in which the two worlds do not differ.

The sampler is ``pipelines.sampling.samplers`` and the noise is
``trainer.gradients.noise``, as a run uses them, each trial with a sampling key of its
own. The other examples contribute nothing under samplers that choose rows
independently. Under shuffles they all pull the other way, which tells the attacker
which step lost one of them to the canary; under Poisson sampling it would tell nothing,
since sizes of steps are random.

What is scaled, and what is not.  Steps, epochs, the noise multiplier and the sampling
probability are those of the plan.  What the attacker sees depends on the canary's own
steps alone:
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

import dataclasses
import secrets
from collections.abc import Callable

import numpy as np

from accounting import plan as plans
from accounting.plan import DpSgdPlan
from accounting.pld.dominating_pairs import remove_pair
from accounting.samplers import shuffle as shuffle_bounds
from accounting.samplers import truncated_poisson
from pipelines.sampling import samplers
from pipelines.sampling.keys import KEY_BYTES
from pipelines.sampling.samplers import BlockRows
from pipelines.sampling.shuffle import first_positions
from trainer.gradients import noise

#: Rows, times epochs, that are sampled in a trial at most.
MOST_ROWS = 4096
#: Rows that are sampled where only the canary's own choices matter.
_FEW_ROWS = 8
#: Values of a chunk of trials: 64 MiB of float32.
_CHUNK_VALUES = 1 << 24
_MOST_CHUNK = 1 << 14
_SHUFFLES = (plans.PERSISTENT_SHUFFLE, plans.DYNAMIC_SHUFFLE)

#: Step -> what is observed there in each trial, shape (trials,), in clip norms.
Observe = Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The data set on which a plan is audited, but for the canary.

    Attributes:
      plan: Of the batches that are sampled; of fewer rows than the audited one if
        ``scaled`` says so.
      blocks: The rows that are sampled.
      canary: Its row among them.
      others: What every other row contributes to its steps: 0, or -1.
      slack: By how much any probability may differ from that under the audited plan.
      scaled: What is not as in the audited plan, in words; None if nothing.
    """

    plan: DpSgdPlan
    blocks: tuple[BlockRows, ...]
    canary: int
    others: int = 0
    slack: float = 0.0
    scaled: str | None = None

    @property
    def means(self) -> tuple[float, float]:
        """Of a step with the canary, and with the ghost, beside steps without."""
        return shuffle_bounds.MEANS if self.others else (1.0, 0.0)


def worst_case(plan: DpSgdPlan) -> Case:
    """Returns the data set on which ``plan`` is audited."""
    if plan.sampler in _SHUFFLES:
        return _shuffled(plan)
    if plan.sampler == plans.TRUNCATED_POISSON:
        return _truncated(plan)
    few = min(plan.num_examples, _FEW_ROWS)
    # In the middle of the data, where first and last rows are not special.
    first = (plan.num_examples - few) // 2
    block = BlockRows(name="audit.parquet#0", num_rows=few, first_row=first)
    return Case(plan=plan, blocks=(block,), canary=few // 2)


def _shuffled(plan: DpSgdPlan) -> Case:
    if plan.num_examples * plan.num_epochs <= MOST_ROWS:
        rows, scaled = plan.num_examples, None
        blocks = _two_blocks(rows)
    else:
        rows = min(2 * plan.steps_per_epoch, plan.num_examples)
        blocks = (BlockRows(name="audit.parquet#0", num_rows=rows),)
        scaled = (
            f"{rows:,} of {plan.num_examples:,} examples are shuffled, in as many "
            "equal batches: the canary's step follows the same law"
        )
    smaller = dataclasses.replace(
        plan,
        num_examples=rows,
        expected_batch_size=max(1, rows // plan.steps_per_epoch),
    )
    return Case(
        plan=smaller,
        blocks=blocks,
        canary=rows // 2,
        others=-1,
        scaled=scaled,
    )


def _truncated(plan: DpSgdPlan) -> Case:
    if max(plan.num_examples, plan.expected_batch_size * plan.num_steps) <= MOST_ROWS:
        rows = plan.num_examples
        return Case(plan=plan, blocks=_two_blocks(rows), canary=rows // 2)
    open_plan = dataclasses.replace(
        plan, sampler=plans.POISSON, truncated_batch_size=None
    )
    slack = truncated_poisson.any_truncation_probability(plan)
    return dataclasses.replace(
        worst_case(open_plan),
        slack=slack,
        scaled=(
            f"steps are not truncated at {plan.truncated_batch_size:,} examples; they "
            f"would be with probability {slack:.1g} or less, which is taken off"
        ),
    )


def _two_blocks(num_rows: int) -> tuple[BlockRows, ...]:
    half = num_rows // 2
    parts = [(0, half), (half, num_rows - half)] if half else [(0, num_rows)]
    return tuple(
        BlockRows(name=f"audit.parquet#{index}", num_rows=size, first_row=first)
        for index, (first, size) in enumerate(parts)
    )


def sample_sums(case: Case, sampling_key: bytes, *, real: bool) -> np.ndarray:
    """Returns the sums of all steps before noise, of one trial, shape (num_steps,).

    Of shuffles, the contributions of whole batches of the other examples, which the
    attacker knows, are taken off.
    """
    plan = case.plan
    boundaries = samplers.find_boundaries(plan, sampling_key, case.blocks)
    first, rows, steps, priorities = 0, [], [], []
    for block in case.blocks:
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
    contribution[case.canary] = 1.0 if real else 0.0
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
        (drawn,) = noise.step_noise(noise_key, step, shapes, noise_multiplier)
        return sums[step] + drawn.astype(np.float64)

    return score(
        case.plan,
        noise_multiplier,
        observe,
        positions=np.array(case.blocks[0].first_row + case.canary),
        means=case.means,
    )


def score(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    *,
    positions: np.ndarray,
    means: tuple[float, float] = (1.0, 0.0),
) -> np.ndarray:
    """Returns ``ln Pr[observed | canary] / Pr[observed | ghost]`` of each trial.

    Args:
      plan: How the canary was sampled.
      noise_multiplier: Above 0.
      observe: What was released.
      positions: The canary's row in the data, one for all trials or one for each.
      means: Of a step with the canary, and with the ghost, beside steps without.
    """
    if plan.sampler in (plans.POISSON, plans.TRUNCATED_POISSON):
        return _independent_steps(plan, noise_multiplier, observe)
    if plan.sampler == plans.DETERMINISTIC:
        return _known_steps(plan, noise_multiplier, observe, positions)
    return _one_step_per_epoch(plan, noise_multiplier, observe, means)


def _independent_steps(
    plan: DpSgdPlan, noise_multiplier: float, observe: Observe
) -> np.ndarray:
    pair = remove_pair(float(plan.sampling_probability), noise_multiplier)
    total = pair.loss(observe(0))
    for step in range(1, plan.num_steps):
        total += pair.loss(observe(step))
    return total


def _known_steps(
    plan: DpSgdPlan, noise_multiplier: float, observe: Observe, positions: np.ndarray
) -> np.ndarray:
    starts = first_positions(plan.num_examples, plan.steps_per_epoch)
    own = np.searchsorted(starts, positions, side="right") - 1
    pair = remove_pair(1.0, noise_multiplier)
    total = np.zeros(())
    for step in range(plan.num_steps):
        takes_part = own == step % plan.steps_per_epoch
        if takes_part.any():
            total = total + np.where(takes_part, pair.loss(observe(step)), 0.0)
    return total


def _one_step_per_epoch(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    means: tuple[float, float],
) -> np.ndarray:
    """A uniform step of every epoch: one for all if the shuffle is persistent."""
    per_epoch = plan.steps_per_epoch
    starts = range(0, plan.num_steps, per_epoch)
    together = plan.sampler == plans.PERSISTENT_SHUFFLE
    groups = [list(starts)] if together else [[start] for start in starts]
    total = np.zeros(())
    for group in groups:
        # The sum of k epochs has k times the mean and k times the variance.
        sums = [
            np.sum([observe(start + step) for start in group], axis=0)
            for step in range(per_epoch)
        ]
        upper, lower = (
            _log_mean_ratio(sums, mean, len(group), noise_multiplier) for mean in means
        )
        total = total + upper - lower
    return total


def _log_mean_ratio(
    sums: list[np.ndarray], mean: float, epochs: int, noise_multiplier: float
) -> np.ndarray:
    """Returns ``ln sum_t exp((mean x_t - epochs mean^2 / 2) / s^2)``."""
    total = np.full(sums[0].shape, -np.inf)
    for observed in sums:
        exponent = (mean * observed - epochs * mean**2 / 2) / noise_multiplier**2
        np.logaddexp(total, exponent, out=total)
    return total
