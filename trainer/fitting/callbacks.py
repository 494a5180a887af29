"""Checks that Keras's callbacks in ``fit`` only use released values.

Released values are the weights after each step and functions of them: metrics of
validation data, learning rates, histograms of weights.  Losses of training examples are
not released, nor is the duration of a step, which depends on its number of examples.

Formal guarantees:
  - A callback that decides by a metric (``monitor``) decides by one of validation data.
  - TensorBoard writes neither times of single steps nor profiles.
  - No callback of Keras's goes back to a state of its own.

The user's own callbacks are not inspected: the privacy statement does not cover what
they read in addition to weights and ``logs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.tf_compat import keras

_VALIDATION = "val_"
#: Callbacks that see no more of a batch than its number.
_OF_NUMBERS = (keras.callbacks.ProgbarLogger, keras.callbacks.TerminateOnNaN)
_OF_BATCHES = (
    "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"
)  # fmt: skip


def check_callbacks(callbacks: Any, *, validates: bool) -> None:
    """Refuses callbacks of Keras that may use values that are not released.

    Args:
      callbacks: One callback, a sequence of them, or None.
      validates: Whether ``fit`` has validation data.

    Raises:
      InputError: which callback, why, and what to give instead.
    """
    listed = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    for callback in filter(None, listed):
        name = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise InputError(
                f"Expected callbacks of Keras 3; {name} is of "
                f"{type(callback).__module__.partition('.')[0]}. Import it from "
                "keras.callbacks."
            )
        if isinstance(callback, keras.callbacks.CallbackList):
            raise InputError(
                "Expected callbacks in a plain list, of which each is checked; not a "
                f"{name}. Give its callbacks."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InputError(
                f"Expected no {name}: the run has checkpoints of its own, from which "
                "the same cell goes on. Omit it."
            )
        if isinstance(callback, keras.callbacks.TensorBoard):
            _check_tensorboard(callback)
        _check_monitor(callback, name, validates)


def see_every_step(callbacks: Any) -> bool:
    """Whether a callback sees steps that are not committed yet.

    Args:
      callbacks: One callback, a sequence of them, or None.
    """
    listed = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    return any(map(_sees_every_step, filter(None, listed)))


def _sees_every_step(callback: Any) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    if type(callback) in (
        keras.callbacks.ProgbarLogger,
        keras.callbacks.TerminateOnNaN,
    ):
        return False  # they see the step's number alone
    hooks = (getattr(callback, name) for name in _OF_BATCHES)
    return any(not hasattr(hook, "_is_default") for hook in hooks)  # set by Keras


def _check_tensorboard(callback: Any) -> None:
    if callback.write_steps_per_second or callback._should_trace:
        raise InputError(
            "Expected TensorBoard with write_steps_per_second=False and "
            "profile_batch=0: the time of a step tells how many examples it has, which "
            "is not released."
        )


def _check_monitor(callback: Any, name: str, validates: bool) -> None:
    monitor = getattr(callback, "monitor", None)
    # A ModelCheckpoint that always saves does not use ``monitor``.
    if not isinstance(monitor, str) or not getattr(callback, "save_best_only", True):
        return
    if not monitor.startswith(_VALIDATION):
        raise InputError(
            f"Expected monitor={monitor!r} of {name} to be a metric of validation "
            "data: a decision by losses of training examples is not covered by "
            "epsilon. Give monitor='val_loss'."
        )
    if not validates:
        raise InputError(
            f"Expected validation_data in fit for {name}, which monitors {monitor!r}. "
            "Give validation_data=(x, y), of examples that are not trained on."
        )
