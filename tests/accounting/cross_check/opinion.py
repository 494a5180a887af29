"""The answer of another accountant beside ours, with its error.

Formal guarantees:
  - an opinion disagrees exactly if no value is within both answers: ours is smaller
    than what the source refutes, or our lower bound larger than what it proves.
  - a bound of ours that is only larger than the source's is valid.  It is told of, and
    is no disagreement: the source's theorem may be sharper, or hold for fewer data
    sets.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from accounting.core.intervals import Bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opinion:
    """One answer beside ours.

    Attributes:
      source: Name of the source, with its version or seed.
      about: What the source was asked about.
      quantity: ``epsilon`` or ``delta``.
      at: The delta, or the epsilon, of the question.
      value: The answer; infinite if nothing is proven.
      low: Lower end of the truth, by the source and its error.
      high: Upper end of the truth.
      ours: Our bounds on the same quantity.
      note: How ``low`` and ``high`` were found.
    """

    source: str
    about: str
    quantity: str
    at: float
    value: float
    low: float
    high: float
    ours: Bounds
    note: str

    @property
    def disagreement(self) -> str | None:
        """The error of our answer, if the source is right; None if they agree."""
        ours, lower = self.ours.guarantee, self.ours.lower
        if ours < self.low:
            return f"our {self.quantity} is too small"
        if lower is not None and lower > self.high:
            return f"our lower bound on {self.quantity} is too large"
        return None

    @property
    def looser(self) -> str | None:
        """By how much our upper bound exceeds the source's; None if it does not."""
        ours = self.ours.guarantee
        if ours <= self.high:
            return None
        excess = ours / self.high - 1 if self.high > 0 else math.inf
        by = f"{100 * excess:.3g} % larger" if math.isfinite(excess) else "larger"
        return f"our {self.quantity} is {by}: valid, and looser than theirs"

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        numbers = ("at", "value", "low", "high")
        infinite = [name for name in numbers if not math.isfinite(getattr(self, name))]
        return {
            **dataclasses.asdict(self),
            **dict.fromkeys(infinite),
            "ours": self.ours.to_json(),
            "disagreement": self.disagreement,
            "looser": self.looser,
        }

    def to_text(self) -> str:
        """Returns the opinion as a line of text."""
        known = "delta" if self.quantity == "epsilon" else "epsilon"
        verdict = self.disagreement or self.looser or "agrees"
        return (
            f"  cross-check {self.source}: {self.quantity} {self.value:.6g} at {known} "
            f"{self.at:.6g}, hence in [{self.low:.6g}, {self.high:.6g}]; ours "
            f"{self._ours()}: {verdict}. {self.note}; of {self.about}."
        )

    def _ours(self) -> str:
        lower = self.ours.lower
        between = "" if lower is None else f"{lower:.6g} .. "
        return f"{between}{self.ours.guarantee:.6g}"
