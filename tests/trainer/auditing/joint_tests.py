"""One verdict on several kinds of runs, each of which is judged separately.

A kind without a fault must not hide the fault of another.  So each kind has its own
verdict and checks, which share the probability of a false alarm equally.

Formal guarantees, for trials that are independent within each kind:
  - If the claim is true of every kind, and the residuals of every kind are noise as
    claimed, ``violated`` is true with probability at most one minus the confidence,
    however the kinds depend on each other (Boole's inequality).
  - The results of one kind do not change the verdict on another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accounting.auditing import audit
from accounting.auditing.audit import AuditedClaim, Verdict, percent
from accounting.core.validation import InputError, check_float
from tests.trainer.auditing import residuals
from tests.trainer.auditing.residuals import Check

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """The results of runs of one kind.

    Attributes:
      name: Name of the kind.
      real: Scores of trials with the example, shape (trials,); empty if the kind has
        no trials.
      ghost: Scores of trials with a ghost in its place, shape (trials,).
      slack: As for `audit.judge`.
      checks: Checks of what was released; empty for none.
    """

    name: str
    real: NDArray[np.float64]
    ghost: NDArray[np.float64]
    slack: float = 0.0
    checks: tuple[Check, ...] = ()

    @property
    def has_trials(self) -> bool:
        """Whether there are scores to judge."""
        return bool(len(self.real) or len(self.ghost))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdict on runs of one kind.

    Attributes:
      name: Name of the kind.
      verdict: Verdict on its trials; None if it has none.
      checks: All checks.
      contradicted: The checks that failed.
    """

    name: str
    verdict: Verdict | None
    checks: tuple[Check, ...]
    contradicted: tuple[Check, ...]

    @property
    def violated(self) -> bool:
        """Whether trials refute the claim, or checks the mechanism."""
        refuted = self.verdict is not None and self.verdict.violated
        return refuted or bool(self.contradicted)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return {
            "name": self.name,
            **(self.verdict.to_json() if self.verdict is not None else {}),
            "violated": self.violated,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "contradicted": [check.name for check in self.contradicted],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointVerdict:
    """The verdict on a claim, over all kinds of runs.

    Attributes:
      claim: The tested claim.
      confidence: Joint confidence of all verdicts and checks.
      judged: One for each kind of run.
    """

    claim: AuditedClaim
    confidence: float
    judged: tuple[Judged, ...]

    @property
    def violated(self) -> bool:
        """Whether the claim, or that its mechanism was executed, is refuted."""
        return any(one.violated for one in self.judged)

    @property
    def trials(self) -> int:
        """Number of trials of all kinds."""
        return sum(v.trials for v in self._verdicts)

    @property
    def closest(self) -> Verdict:
        """The verdict of trials that refutes the claim, or comes closest to it."""
        return max(
            self._verdicts,
            key=lambda v: (
                v.violated,
                v.findings[0].violated,
                v.findings[-1].epsilon_lower_bound,
            ),
        )

    @property
    def _verdicts(self) -> list[Verdict]:
        return [one.verdict for one in self.judged if one.verdict is not None]

    @property
    def text(self) -> str:
        """The verdict in one sentence."""
        if not self.violated:
            return self.closest.not_violated(self.confidence)
        if self.closest.violated:
            return self.closest.text
        name, check = min(
            ((one.name, check) for one in self.judged for check in one.contradicted),
            key=lambda found: found[1].p_value,
        )
        return (
            "VIOLATED: this is not the mechanism whose epsilon is claimed, with "
            f"confidence {percent(self.confidence)}. Found: {check.name} ({name}): "
            f"{check.worst:.4g} instead of {check.expected:.4g}."
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return {
            **self.closest.to_json(),
            "trials": self.trials,
            "violated": self.violated,
            "verdict": self.text,
            "confidence": self.confidence,
            "runs": [one.to_json() for one in self.judged],
        }


def judge(
    claim: AuditedClaim, evidence: Sequence[Evidence], *, confidence: float
) -> JointVerdict:
    """Returns the verdict of several kinds of runs on the claim.

    Args:
      claim: The claim to test.
      evidence: Results of each kind of run; at least one has trials.
      confidence: Joint confidence of all verdicts and checks, in (0, 1).

    Raises:
      InputError: no or too few trials, or a confidence outside (0, 1).
    """
    check_float("confidence", confidence, above=0.0, below=1.0)
    if not any(one.has_trials for one in evidence):
        raise InputError(f"Expected trials=0 >= {audit.LEAST_TRIALS}.")
    statements = sum(one.has_trials + bool(one.checks) for one in evidence)
    error = (1 - confidence) / statements
    return JointVerdict(
        claim=claim,
        confidence=confidence,
        judged=tuple(_judge_one(claim, one, error) for one in evidence),
    )


def _judge_one(claim: AuditedClaim, evidence: Evidence, error: float) -> Judged:
    verdict = None
    if evidence.has_trials:
        verdict = audit.judge(
            claim,
            evidence.real,
            evidence.ghost,
            confidence=1 - error,
            slack=evidence.slack,
        )
    found = residuals.contradicted(evidence.checks, error)
    return Judged(
        name=evidence.name,
        verdict=verdict,
        checks=evidence.checks,
        contradicted=tuple(found),
    )
