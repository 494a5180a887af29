"""The epochs of one call of ``fit``, in steps of the plan.

As in Keras, ``fit(epochs=N, initial_epoch=K)`` trains for N - K epochs from where
training stands, and numbers them K, ..., N - 1.

Formal guarantees:
  - Epochs follow each other without a gap, from the first remaining step.
  - None goes beyond the last step of the plan; only the last one may be shorter.
"""

from __future__ import annotations

import dataclasses

from accounting.core.validation import InputError, check_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch.

    Attributes:
      index: Index of the epoch, for callbacks.
      begin: Number of steps of the plan that are consumed when it begins.
      end: Number of steps of the plan that are consumed when it ends.
    """

    index: int
    begin: int
    end: int


def plan_epochs(
    *,
    epochs: int | None,
    initial_epoch: int,
    steps_per_epoch: int,
    done: int,
    num_steps: int,
) -> list[Epoch]:
    """Returns the epochs of a call of ``fit``.

    Args:
      epochs: Index of the epoch to end before; to the end of the plan if None.
      initial_epoch: Index of the first epoch.
      steps_per_epoch: Number of steps per epoch.
      done: Number of consumed steps of the plan.
      num_steps: Number of steps of the plan.

    Raises:
      InputError: no epoch is requested, or more than remain.

    Example:
      >>> [e.end for e in plan_epochs(
      ...     epochs=None, initial_epoch=0, steps_per_epoch=4, done=0, num_steps=10)]
      [4, 8, 10]
    """
    check_int("initial_epoch", initial_epoch, at_least=0)
    check_int("steps_per_epoch", steps_per_epoch, at_least=1)
    num_left = -(-(num_steps - done) // steps_per_epoch)
    if not num_left:
        raise InputError(
            f"Expected steps to be left; all num_steps={num_steps} of the plan were "
            "consumed, and none is used twice. Make batches of more epochs to train "
            "for longer."
        )
    last = initial_epoch + num_left if epochs is None else epochs
    check_int("epochs", last, at_least=initial_epoch + 1)
    if last > initial_epoch + num_left:
        raise InputError(
            f"Expected epochs={epochs} to be at most {initial_epoch + num_left}: "
            f"{done} of num_steps={num_steps} of the plan were consumed, and no step "
            f"is used twice. Make batches of more epochs to train for longer."
        )
    return [
        Epoch(
            index=index,
            begin=done + (index - initial_epoch) * steps_per_epoch,
            end=min(done + (index - initial_epoch + 1) * steps_per_epoch, num_steps),
        )
        for index in range(initial_epoch, last)
    ]
