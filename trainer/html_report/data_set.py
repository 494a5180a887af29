"""What a report says of the data: the privacy unit, and what the model predicts.

Formal guarantees:
  - The unit is the one that the batches record; without a note of `dpsgd bound` it is a
    row.

Public: everything.
"""

from __future__ import annotations

from typing import Any

from pipelines.core.batches.manifest import Manifest
from pipelines.core.users.bounded import Bounded
from trainer.model.target import target_of


def unit(manifest: Manifest) -> dict[str, Any]:
    """Returns the privacy unit of the batches, JSON-serialisable.

    "of_users" says whether it is a user, else a row; "rows_per_user" is the number of
    rows that are kept of each, and "user_is_example" whether one example holds them.
    """
    bounded = Bounded.of(manifest.dataset)
    return {
        "of_users": bounded is not None,
        "rows_per_user": bounded and bounded.max_examples_per_user,
        "user_is_example": bounded is not None and bounded.has_users,
    }


def target(manifest: Manifest) -> dict[str, Any] | None:
    """Returns the fields of the `Target`, JSON-serialisable; None if there is none."""
    found = target_of(manifest)
    if found is None:
        return None
    return {"name": found.name, "classes": list(found.classes)}
