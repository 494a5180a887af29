"""What another accountant says of our answer, with its error.

Formal guarantees:
  - an opinion disagrees where no value is within both: ours is too small, or our lower
    bound too large, beyond the error that is stated.
  - it also disagrees where ours is larger than it has to be, beyond both errors.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from accounting.intervals import Bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opinion:
    """One answer beside ours.

    Attributes:
      source: Who answered, with its version or its seed.
      about: What was asked.
      quantity: ``epsilon`` or ``delta``.
      at: The delta, or the epsilon, of the question.
      value: The answer; infinite if nothing is proven.
      low: The truth is at least this, by the source and its error.
      high: It is at most this.
      ours: Our bounds on the same.
      looseness: By how much our upper bound may exceed the truth, relatively.
      note: How ``low`` and ``high`` came about.
    """

    source: str
    about: str
    quantity: str
    at: float
    value: float
    low: float
    high: float
    ours: Bounds
    looseness: float
    note: str

    @property
    def disagreement(self) -> str | None:
        """What is wrong with ours, if the source is right; None if nothing is."""
        ours, lower = self.ours.guarantee, self.ours.lower
        if ours < self.low:
            return f"our {self.quantity} is too small"
        if lower is not None and lower > self.high:
            return f"our lower bound on {self.quantity} is too large"
        if ours > self.high * (1 + self.looseness):
            return f"our {self.quantity} is larger than it has to be"
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        numbers = ("at", "value", "low", "high")
        fields = {name: getattr(self, name) for name in numbers}
        return {
            "source": self.source,
            "about": self.about,
            "quantity": self.quantity,
            **{n: v if math.isfinite(v) else None for n, v in fields.items()},
            "ours": self.ours.to_json(),
            "note": self.note,
            "disagreement": self.disagreement,
        }

    def to_text(self) -> str:
        """Returns the line for people."""
        known = "delta" if self.quantity == "epsilon" else "epsilon"
        verdict = self.disagreement or "agrees"
        return (
            f"  cross-check {self.source}: {self.quantity} {self.value:.6g} at {known} "
            f"{self.at:.6g}, hence in [{self.low:.6g}, {self.high:.6g}]; ours "
            f"{self._ours()}: {verdict}. {self.note}; of {self.about}."
        )

    def _ours(self) -> str:
        lower = self.ours.lower
        between = "" if lower is None else f"{lower:.6g} .. "
        return f"{between}{self.ours.guarantee:.6g}"
