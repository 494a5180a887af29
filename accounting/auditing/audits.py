"""How each sampler is audited: its worst-case data set, and the score of a trial.

Another package calls `register` beside `accounting.core.sampler_registry.register`.

Formal guarantees:
  - nothing by default: a sampler without an audit is refused.
  - one meaning per name: an audit cannot be registered twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from accounting.auditing import scores, worst_cases
from accounting.auditing.audit_case import Audit, Case
from accounting.core import sampler_registry
from accounting.core.neighboring_relation import brought
from accounting.core.plan import (
    BALLS_AND_BINS,
    CYCLIC_POISSON,
    DETERMINISTIC,
    DYNAMIC_SHUFFLE,
    PERSISTENT_SHUFFLE,
    POISSON,
    TRUNCATED_CYCLIC_POISSON,
    TRUNCATED_POISSON,
)
from accounting.core.validation import InputError


def _of_users(worst_case: Callable[..., Case], count: int) -> Audit:
    """Returns the audit of users with ``count`` examples, of Poisson batches."""
    return Audit(
        worst_case=functools.partial(worst_case, canary_rows=count),
        score=scores.user_steps(count),
    )


_SHUFFLED = Audit(worst_case=worst_cases.shuffled, score=scores.hidden_step)
_AUDITS = {
    DETERMINISTIC: Audit(worst_case=worst_cases.own_block, score=scores.known_steps),
    PERSISTENT_SHUFFLE: _SHUFFLED,
    DYNAMIC_SHUFFLE: _SHUFFLED,
    POISSON: Audit(
        worst_case=worst_cases.own_block,
        score=scores.independent_steps,
        users=functools.partial(_of_users, worst_cases.own_block),
    ),
    TRUNCATED_POISSON: Audit(
        worst_case=worst_cases.truncated,
        score=scores.independent_steps,
        users=functools.partial(_of_users, worst_cases.truncated),
    ),
    BALLS_AND_BINS: Audit(worst_case=worst_cases.own_block, score=scores.hidden_step),
    CYCLIC_POISSON: Audit(worst_case=worst_cases.own_block, score=scores.hidden_group),
    TRUNCATED_CYCLIC_POISSON: Audit(
        worst_case=worst_cases.truncated, score=scores.hidden_group
    ),
}


def register(name: str, audit: Audit) -> None:
    """Registers, in this process, how a sampler is audited.

    Args:
      name: As registered with `accounting.core.sampler_registry`.
      audit: The worst case and its score.

    Raises:
      InputError: the name has an audit, or is not registered with the accountant.
    """
    sampler_registry.rules(name)
    if name in _AUDITS:
        raise InputError(
            f"Expected sampler={name!r} not to have an audit yet. Choose another name."
        )
    _AUDITS[name] = audit


def audit_of(sampler: str, canary_rows: int = 1) -> Audit:
    """Returns the audit of a sampler.

    Args:
      sampler: Name of a registered sampler.
      canary_rows: Examples of the canary; above 1 it is a user.

    Raises:
      InputError: the sampler has no audit, or is not accounted for with such users.
    """
    brought(sampler, max_examples_per_user=canary_rows)
    found = _AUDITS.get(sampler)
    if found is not None and canary_rows > 1:
        found = found.users and found.users(canary_rows)
    if found is None:
        sampler_registry.refuse(
            sampler,
            "a worst case and a score for audits",
            "Register them with accounting.auditing.audits.register.",
        )
    return found
