"""Epochs of ``fit``: without gaps, within the plan."""

from __future__ import annotations

import pytest

from trainer.fitting import plan_epochs


@pytest.mark.parametrize("done", [0, 3, 4, 9])
@pytest.mark.parametrize("initial_epoch", [0, 5])
def test_epochs_follow_each_other_and_end_with_the_plan(
    done: int, initial_epoch: int
) -> None:
    found = plan_epochs(
        epochs=None, initial_epoch=initial_epoch, steps_per_epoch=4, done=done,
        num_steps=10,
    )  # fmt: skip
    assert [e.index for e in found] == [initial_epoch + i for i in range(len(found))]
    assert [e.begin for e in found] == [done, *(e.end for e in found[:-1])]
    assert {e.end - e.begin for e in found[:-1]} <= {4}
    assert found[-1].end == 10
