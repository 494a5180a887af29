"""Neighbouring relations: which is accounted for, and why the others are refused.

Zero-out (``REPLACE_SPECIAL``): an example is replaced by a ghost that keeps its slot
and contributes zero.  The number of slots is public.  Every sampler of this package is
accounted for.

Add-or-remove (``ADD_OR_REMOVE_ONE``): Poisson sampling alone is accounted for.  Its
dominating pairs are those of zero-out as long as the sampling probability is the same
for both data sets; it must not be computed anew from the size of each.

Replace-one (``REPLACE_ONE``): refused.  Removing an example and adding another is a
group of two for the other relations; see `budget.user_epsilon`.
"""

from __future__ import annotations

from accounting import sampler_registry
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

_NO_REPLACE_ONE = (
    "two real examples differ by twice the clip norm; as a group of two under "
    "zero-out, user_epsilon with max_examples_per_user=2 bounds it"
)


def _reason(sampler: str, neighboring_relation: str) -> str | None:
    """Returns why the relation is refused; None if it is accounted for."""
    brought = sampler_registry.get(sampler)
    if neighboring_relation in brought.relations:
        return None
    if neighboring_relation in brought.refusals:
        return brought.refusals[neighboring_relation]
    if neighboring_relation == REPLACE_ONE:
        return _NO_REPLACE_ONE
    return "its bounds are not proven under this relation"


def is_supported(sampler: str, neighboring_relation: str) -> bool:
    """Whether a sampler is accounted for under a relation.

    Args:
      sampler: A registered one.
      neighboring_relation: One of ``RELATIONS``.
    """
    return _reason(sampler, neighboring_relation) is None


def check_relation(sampler: str, neighboring_relation: str) -> str:
    """Returns ``neighboring_relation`` if ``sampler`` is accounted for under it.

    Args:
      sampler: A registered one.
      neighboring_relation: One of ``RELATIONS``.

    Raises:
      InputError: it is not; the message gives the reason.
    """
    check_choice("neighboring_relation", neighboring_relation, RELATIONS)
    reason = _reason(sampler, neighboring_relation)
    if reason is not None:
        proven = " or ".join(
            repr(name) for name in sampler_registry.get(sampler).relations
        )
        raise InputError(
            f"Expected neighboring_relation={neighboring_relation!r} to be "
            f"{proven or 'one that is proven'} for sampler={sampler!r}: {reason}."
        )
    return neighboring_relation
