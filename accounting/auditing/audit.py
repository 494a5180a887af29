"""Tests a claimed epsilon on many trials: consistent, or violated.

A claim is an epsilon at delta together with the accountant's whole privacy profile for
the same noise: (epsilon_j, delta_j) for many j.  One half of the trials chooses three
thresholds: for the bound on epsilon at delta, for the profile, and for the Gaussian
bound.  The other half decides.  A violated point of the profile refutes the claim,
often with far fewer trials than a violation at the small delta would take.

Formal guarantees, for independent trials, whatever the mechanism and the score are:
  - no cherry picking: the trials that choose a threshold are not those that count.
  - false alarm: if the mechanism has the claimed profile, ``violated`` at a confidence
    is true with probability at most one minus that confidence; the same for an
    ``epsilon_lower_bound`` above the true epsilon.
  - the Gaussian bound never enters the verdict.

"Consistent" does not prove privacy: it says that this canary, this score and this
number of trials found nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting.auditing import lower_bounds
from accounting.auditing.lower_bounds import ClaimedProfile, Errors
from accounting.core import accountant, intervals
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float

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
    choosing, deciding = _halves(real, ghost)
    gains = (
        lambda fpr, fnr: lower_bounds.epsilon_bound(fpr, fnr, claim.delta),
        claim.profile.excess,
        lower_bounds.gaussian_distance,
    )
    error = (1 - confidence) / len(gains)
    tests = [
        lower_bounds.count_errors(
            *deciding, lower_bounds.choose_threshold(*choosing, gain, error / _CAUTION)
        )
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


_Scores = tuple["NDArray[np.float64]", "NDArray[np.float64]"]


def _halves(
    real: NDArray[np.float64], ghost: NDArray[np.float64]
) -> tuple[_Scores, _Scores]:
    reals, ghosts = len(real) // 2, len(ghost) // 2
    return (real[:reals], ghost[:ghosts]), (real[reals:], ghost[ghosts:])


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
    lower = max(float(lower_bounds.epsilon_bound(*r, claim.delta)) for r in rates)
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
    thresholds = lower_bounds.candidates(real, ghost)
    thresholds = thresholds[:: max(1, len(thresholds) // 40)]
    found = [lower_bounds.count_errors(real, ghost, float(t)) for t in thresholds]
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
        float(lower_bounds.lower_rate(count, trials, error)),
        count / trials,
        float(lower_bounds.upper_rate(count, trials, error)),
    )
