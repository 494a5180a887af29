"""Audits: tests a claimed epsilon on many trials of a worst case.

A claim is an epsilon at delta together with the accountant's whole privacy profile for
the same noise: (epsilon_j, delta_j) for many j.  One half of the trials chooses three
thresholds: for the bound on epsilon at delta, for the profile, and for the Gaussian
bound.  The other half decides.  A violated point of the profile refutes the claim,
often with far fewer trials than a violation at the small delta would take.

The test says "real" if a score of the mechanism's output exceeds a threshold, and
"ghost" otherwise.  If the mechanism is (epsilon, delta)-private, its error rates obey

    1 - FNR <= e^epsilon FPR + delta,       1 - FPR <= e^epsilon FNR + delta,

so that small error rates prove a large epsilon.  The Clopper-Pearson interval over
independent trials bounds the rates from above.

If the trials are independent, then whatever the mechanism and the score are, a true
claim is refuted with probability at most one minus the confidence, and
``epsilon_lower_bound`` exceeds the true epsilon with at most that probability.  The
Gaussian bound chooses a threshold and never enters the verdict.

"Consistent" does not prove privacy: it says that this canary, this score and this
number of trials found nothing.

*Worst cases*: one example, the canary, contributes 1 to its steps, in units of the clip
norm, or is a ghost that contributes nothing.  Every other example contributes the same
constant.  If the privacy unit is a user, the canary is a user with several such
examples.  The score is the log-likelihood ratio of canary and ghost, given the
observations of all steps; by the Neyman-Pearson lemma no score has fewer errors.

Another package calls `register` beside `accounting.core.sampler_registry.register`.  A
sampler without an audit is refused, and so is a second audit of a sampler.

References:
  Clopper and Pearson (1934); Jagielski, Ullman and Oprea (2020), arXiv:2006.07709.

Public: everything, since the data set is synthetic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.claims import shuffle
from accounting.core import accountant, intervals, sampler_registry
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.core.plan import (
    BALLS_AND_BINS,
    CYCLIC_POISSON,
    DETERMINISTIC,
    DYNAMIC_SHUFFLE,
    PERSISTENT_SHUFFLE,
    POISSON,
    TRUNCATED_CYCLIC_POISSON,
    TRUNCATED_POISSON,
    DpSgdPlan,
)
from accounting.core.pld import dominating_pairs
from accounting.core.samplers.truncated_poisson import truncation_probability
from accounting.core.validation import InputError, check_float, check_int

#: Ranks, from each end, whose scores are tried as thresholds.  They are few, and none
#: is exceeded by only a handful of scores: the best of many thresholds is often luck.
_NUM_RANKS = 20
_LEAST_RANK = 5

#: (false positive rates, false negative rates) -> what a threshold maximises.
Gain = Callable[[Any, Any], Any]


def upper_rate(successes: Any, trials: int, error: float) -> Any:
    """Returns the Clopper-Pearson upper bound on a probability.

    Args:
      successes: Number of successes; a number or an array.
      trials: Number of independent trials.
      error: Probability with which the bound may be too low.

    Example:
      >>> bool(abs(upper_rate(0, 100, 0.05) - (1 - 0.05**0.01)) < 1e-12)
      True
    """
    count = np.asarray(successes, np.float64)
    # The quantile of Beta(count + 1, trials - count), which for no failures is 1.
    rest = np.maximum(trials - count, 1)
    quantile = special.betaincinv(count + 1, rest, 1 - error)
    bound = np.where(count >= trials, 1.0, quantile)
    return bound if bound.ndim else float(bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Error counts of a test, or of one at each of several thresholds.

    Attributes:
      false_positives: Number of trials without the example that were called "real".
      ghosts: Number of trials without the example.
      false_negatives: Number of trials with the example that were called "ghost".
      reals: Number of trials with the example.
    """

    false_positives: Any
    ghosts: int
    false_negatives: Any
    reals: int

    def upper(self, error: float) -> tuple[Any, Any]:
        """Returns upper bounds on FPR and FNR; ``error`` is their joint error."""
        return (
            upper_rate(self.false_positives, self.ghosts, error / 2),
            upper_rate(self.false_negatives, self.reals, error / 2),
        )


def count_errors(
    real: NDArray[np.float64], ghost: NDArray[np.float64], threshold: Any
) -> Errors:
    """Returns the errors of the test "real if the score is above the threshold".

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
      threshold: The threshold, in the unit of the scores; a number or an array.
    """
    return Errors(
        false_positives=len(ghost)
        - np.searchsorted(np.sort(ghost), threshold, "right"),
        ghosts=len(ghost),
        false_negatives=np.searchsorted(np.sort(real), threshold, "right"),
        reals=len(real),
    )


def candidates(
    real: NDArray[np.float64], ghost: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns candidate thresholds: scores at ranks of both kinds, denser at the ends.

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
    """

    def ranks(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        least = min(_LEAST_RANK, len(scores))
        near = np.geomspace(least, len(scores), _NUM_RANKS).astype(np.int64) - 1
        ordered = np.sort(scores)
        return np.concatenate([ordered[near], ordered[::-1][near]])

    return np.unique(np.concatenate([ranks(real), ranks(ghost)]))


def choose_threshold(
    real: NDArray[np.float64], ghost: NDArray[np.float64], gain: Gain, error: float
) -> float:
    """Returns the threshold with the largest gain, for use on other trials.

    Args:
      real: Scores of trials with the example, shape (trials,).
      ghost: Scores of trials without it, shape (trials,).
      gain: What the threshold maximises.
      error: Probability that a bound of one threshold is too low.
    """
    thresholds = candidates(real, ghost)
    gains = gain(*count_errors(real, ghost, thresholds).upper(error))
    return float(thresholds[np.argmax(gains)])


def epsilon_bound(fpr: Any, fnr: Any, delta: float) -> Any:
    """Returns the lower bound on epsilon from upper bounds on error rates; >= 0.

    Args:
      fpr: Upper bound on the false positive rate; a number or an array.
      fnr: Upper bound on the false negative rate, of the same shape.
      delta: The delta at which epsilon is bounded.

    Example:
      >>> round(float(epsilon_bound(0.01, 0.5, 0.0)), 4)
      3.912
    """
    fpr, fnr = np.asarray(fpr, np.float64), np.asarray(fnr, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        removed = np.log(np.maximum(1 - fnr - delta, 0.0)) - np.log(fpr)
        added = np.log(np.maximum(1 - fpr - delta, 0.0)) - np.log(fnr)
    # At rates 0 and 1 one direction is -inf or NaN, and gives no bound.
    return np.fmax(np.fmax(removed, added), 0.0)


def gaussian_distance(fpr: Any, fnr: Any) -> Any:
    """Returns the least mu for which a test of N(0, 1) and N(mu, 1) has these rates.

    Any such test has FNR >= Phi(Phi^-1(1 - FPR) - mu).

    Args:
      fpr: False positive rate; a number or an array.
      fnr: False negative rate, of the same shape.
    """
    return -special.ndtri(fpr) - special.ndtri(fnr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimedProfile:
    """A claimed privacy profile: (epsilon_j, delta_j)-privacy for every j.

    Attributes:
      epsilons: Increasing, at least 0.
      deltas: One for each of ``epsilons``.
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def found_deltas(self, fpr: Any, fnr: Any) -> Any:
        """Returns lower bounds on delta at each epsilon, shape (..., epsilons).

        Args:
          fpr: Upper bound on the false positive rate; a number or an array.
          fnr: Upper bound on the false negative rate, of the same shape.
        """
        fpr = np.asarray(fpr, np.float64)[..., None]
        fnr = np.asarray(fnr, np.float64)[..., None]
        factor = np.exp(np.minimum(self.epsilons, 700.0))
        return np.maximum(1 - fnr - factor * fpr, 1 - fpr - factor * fnr)

    def excess(self, fpr: Any, fnr: Any) -> Any:
        """Returns the largest excess of a delta found over the delta claimed.

        Args:
          fpr: Upper bound on the false positive rate; a number or an array.
          fnr: Upper bound on the false negative rate, of the same shape.
        """
        return np.max(self.excesses(fpr, fnr), axis=-1)

    def excesses(self, fpr: Any, fnr: Any) -> Any:
        """Returns the excess of the delta found at each epsilon, shape (..., epsilons).

        Args:
          fpr: Upper bound on the false positive rate; a number or an array.
          fnr: Upper bound on the false negative rate, of the same shape.
        """
        return self.found_deltas(fpr, fnr) - np.asarray(self.deltas)


#: Least number of trials: fewer give no bound.
LEAST_TRIALS = 40
#: Confidence of the findings that are shown beside the deciding ones.
USUAL_CONFIDENCE = 0.95
_PROFILE_POINTS = 17
#: Thresholds are chosen by bounds with an error probability this many times smaller.
#: Otherwise, where few trials pass, the best of several thresholds is the luckiest.
_CAUTION = 100


def percent(confidence: float) -> str:
    """Returns a confidence in percent, as text.

    Example:
      >>> percent(0.999)
      '99.9 %'
    """
    return f"{100 * confidence:.6g} %"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedClaim:
    """What is claimed of the audited mechanism.

    Attributes:
      plan: The claimed sampling.
      noise_multiplier: The claimed noise multiplier.
      delta: The delta of the claim.
      max_examples_per_user: k; above 1 the privacy unit is a user.
      epsilon: The epsilon that is proven for ``plan`` at ``delta``.
      profile: The privacy profile that is proven for ``plan``.
      neighboring_relation: The relation under which both are proven.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    delta: float
    epsilon: float
    profile: ClaimedProfile
    max_examples_per_user: int = 1
    neighboring_relation: str = REPLACE_SPECIAL


def claim(
    plan: DpSgdPlan,
    noise_multiplier: float,
    delta: float,
    max_examples_per_user: int = 1,
    neighboring_relation: str = REPLACE_SPECIAL,
) -> AuditedClaim:
    """Returns what the accountant claims of ``plan``.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      delta: The delta of the claim, in (0, 1).
      max_examples_per_user: k; above 1 the privacy unit is a user.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.

    Raises:
      InputError: a value out of range, or no finite epsilon is claimed.
    """
    remedy = "Without noise there is nothing to audit."
    check_float("noise_multiplier", noise_multiplier, above=0.0, remedy=remedy)
    accountant.check_delta(delta)
    asked: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "max_examples_per_user": max_examples_per_user,
        "neighboring_relation": neighboring_relation,
    }
    epsilon = accountant.epsilon(plan, delta=delta, **asked).guarantee
    if not np.isfinite(epsilon):
        raise InputError(
            f"Expected a finite epsilon for noise_multiplier={noise_multiplier!r}, "
            f"delta={delta!r}: without one there is nothing to audit. Add noise, or "
            "raise delta."
        )
    epsilons = np.linspace(0.0, epsilon, _PROFILE_POINTS)[:-1]
    answers = [accountant.delta(plan, epsilon=float(e), **asked) for e in epsilons]
    return AuditedClaim(
        plan=plan,
        delta=delta,
        **asked,
        epsilon=epsilon,
        profile=ClaimedProfile(
            epsilons=(*map(float, epsilons), epsilon),
            deltas=(*(found.guarantee for found in answers), delta),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What the trials show at one confidence.

    Attributes:
      confidence: Probability, over the trials, with which all bounds here hold.
      epsilon_lower_bound: Lower bound on epsilon at the claim's delta.
      other_epsilon: The point of the profile that is violated most, or nearly.
      other_delta_claimed: Delta that is claimed at ``other_epsilon``.
      other_delta: Lower bound on delta at ``other_epsilon``.
      violated: Whether the claim is refuted.
    """

    confidence: float
    epsilon_lower_bound: float
    other_epsilon: float
    other_delta_claimed: float
    other_delta: float
    violated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the trials.

    Attributes:
      claim: The tested claim.
      trials: Number of trials, with and without the example, of both halves.
      findings: One per confidence; the last one decides.
    """

    claim: AuditedClaim
    trials: int
    findings: tuple[Finding, ...]

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted at the deciding confidence."""
        return self.findings[-1].violated

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        found, claimed = self.findings[-1], self.claim.epsilon
        sure = f"with confidence {percent(found.confidence)}"
        if found.epsilon_lower_bound > claimed:
            return (
                f"VIOLATED: epsilon is at least "
                f"{intervals.lower_text(found.epsilon_lower_bound)} {sure}; claimed is "
                f"{intervals.upper_text(claimed)}."
            )
        if found.violated:
            least = intervals.delta_text(found.other_delta, math.floor)
            most = intervals.delta_text(found.other_delta_claimed, math.ceil)
            return (
                f"VIOLATED: at epsilon {found.other_epsilon!r}, delta is at least "
                f"{least} {sure}; claimed is {most}."
            )
        if any(finding.violated for finding in self.findings):
            return f"not refuted {sure}, but with less: audit again, with more trials."
        return f"consistent: nothing found against the claim {sure}."

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        fields = dataclasses.asdict(self)
        fields["claim"]["plan"] = self.claim.plan.to_json()
        return {**fields, "violated": self.violated, "verdict": self.text}


def judge(
    claim: AuditedClaim,
    real: NDArray[np.float64],
    ghost: NDArray[np.float64],
    *,
    confidence: float,
    slack: float = 0.0,
) -> Verdict:
    """Returns the verdict of the scores of independent trials on the claim.

    Args:
      claim: The claim to test.
      real: Scores of trials with the example, shape (trials,), in an order that does
        not depend on the scores.
      ghost: Scores of trials with a ghost in its place, shape (trials,), likewise.
      confidence: Confidence of the verdict, in (0, 1).
      slack: Largest difference of any probability of the trials from that of the
        claimed mechanism.

    Raises:
      InputError: too few trials, or a confidence outside (0, 1).
    """
    check_float("confidence", confidence, above=0.0, below=1.0)
    trials = len(real) + len(ghost)
    if min(len(real), len(ghost)) < LEAST_TRIALS // 2:
        raise InputError(f"Expected trials={trials} >= {LEAST_TRIALS}.")
    reals, ghosts = len(real) // 2, len(ghost) // 2
    choosing, deciding = (real[:reals], ghost[:ghosts]), (real[reals:], ghost[ghosts:])
    gains = (
        lambda fpr, fnr: epsilon_bound(fpr, fnr, claim.delta),
        claim.profile.excess,
        gaussian_distance,
    )
    error = (1 - confidence) / len(gains)
    tests = [
        count_errors(*deciding, choose_threshold(*choosing, gain, error / _CAUTION))
        for gain in gains
    ]
    levels = sorted({min(USUAL_CONFIDENCE, confidence), confidence})
    return Verdict(
        claim=claim,
        trials=trials,
        findings=tuple(
            _finding(claim, tests, level, deciding=confidence, slack=slack)
            for level in levels
        ),
    )


def _finding(
    claim: AuditedClaim,
    tests: list[Errors],
    confidence: float,
    *,
    deciding: float,
    slack: float,
) -> Finding:
    rates = _rates(tests, confidence, slack)
    lower = max(float(epsilon_bound(*r, claim.delta)) for r in rates)
    excess = max(float(claim.profile.excess(*pair)) for pair in rates)
    # The test and the point of the profile that decide, or nearly.
    decisive = [claim.profile.excesses(*r) for r in _rates(tests, deciding, slack)]
    test, point = divmod(int(np.argmax(decisive)), len(claim.profile.epsilons))
    found = float(claim.profile.found_deltas(*rates[test])[point])
    return Finding(
        confidence=confidence,
        epsilon_lower_bound=lower,
        other_epsilon=float(claim.profile.epsilons[point]),
        other_delta_claimed=claim.profile.deltas[point],
        other_delta=max(found, 0.0),
        violated=lower > claim.epsilon or excess > 0,
    )


def _rates(
    tests: list[Errors], confidence: float, slack: float
) -> list[tuple[float, float]]:
    """Returns joint upper bounds on the rates of all tests."""
    error = (1 - confidence) / len(tests)
    return [
        (min(fpr + slack, 1.0), min(fnr + slack, 1.0))
        for fpr, fnr in (errors.upper(error) for errors in tests)
    ]


# -- worst cases, and the scores of their trials ---------------------------------------

#: Mean of a step with the canary, and with the ghost, relative to other steps.
MEANS = (1.0, 0.0)

#: Step -> observations of the step in each trial, shape (trials,), in clip norms.
Observe = Callable[[int], "np.ndarray"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The data set of an audit, without the canary.

    Attributes:
      plan: The plan to sample; if ``scaled`` says so, it has fewer rows than the
        audited plan.
      block_rows: Number of rows of each sampled block.
      canary: Row of the canary among the rows of all blocks; the first, if it has more.
      canary_rows: Number of consecutive rows of the canary; several for a user.
      first_row: Number of rows of the data set before the first block.
      others: Contribution of every other row to its steps: 0; or -1 if each epoch is
        cut into steps of known, nearly equal sizes.
      means: Mean of a step with the canary, and with the ghost, relative to others.
      slack: Largest difference of any probability from that under the audited plan.
      scaled: How the case differs from the audited plan, in words; None if not.
    """

    plan: DpSgdPlan
    block_rows: tuple[int, ...]
    canary: int
    canary_rows: int = 1
    first_row: int = 0
    others: int = 0
    means: tuple[float, float] = MEANS
    slack: float = 0.0
    scaled: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What is observed in independent trials of a `Case`.

    Attributes:
      plan: How the canary was sampled.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      observe: Step -> observations, shape (trials,), in clip norms.
      positions: The canary's row in the data set, shape () or (trials,).
      means: As in `Case`.
      canary_rows: As in `Case`.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    observe: Observe
    positions: np.ndarray
    means: tuple[float, float] = MEANS
    canary_rows: int = 1


#: Trials -> ``ln Pr[observed | canary] / Pr[observed | ghost]`` of each of them.
Score = Callable[[Trials], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """How a sampler is audited.

    Attributes:
      worst_case: (plan, rows of the canary) -> the worst-case data set.
      score: Score of the observations on it.
      users: Whether the canary may have several rows.
    """

    worst_case: Callable[[DpSgdPlan, int], Case]
    score: Score
    users: bool = False


#: Largest number of rows times epochs that are sampled in a trial.
_MOST_ROWS = 4096
#: Number of rows that are sampled if only the canary's sampling matters.
_FEW_ROWS = 8


def own_block(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the case of samplers where a row's steps depend only on its own block.

    A few rows of one block are sampled, under the audited plan.

    Args:
      plan: The audited plan.
      canary_rows: Number of rows of the canary.

    Raises:
      InputError: the data set has fewer rows than the canary.
    """
    check_int("canary_rows", canary_rows, at_least=1, at_most=plan.num_examples)
    few = min(plan.num_examples, _FEW_ROWS - 1 + canary_rows)
    # In the middle, since the first and last rows may be special.
    first = (plan.num_examples - few) // 2
    return Case(
        plan=plan,
        block_rows=(few,),
        first_row=first,
        canary=(few - canary_rows + 1) // 2,
        canary_rows=canary_rows,
    )


def any_truncation_probability(plan: DpSgdPlan) -> float:
    """Returns a bound on the probability that any step is truncated; 0 without a cap.

    No probability differs by more from its value under untruncated sampling.
    """
    if plan.truncated_batch_size is None:
        return 0.0
    return min(1.0, plan.num_steps * truncation_probability(plan))


def truncated(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the data set of truncated Poisson: all rows, or a few without the cap.

    Omitting the cap changes any probability by at most the probability that any step is
    truncated.

    Args:
      plan: The audited plan.
      canary_rows: Number of rows of the canary.

    Raises:
      InputError: the data set has fewer rows than the canary.
    """
    check_int("canary_rows", canary_rows, at_least=1, at_most=plan.num_examples)
    drawn = max(plan.num_examples, plan.expected_batch_size * plan.num_steps)
    if drawn <= _MOST_ROWS:
        rows = plan.num_examples
        sizes = _two_blocks(rows)
        first = (rows - canary_rows + 1) // 2
        return Case(plan=plan, block_rows=sizes, canary=first, canary_rows=canary_rows)
    slack = any_truncation_probability(plan)
    truncation = sampler_registry.get(plan.sampler).truncation
    assert truncation is not None  # the plan has a cap
    return dataclasses.replace(
        own_block(truncation.without(plan), canary_rows),
        slack=slack,
        scaled=(
            f"steps are not truncated at {plan.truncated_batch_size:,} examples; they "
            f"would be with probability {slack:.1g} or less, which is taken off"
        ),
    )


def shuffled(plan: DpSgdPlan, canary_rows: int = 1) -> Case:
    """Returns the data set of shuffles: all other gradients are opposite.

    If shuffling all rows in each trial is too expensive, fewer rows are shuffled into
    the same number of equal batches: the canary's step is uniform either way (exactly,
    if the batch size divides the number of examples).

    Args:
      plan: The audited plan.
      canary_rows: 1, since no bound for users is known.
    """
    del canary_rows
    if plan.num_examples * plan.num_epochs <= _MOST_ROWS:
        rows, scaled = plan.num_examples, None
        sizes = _two_blocks(rows)
    else:
        rows = min(2 * plan.steps_per_epoch, plan.num_examples)
        sizes = (rows,)
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
        block_rows=sizes,
        canary=rows // 2,
        others=-1,
        means=shuffle.MEANS,
        scaled=scaled,
    )


def _two_blocks(num_rows: int) -> tuple[int, ...]:
    """Returns the sizes of two blocks of ``num_rows`` in all; a single one for 1."""
    half = num_rows // 2
    return (half, num_rows - half) if half else (num_rows,)


def known_steps(trials: Trials) -> np.ndarray:
    """Returns the score where the example's steps are known."""
    plan = trials.plan
    # Step t starts at row ceil(t n / T).
    own = trials.positions * plan.steps_per_epoch // plan.num_examples
    pair = dominating_pairs.remove_pair(1.0, trials.noise_multiplier)
    total = np.zeros(())
    for step in range(plan.num_steps):
        takes_part = own == step % plan.steps_per_epoch
        if takes_part.any():
            total = total + np.where(takes_part, pair.loss(trials.observe(step)), 0.0)
    return total


def _loss(trials: Trials) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the loss of a step of Poisson batches, with the canary first."""
    rate = float(trials.plan.sampling_probability)
    if trials.canary_rows == 1:
        return dominating_pairs.remove_pair(rate, trials.noise_multiplier).loss
    asked = trials.canary_rows, rate, trials.noise_multiplier
    ((_, pair),), _ = dominating_pairs.steps(*asked)
    return pair.loss


def independent_steps(trials: Trials) -> np.ndarray:
    """Returns the score of Poisson batches, for an example or a user."""
    loss = _loss(trials)
    total = loss(trials.observe(0))
    for step in range(1, trials.plan.num_steps):
        total += loss(trials.observe(step))
    return total


def hidden_group(trials: Trials) -> np.ndarray:
    """Returns the score of cyclic Poisson batches, whose groups are uniform."""
    loss, bands = _loss(trials), trials.plan.bands
    assert bands is not None
    # A group without steps has the same outputs with and without the canary.
    groups = [np.zeros(()) for _ in range(bands)]
    for step in range(trials.plan.num_steps):
        groups[step % bands] = groups[step % bands] + loss(trials.observe(step))
    return functools.reduce(np.logaddexp, groups) - math.log(bands)


def hidden_step(trials: Trials) -> np.ndarray:
    """Returns the score of shuffles and of balls and bins.

    The canary's step of an epoch is uniform; a persistent shuffle has one for all.
    """
    plan = trials.plan
    per_epoch = plan.steps_per_epoch
    starts = range(0, plan.num_steps, per_epoch)
    together = plan.num_shuffles == 1
    groups = [list(starts)] if together else [[start] for start in starts]
    total = np.zeros(())
    for group in groups:
        # The sum over k epochs has k times the mean and the variance.
        sums = [
            np.sum([trials.observe(start + step) for start in group], axis=0)
            for step in range(per_epoch)
        ]
        upper, lower = (
            _log_mean_ratio(sums, mean, len(group), trials.noise_multiplier)
            for mean in trials.means
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


# -- what each sampler has -------------------------------------------------------------


_SHUFFLED = Audit(worst_case=shuffled, score=hidden_step)
_AUDITS = {
    DETERMINISTIC: Audit(worst_case=own_block, score=known_steps),
    PERSISTENT_SHUFFLE: _SHUFFLED,
    DYNAMIC_SHUFFLE: _SHUFFLED,
    POISSON: Audit(worst_case=own_block, score=independent_steps, users=True),
    TRUNCATED_POISSON: Audit(worst_case=truncated, score=independent_steps, users=True),
    BALLS_AND_BINS: Audit(worst_case=own_block, score=hidden_step),
    CYCLIC_POISSON: Audit(worst_case=own_block, score=hidden_group),
    TRUNCATED_CYCLIC_POISSON: Audit(worst_case=truncated, score=hidden_group),
}


def register(name: str, audit: Audit) -> None:
    """Registers, in this process, how a sampler is audited.

    Args:
      name: As registered with `accounting.core.sampler_registry`.
      audit: The worst case and its score.

    Raises:
      InputError: the name has an audit, or is not registered with the accountant.
    """
    sampler_registry.rules(name)
    if name in _AUDITS:
        raise InputError(
            f"Expected sampler={name!r} not to have an audit yet. Choose another name."
        )
    _AUDITS[name] = audit


def audit_of(sampler: str, canary_rows: int = 1) -> Audit:
    """Returns the audit of a sampler.

    Args:
      sampler: Name of a registered sampler.
      canary_rows: Examples of the canary; above 1 it is a user.

    Raises:
      InputError: the sampler has no audit, or is not accounted for with such users.
    """
    brought(sampler, max_examples_per_user=canary_rows)
    found = _AUDITS.get(sampler)
    if found is None or (canary_rows > 1 and not found.users):
        sampler_registry.refuse(
            sampler,
            "a worst case and a score for audits",
            "Register them with accounting.audits.register.",
        )
    return found
