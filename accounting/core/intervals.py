"""Answers of the accountant: intervals whose type tells a guarantee from a lower bound.

A lower bound on a privacy loss shows what is impossible and proves no privacy.  It has
another name than the guarantee, and ``guarantee`` raises where only a lower bound is
known, so that a lower bound is never printed as a promise.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
from collections.abc import Callable
from typing import Any, ClassVar

from accounting.core.validation import InputError

EXACT = "exact"
UPPER = "upper bound"
LOWER = "lower bound only"
BOTH = "upper and lower bound"
#: Bounds with a smaller relative difference are equal up to rounding.
_ROUNDING = 1e-8


def upper_text(value: float) -> str:
    """Returns an upper bound with four decimals, rounded up: it still holds.

    Example:
      >>> upper_text(2.99993), lower_text(2.99998)
      ('3.0000', '2.9999')
    """
    return _text(value, math.ceil)


def lower_text(value: float) -> str:
    """Returns a lower bound with four decimals, rounded down; see `upper_text`."""
    return _text(value, math.floor)


def _text(value: float, side: Callable[[float], int]) -> str:
    return f"{side(value * 1e4) / 1e4:.4f}" if math.isfinite(value) else f"{value}"


def delta_text(value: float, side: Callable[[float], int]) -> str:
    """Returns a delta with three significant digits, which spans many orders.

    Args:
      value: The delta; at least 0.
      side: ``math.ceil`` for what is proven, ``math.floor`` for a lower bound.
    """
    if value == 0:
        return "0.0000"
    rounding = decimal.ROUND_CEILING if side is math.ceil else decimal.ROUND_FLOOR
    context = decimal.Context(prec=3, rounding=rounding)
    return f"{float(context.create_decimal(repr(float(value)))):.2e}"


def below(lower: float, upper: float) -> float:
    """Returns ``lower``, or ``upper`` if rounding alone puts ``lower`` above it.

    Args:
      lower: A lower bound.
      upper: An upper bound on the same value, at least 0.

    Raises:
      ArithmeticError: the bounds cross, so that one is wrong and no claim is made.
    """
    # Below 1e-250 either may have underflowed.
    if lower > upper * (1 + 1e-6) + 1e-250:
        raise ArithmeticError(f"lower bound {lower!r} exceeds upper bound {upper!r}")
    return min(lower, upper)


class _Interval:
    """Bounds on a number: the proven one, and the one that no proof can beat."""

    method: str
    #: Names of the fields, and what a lower bound alone is.
    _PROVEN: ClassVar[str]
    _LEAST: ClassVar[str]
    _LOWER_ALONE: ClassVar[str]

    @property
    def proven(self) -> float | None:
        """The guarantee; None if nothing is proven."""
        found: float | None = getattr(self, self._PROVEN)
        return found

    @property
    def least(self) -> float | None:
        """No proof can give a smaller value; None if not computed."""
        found: float | None = getattr(self, self._LEAST)
        return found

    @property
    def guarantee(self) -> float:
        """The proven value.

        Raises:
          InputError: only a lower bound is known.
        """
        if self.proven is None:
            raise InputError(
                f"Expected a guarantee, but method={self.method!r} gives "
                f"{self._LOWER_ALONE}. Use Poisson, truncated Poisson or "
                "balls-and-bins batches."
            )
        return self.proven

    @property
    def kind(self) -> str:
        """One of ``EXACT``, ``UPPER``, ``LOWER`` and ``BOTH``."""
        if self.proven is None:
            return LOWER
        if self.least is None:
            return UPPER
        # A closed form that is rounded up and down is exact, too.
        return EXACT if self.least >= self.proven * (1 - _ROUNDING) else BOTH

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        for name, value in fields.items():
            # JSON has no infinity: null, as for a missing bound.
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = None
        return {**fields, "kind": self.kind}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds(_Interval):
    """Bounds on epsilon or on delta.

    Attributes:
      upper: The guarantee: the mechanism is private with this value.  None if nothing
        is proven; infinite if the proof gives no finite value.
      lower: No proof can give a smaller value.  None if not computed.
      method: The theorem behind ``upper``, or behind ``lower`` if ``upper`` is None.
      lower_method: The theorem behind ``lower``, if it was computed.
    """

    _PROVEN, _LEAST = "upper", "lower"
    _LOWER_ALONE = "a lower bound only"

    upper: float | None
    lower: float | None = None
    method: str
    lower_method: str | None = None


def least(*options: tuple[float, str]) -> Bounds:
    """Returns the smallest of several upper bounds; of equal ones, the first.

    Args:
      options: Pairs of an upper bound and its method.
    """
    value, method = min(options, key=lambda option: option[0])
    return Bounds(upper=value, method=method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseBounds(_Interval):
    """Bounds on the noise multiplier that a target needs.

    Attributes:
      sufficient: The guarantee: with this noise multiplier the target is proven.  None
        if nothing is proven.
      necessary: With less noise the target is false.  None if not computed.
      method: The theorem behind ``sufficient``, or behind ``necessary`` if
        ``sufficient`` is None.
      necessary_method: The theorem behind ``necessary``, if it was computed.
    """

    _PROVEN, _LEAST = "sufficient", "necessary"
    _LOWER_ALONE = "only how much noise is necessary"

    sufficient: float | None
    necessary: float | None = None
    method: str
    necessary_method: str | None = None
