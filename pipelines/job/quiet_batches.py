"""The batch job for a process of its own, which it silences."""

from __future__ import annotations

from typing import Any

from pipelines.job.runtime import quiet_beam


def make_batches(*arguments: Any) -> None:
    """Calls ``poisson_batching.make_batches`` with Beam's warnings off."""
    quiet_beam()  # before Beam is loaded
    from pipelines.job import poisson_batching

    poisson_batching.make_batches(*arguments)
