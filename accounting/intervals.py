"""What an accountant answers: an interval whose type says what is a guarantee.

A number that bounds a privacy loss from below shows what is impossible, and proves no
privacy.  Here it has another name than the number that does, and asking an answer for
its guarantee raises if it has none: a lower bound can never be printed as a promise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from accounting.validation import InputError

EXACT = "exact"
UPPER = "upper bound"
LOWER = "lower bound only"
BOTH = "upper and lower bound"
#: Bounds that differ by less, relatively, say the same.
_ROUNDING = 1e-8


def below(lower: float, upper: float) -> float:
    """Returns ``lower``, cut to ``upper`` where they differ by rounding alone.

    Args:
      lower: A lower bound.
      upper: An upper bound on the same value, at least 0.

    Raises:
      ArithmeticError: they cross, so that one of them is wrong: nothing may be claimed.
    """
    # Below 1e-250 either may have underflowed.
    if lower > upper * (1 + 1e-6) + 1e-250:
        raise ArithmeticError(f"lower bound {lower!r} exceeds upper bound {upper!r}")
    return min(lower, upper)


def _kind(guarantee: float | None, impossibility: float | None) -> str:
    if guarantee is None:
        return LOWER
    if impossibility is None:
        return UPPER
    if guarantee == impossibility:
        return EXACT
    # A closed form, rounded up and down.
    return EXACT if impossibility >= guarantee * (1 - _ROUNDING) else BOTH


def _to_json(result: Any, kind: str) -> dict[str, Any]:
    # JSON has no infinity: null, as for a bound that is not there.
    fields = dataclasses.asdict(result)
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[name] = None
    return {**fields, "kind": kind}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds on epsilon or on delta.

    Attributes:
      upper: The mechanism is private with this value: the guarantee.  None if nothing
        is proven; infinite if the proof gives no finite value.
      lower: No proof can give less than this value.  None if not computed.
      method: How ``upper`` was found, or ``lower`` where there is only that.
      lower_method: How ``lower`` was found, if it was.
    """

    upper: float | None
    lower: float | None = None
    method: str
    lower_method: str | None = None

    @property
    def guarantee(self) -> float:
        """The value that is proven.

        Raises:
          InputError: there is only a lower bound.
        """
        if self.upper is None:
            raise InputError(
                f"Expected a guarantee, but method={self.method!r} gives a lower bound "
                "only. Use Poisson, truncated Poisson or balls-and-bins batches."
            )
        return self.upper

    @property
    def kind(self) -> str:
        """One of ``EXACT``, ``UPPER``, ``LOWER`` and ``BOTH``."""
        return _kind(self.upper, self.lower)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        return _to_json(self, self.kind)


def least(*options: tuple[float, str]) -> Bounds:
    """Returns the smallest of several upper bounds, the first among equals.

    Args:
      options: Each an upper bound and its method.
    """
    value, method = min(options, key=lambda option: option[0])
    return Bounds(upper=value, method=method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByDirection:
    """Bounds on delta in each direction.  Only both together are a guarantee.

    Attributes:
      remove: Of ``sup_S Pr[M(D) in S] - e^epsilon Pr[M(D') in S]`` where D has the
        example and D' a ghost in its slot.
      add: The same where D has the ghost, and D' the example.
    """

    remove: Bounds
    add: Bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseBounds:
    """Bounds on the noise multiplier that a target needs.

    Attributes:
      sufficient: With this much noise the target is proven: the guarantee.  None if
        nothing is proven.
      necessary: With less noise the target is false.  None if not computed.
      method: How ``sufficient`` was found, or ``necessary`` where there is only that.
      necessary_method: How ``necessary`` was found, if it was.
    """

    sufficient: float | None
    necessary: float | None = None
    method: str
    necessary_method: str | None = None

    @property
    def guarantee(self) -> float:
        """The noise multiplier that is proven to suffice.

        Raises:
          InputError: it is only known how much is necessary.
        """
        if self.sufficient is None:
            raise InputError(
                f"Expected a guarantee, but method={self.method!r} gives only how much "
                "noise is necessary. Use Poisson, truncated Poisson or balls-and-bins "
                "batches."
            )
        return self.sufficient

    @property
    def kind(self) -> str:
        """One of ``EXACT``, ``UPPER``, ``LOWER`` and ``BOTH``."""
        return _kind(self.sufficient, self.necessary)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        return _to_json(self, self.kind)
