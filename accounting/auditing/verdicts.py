"""Tests a claimed epsilon on many trials: consistent, or violated.

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

Formal guarantees, for independent trials, whatever the mechanism and the score are:
  - coverage of a rate: ``upper_rate`` is below the true rate with probability at most
    ``error``.
  - coverage of epsilon: with rates that hold jointly with probability ``1 - error``,
    ``epsilon_bound`` exceeds the true epsilon with probability at most ``error``.
  - ``ClaimedProfile.excess`` is above 0 only for rates that contradict one of its
    claims (epsilon_j, delta_j).
  - no cherry picking: the trials that choose a threshold are not those that count.
  - false alarm: if the mechanism has the claimed profile, ``violated`` at a confidence
    is true with probability at most one minus that confidence; the same for an
    ``epsilon_lower_bound`` above the true epsilon.
  - the Gaussian bound never enters the verdict.

"Consistent" does not prove privacy: it says that this canary, this score and this
number of trials found nothing.

References:
  Clopper and Pearson (1934); Jagielski, Ullman and Oprea (2020), arXiv:2006.07709.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core import accountant, intervals
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float

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


def lower_rate(successes: Any, trials: int, error: float) -> Any:
    """Returns the Clopper-Pearson lower bound on a probability.

    Args:
      successes: Number of successes; a number or an array.
      trials: Number of independent trials.
      error: Probability with which the bound may be too high.
    """
    return 1 - upper_rate(trials - np.asarray(successes), trials, error)


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
        return np.max(self._excesses(fpr, fnr), axis=-1)

    def _excesses(self, fpr: Any, fnr: Any) -> Any:
        return self.found_deltas(fpr, fnr) - np.asarray(self.deltas)

    def worst(self, fpr: float, fnr: float) -> int:
        """Returns the index of the claim with the largest excess; see `excess`.

        Args:
          fpr: Upper bound on the false positive rate.
          fnr: Upper bound on the false negative rate.
        """
        return int(np.argmax(self._excesses(fpr, fnr)))

    def least_fnr(self, fpr: Any) -> Any:
        """Returns the trade-off curve: the least FNR of any test with this FPR."""
        fpr = np.asarray(fpr, np.float64)[..., None]
        factor = np.exp(np.minimum(self.epsilons, 700.0))
        one = 1 - np.asarray(self.deltas) - factor * fpr
        other = (1 - np.asarray(self.deltas) - fpr) / factor
        return np.maximum(np.max(np.maximum(one, other), axis=-1), 0.0)


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


def check(noise_multiplier: float, delta: float) -> None:
    """Refuses a noise multiplier or delta without a claim to audit.

    Args:
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      delta: The delta of the claim, in (0, 1).

    Raises:
      InputError: a value out of range.
    """
    remedy = "Without noise there is nothing to audit."
    check_float("noise_multiplier", noise_multiplier, above=0.0, remedy=remedy)
    accountant.check_delta(delta)


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
    check(noise_multiplier, delta)
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
class ErrorRates:
    """Error rates at one threshold, as (low, rate, high) of 95 %.  For plots alone."""

    fpr: tuple[float, float, float]
    fnr: tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the trials.

    Attributes:
      claim: The tested claim.
      trials: Number of trials, with and without the example, of both halves.
      findings: One per confidence; the last one decides.
      points: Error rates of the deciding half at increasing thresholds.
    """

    claim: AuditedClaim
    trials: int
    findings: tuple[Finding, ...]
    points: tuple[ErrorRates, ...]

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
        return self.not_violated(found.confidence)

    def not_violated(self, confidence: float) -> str:
        """Returns the verdict on a claim that ``confidence`` does not refute."""
        sure = f"with confidence {percent(confidence)}"
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
        points=_points(*deciding),
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
    test, point = _closest(claim.profile, _rates(tests, deciding, slack))
    lower = max(float(epsilon_bound(*r, claim.delta)) for r in rates)
    excess = max(float(claim.profile.excess(*pair)) for pair in rates)
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


def _closest(
    profile: ClaimedProfile, rates: list[tuple[float, float]]
) -> tuple[int, int]:
    """Returns the test, and the claim of the profile, with the largest excess."""
    excesses = [float(profile.excess(*pair)) for pair in rates]
    test = int(np.argmax(excesses))
    return test, profile.worst(*rates[test])


def _points(
    real: NDArray[np.float64], ghost: NDArray[np.float64]
) -> tuple[ErrorRates, ...]:
    thresholds = candidates(real, ghost)
    thresholds = thresholds[:: max(1, len(thresholds) // 40)]
    found = [count_errors(real, ghost, float(t)) for t in thresholds]
    return tuple(
        ErrorRates(
            fpr=_interval(errors.false_positives, errors.ghosts),
            fnr=_interval(errors.false_negatives, errors.reals),
        )
        for errors in found
    )


def _interval(count: int, trials: int) -> tuple[float, float, float]:
    """Returns a rate between the ends of its interval of ``USUAL_CONFIDENCE``."""
    error = (1 - USUAL_CONFIDENCE) / 2
    return (
        float(lower_rate(count, trials, error)),
        count / trials,
        float(upper_rate(count, trials, error)),
    )
