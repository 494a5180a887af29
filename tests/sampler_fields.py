"""The fields of a plan that some samplers need, and others refuse."""

from __future__ import annotations

from typing import Any

import pytest

from accounting.core import plan, sampler_registry


def needed(sampler: str, cap: int | None = None, bands: int = 2) -> dict[str, Any]:
    """Returns cap and bands of a plan, where the sampler has them.

    Args:
      sampler: Name of a registered sampler.
      cap: Cap on the rows of a step.
      bands: Groups of the examples.
    """
    rules = sampler_registry.rules(sampler)
    return {
        **({"truncated_batch_size": cap} if rules.truncates else {}),
        **({"bands": bands} if rules.cyclic else {}),
    }


def may_register(patch: pytest.MonkeyPatch) -> None:
    """Lets samplers be registered until the test ends.

    Args:
      patch: Of the test.
    """
    for module, table in ((plan, "_RULES"), (sampler_registry, "_SAMPLERS")):
        patch.setattr(module, table, dict(getattr(module, table)))
