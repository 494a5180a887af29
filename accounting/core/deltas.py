"""Checks of delta: 0.01 or more is refused, 1/n or more gives a warning.

A mechanism that publishes each example in the clear with probability delta satisfies
(0, delta)-differential privacy.  Of n examples it publishes n * delta on average, so
delta must be well below 1/n.

Formal guarantees:
  - Every command that takes a delta, the settings of a run, and the privacy statement
    refuse ``LARGEST_DELTA`` or more unless the user allows it.
  - ``weakness`` returns a sentence exactly where delta >= 1 / num_examples, and never
    for the delta that ``remedy`` names.

Public: everything.
"""

from __future__ import annotations

from accounting.core.validation import InputError, check_float

#: The least delta that is refused: one example in a hundred could be published.
LARGEST_DELTA = 0.01
#: Bounds at a smaller delta hold, but may be far from tight.
LEAST_TIGHT_DELTA = 1e-20
#: A remedy for data sets of up to ten million examples.
_USUAL_DELTA = 1e-8


def check(delta: float, *, allow_large: bool = False) -> float:
    """Returns ``delta`` if a privacy claim may be made at it.

    Args:
      delta: In (0, 1).
      allow_large: Whether to accept ``LARGEST_DELTA`` or more.

    Raises:
      InputError: name, value, bound, remedy.
    """
    check_float("delta", delta, above=0.0, below=1.0)
    if delta >= LARGEST_DELTA and not allow_large:
        raise InputError(
            f"Expected delta={delta!r} < {LARGEST_DELTA}: publishing each example with "
            f"probability delta would be as private. Use --delta {_USUAL_DELTA!r}, or "
            "add --allow-large-delta (in Python allow_large_delta=True)."
        )
    return float(delta)


def weakness(delta: float, num_examples: int) -> str | None:
    """Returns a warning if ``delta`` is at least ``1 / num_examples``, else None.

    Args:
      delta: The delta of the claim.
      num_examples: Slots of the data set.

    Example:
      >>> weakness(1e-8, 600) is None
      True
    """
    if delta < 1 / num_examples:
        return None
    return (
        f"A delta of {delta!r} protects next to nothing: it is not below one over the "
        f"{num_examples:,} examples, and publishing each of them with probability "
        "delta would be as private."
    )


def remedy(num_examples: int) -> str:
    """Returns advice for n examples: a power of ten that is at most 1/(10 n)."""
    delta = float(f"1e-{max(3, len(str(10 * num_examples)))}")
    return f"Use --delta {delta!r} or less."


def warning(delta: float | None, num_examples: int) -> str | None:
    """Returns the warning of `weakness` with its remedy, as a line to print, or None.

    Args:
      delta: The delta of the claim; None without a claim.
      num_examples: Slots of the data set.
    """
    text = None if delta is None else weakness(delta, num_examples)
    return text and f"warning: {text} {remedy(num_examples)}"
