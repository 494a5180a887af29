"""What ``fit`` takes as Keras does: epochs, callbacks and validation data.

*Epochs*, as in Keras: ``fit(epochs=N, initial_epoch=K)`` trains for N - K epochs from
where training stands, and numbers them K, ..., N - 1.  Epochs follow each other without
a gap.  None goes beyond the last step of the plan; only the last one may be shorter.

*Callbacks* of Keras may use released values alone: the weights after each step and
functions of them, such as metrics of validation data, learning rates, and histograms of
weights.  Losses of training examples are not released, nor is the duration of a step,
which depends on its number of examples.  So a callback that decides by a metric
(``monitor``) must take one of validation data; within an epoch, where steps are not
committed, no code but Keras's own is called; TensorBoard writes neither times of single
steps nor profiles; and none goes back to a state of its own.  Of the user's own
callbacks nothing else is inspected: the privacy statement does not cover what they read
in addition to weights and ``logs``.

*Validation data*: its metrics, and never those of training examples, are written to the
files of the run, in the form of the files of ``dpsgd train``:

    RUN/curve.json     all points: the step, and the metrics that ``fit`` validated by
    RUN/metrics.json   the last point

The user says that the data is held out: ``fit`` does not check it.

Public, if the validation data needs no protection.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError, check_int
from pipelines.files.storage import pretty_json, write_atomically
from trainer.core.tf_compat import keras, tf
from trainer.report.run_files import CURVE_NAME, METRICS_NAME


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


_VALIDATION = "val_"
_OF_BATCHES = (
    "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"
)  # fmt: skip
#: Keras's callbacks whose code for every step uses the step's number alone, if this
#: attribute is "epoch".
_WITHOUT_STEPS = {
    keras.callbacks.ModelCheckpoint: "save_freq",
    keras.callbacks.TensorBoard: "update_freq",
    keras.callbacks.ProgbarLogger: None,
    keras.callbacks.TerminateOnNaN: None,
}


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
        if _sees_every_step(callback):
            raise InputError(
                f"Expected {name} to act at the end of an epoch: what it sees within "
                "one is not committed, and would be released again after a kill. Give "
                "fit steps_per_epoch, for shorter epochs."
            )
        _check_monitor(callback, name, validates)


def _sees_every_step(callback: Any) -> bool:
    """Whether a callback has code for every step, or Keras's code that uses it."""
    kinds = (kind for kind in _WITHOUT_STEPS if isinstance(callback, kind))
    known = next(kinds, keras.callbacks.Callback)
    frequency = _WITHOUT_STEPS.get(known)
    if frequency is not None and getattr(callback, frequency) != "epoch":
        return True
    # A subclass may have hooks of its own beside those of Keras's class.
    return any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(known, name)
        for name in _OF_BATCHES
    )


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


def numbers_of(history: Any) -> dict[str, Any]:
    """Returns the epochs of Keras's ``History``, and its columns of numbers, as JSON.

    Args:
      history: A ``History``; callbacks may have added values of any kind to it.
    """
    columns = {
        name: [float(value) for value in values]
        for name, values in history.history.items()
        if all(isinstance(value, numbers.Real) for value in values)
    }
    return {"epoch": [*history.epoch], "history": columns}


def add_validation_point(
    run: pathlib.Path,
    points: list[dict[str, Any]],
    metrics: Mapping[str, Any],
    *,
    method: str,
    step: int,
    data: Any,
) -> None:
    """Adds a point to the curve of a run, and writes both files.

    Args:
      run: Folder of the run.
      points: The points so far.
      metrics: Name -> value, as Keras's ``evaluate`` returns them.
      method: Name of the training method.
      step: Number of executed steps.
      data: The validation data of ``fit``.
    """
    # Keras names a metric as compile does: "AUC" is the "auc" of `dpsgd train`.
    numbers = {
        name.lower(): _finite(value)
        for name, value in metrics.items()
        if np.ndim(value) == 0
    }
    points.append({**numbers, "step": step, "num_examples": num_examples(data)})
    curve = {"examples": "held-out", "points": points}
    last = {"examples": "held-out", "method": method, **points[-1]}
    last |= {"aggregates": {}}
    for name, found in ((CURVE_NAME, curve), (METRICS_NAME, last)):
        write_atomically(run / name, pretty_json(found))


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def num_examples(data: Any) -> int | None:
    """Returns the number of rows of ``(x, y)``; None of a data set, which may be long.

    Example:
      >>> num_examples((np.zeros((5, 2)), np.zeros(5)))
      5
    """
    if not isinstance(data, tuple | list):
        return None
    x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(data))
    shape = getattr(tf.nest.flatten(x)[0], "shape", None)
    return int(shape[0]) if shape else None
