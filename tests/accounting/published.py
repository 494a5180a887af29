"""The published setting: batches of Criteo's 36.8 million examples.

Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

from typing import Any

from accounting.core.plan import DpSgdPlan

DELTA = 2.7e-8

#: Batch size -> steps of one epoch.
STEPS = {
    1024: 35938,
    2048: 17969,
    4096: 8984,
    8192: 4492,
    16384: 2246,
    32768: 1123,
    65536: 562,
    131072: 281,
    262144: 140,
}


def criteo_plan(
    sampler: str, batch_size: int = 65536, num_epochs: int = 1, **changes: Any
) -> DpSgdPlan:
    """A plan whose sampling probability is exactly 1 / steps per epoch."""
    steps = STEPS[batch_size]
    fields: dict[str, Any] = {
        "sampler": sampler,
        "num_examples": batch_size * steps,
        "expected_batch_size": batch_size,
        "num_steps": steps * num_epochs,
        "num_epochs": num_epochs,
    }
    return DpSgdPlan(**{**fields, **changes})
