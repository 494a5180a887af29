"""Neighbouring relations: which are accounted for, and why the others are refused.

Zero-out (``REPLACE_SPECIAL``): an example is replaced by a ghost that keeps its slot
and contributes zero.  The number of slots is public.  Every sampler of this package is
accounted for.

Add-or-remove (``ADD_OR_REMOVE_ONE``): an example is added or removed.  The plan, with
the sampling probability or the number of steps, is fixed beforehand: it must not be
computed from the size of the data set.
Accounted for: Poisson sampling and balls and bins, whose dominating pairs are those of
zero-out, and truncated Poisson sampling of at most ``num_examples`` examples.

Replace-one (``REPLACE_ONE``): an example is replaced by any other.  Accounted for:
Poisson sampling and deterministic batches.  For the other samplers, group privacy
applies to a group of two under zero-out: `profiles.group_epsilon`.

For users with several examples, zero-out is accounted for with deterministic, Poisson
and truncated Poisson batches, and add-or-remove with the last two.
"""

from __future__ import annotations

from accounting.core import sampler_registry
from accounting.core.validation import InputError, check_choice, check_int

REPLACE_SPECIAL = "REPLACE_SPECIAL"
ADD_OR_REMOVE_ONE = "ADD_OR_REMOVE_ONE"
REPLACE_ONE = "REPLACE_ONE"
RELATIONS = (REPLACE_SPECIAL, ADD_OR_REMOVE_ONE, REPLACE_ONE)
#: Names in words.
NAMES = {
    REPLACE_SPECIAL: "zero-out",
    ADD_OR_REMOVE_ONE: "add-or-remove",
    REPLACE_ONE: "replace-one",
}
#: Definitions, without the condition on the number of examples.
TEXTS = {
    REPLACE_SPECIAL: (
        "zero-out: one example is replaced by a ghost that keeps its slot and "
        "contributes zero"
    ),
    ADD_OR_REMOVE_ONE: (
        "add-or-remove: one example is added or removed; the plan of the batches stays "
        "the same"
    ),
    REPLACE_ONE: "replace-one: one example is replaced by any other",
}
#: Definitions for users.
TEXTS_OF_USER = {
    REPLACE_SPECIAL: (
        "zero-out: all examples of one user are replaced by ghosts that keep their "
        "slots and contribute zero"
    ),
    ADD_OR_REMOVE_ONE: (
        "add-or-remove: all examples of one user are added or removed; the plan of the "
        "batches stays the same"
    ),
}
#: The condition on the number of examples under replace-one.
SAME_NUMBER = "both data sets have num_examples examples, and that number is public"

#: Largest number of examples of a user, since the cost of the bounds grows with it.
MOST_EXAMPLES_PER_USER = 50
_GROUP = (
    "In Python, accounting.profiles.group_epsilon bounds it by groups, under zero-out."
)
_NO_REPLACE_ONE = (
    "two real examples differ by twice the clip norm; in Python, "
    "accounting.profiles.group_epsilon with group_size=2 bounds it by groups "
    "under zero-out"
)


def is_supported(
    sampler: str, neighboring_relation: str, max_examples_per_user: int = 1
) -> bool:
    """Whether a sampler is accounted for under a relation.

    Args:
      sampler: Name of a registered sampler.
      neighboring_relation: One of ``RELATIONS``.
      max_examples_per_user: k, at least 1; above 1 the privacy unit is a user.
    """
    try:
        brought(sampler, neighboring_relation, max_examples_per_user)
    except InputError:
        return False
    return True


def _check_relation(sampler: str, neighboring_relation: str) -> None:
    """Refuses, with the reason, a relation under which a sampler has no bounds."""
    check_choice("neighboring_relation", neighboring_relation, RELATIONS)
    found = sampler_registry.get(sampler)
    if neighboring_relation in found.relations:
        return
    usual = "its bounds are not proven under this relation"
    if neighboring_relation == REPLACE_ONE:
        usual = _NO_REPLACE_ONE
    reason = found.refusals.get(neighboring_relation, usual)
    proven = " or ".join(map(repr, found.relations)) or "one that is proven"
    raise InputError(
        f"Expected neighboring_relation={neighboring_relation!r} to be {proven} for "
        f"sampler={sampler!r}: {reason}."
    )


def brought(
    sampler: str,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> sampler_registry.Sampler:
    """Returns what ``sampler`` provides under a relation.

    Args:
      sampler: Name of a registered sampler.
      neighboring_relation: One of ``RELATIONS``.
      max_examples_per_user: k, at least 1; above 1 the privacy unit is a user.

    Raises:
      InputError: the sampler is not accounted for under the relation, or for users.
    """
    _check_relation(sampler, neighboring_relation)
    count = check_int(
        "max_examples_per_user",
        max_examples_per_user,
        at_least=1,
        at_most=MOST_EXAMPLES_PER_USER,
        remedy=_GROUP,
    )
    found = sampler_registry.get(sampler)
    found = found.under.get(neighboring_relation, found)
    if count == 1:
        return found
    if found.users is None:
        raise InputError(
            f"Expected max_examples_per_user={count} to be 1 for sampler={sampler!r}, "
            f"neighboring_relation={neighboring_relation!r}. {_GROUP}"
        )
    return found.users(count)
