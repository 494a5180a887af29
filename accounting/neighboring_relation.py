"""Neighbouring relations: which is accounted for, and why the others are refused.

Zero-out (``REPLACE_SPECIAL``): an example is replaced by a ghost that keeps its slot
and contributes zero.  The number of slots is public; every sampler is accounted for.

Add-or-remove (``ADD_OR_REMOVE_ONE``): Poisson sampling alone is accounted for.  Its
dominating pairs are those of zero-out as long as the sampling probability is the same
for both data sets; it must not be computed anew from the size of each.

Replace-one (``REPLACE_ONE``): refused.  Removing an example and adding another is a
group of two for the other relations; see `budget.user_epsilon`.
"""

from __future__ import annotations

from accounting import plan as plans
from accounting.validation import InputError, check_choice

REPLACE_SPECIAL = "REPLACE_SPECIAL"
ADD_OR_REMOVE_ONE = "ADD_OR_REMOVE_ONE"
REPLACE_ONE = "REPLACE_ONE"
RELATIONS = (REPLACE_SPECIAL, ADD_OR_REMOVE_ONE, REPLACE_ONE)
#: Names for people.
NAMES = {
    REPLACE_SPECIAL: "zero-out",
    ADD_OR_REMOVE_ONE: "add-or-remove",
    REPLACE_ONE: "replace-one",
}

_MOVES_OTHERS = (
    "one example more or less moves others to other steps, so that many steps change"
)
_NO_ADD_OR_REMOVE = {
    plans.DETERMINISTIC: _MOVES_OTHERS,
    plans.PERSISTENT_SHUFFLE: _MOVES_OTHERS,
    plans.DYNAMIC_SHUFFLE: _MOVES_OTHERS,
    plans.TRUNCATED_POISSON: (
        "its bounds depend on num_examples, which this relation does not make public"
    ),
    plans.BALLS_AND_BINS: "its theorem replaces the example by one that contributes 0",
}
_NO_REPLACE_ONE = (
    "two real examples differ by twice the clip norm; as a group of two under "
    "zero-out, user_epsilon with max_examples_per_user=2 bounds it"
)


def _reason(sampler: str, neighboring_relation: str) -> str | None:
    """Returns why the relation is refused; None if it is accounted for."""
    if neighboring_relation == REPLACE_ONE:
        return _NO_REPLACE_ONE
    if neighboring_relation == ADD_OR_REMOVE_ONE:
        return _NO_ADD_OR_REMOVE.get(sampler)
    return None


def is_supported(sampler: str, neighboring_relation: str) -> bool:
    """Whether ``sampler`` is accounted for under the relation."""
    return _reason(sampler, neighboring_relation) is None


def check_relation(sampler: str, neighboring_relation: str) -> str:
    """Returns ``neighboring_relation`` if ``sampler`` is accounted for under it.

    Raises:
      InputError: it is not; the message gives the reason.
    """
    check_choice("neighboring_relation", neighboring_relation, RELATIONS)
    reason = _reason(sampler, neighboring_relation)
    if reason is not None:
        raise InputError(
            f"Expected neighboring_relation={neighboring_relation!r} to be "
            f"{REPLACE_SPECIAL!r} for sampler={sampler!r}: {reason}."
        )
    return neighboring_relation
