"""Predictions of a run's exported model, with its own or averaged weights.

The model is a SavedModel, so that no user's code is needed or run.  A bounded number of
rows and one kept iterate are in memory at a time.  Predictions that are not finite are
refused, unless the caller takes them.

In a batch, kernels treat the last rows in another way.  Predicted one at a time, rows
have the same bits wherever they stand, and however many there are; a model that would
carry something from one row to the next is then refused.

Public: weights.  Sensitive: rows, and predictions as their owner decides.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from trainer.core.run.redact_errors import redact_errors
from trainer.core.step.pure_graph import check_pure
from trainer.core.tf_compat import tf
from trainer.export import OUTPUTS_SIGNATURE, SERVING_SIGNATURE
from trainer.model.evaluation import check_finite
from trainer.model.metrics import BINARY
from trainer.prediction.chosen_model import PREDICTED, VOTE_SHARE, ChosenModel
from trainer.report import run_files
from trainer.run.iterates import (
    OutputsByName,
    ema_weights,
    interval_columns,
    read_iterate,
    weighted_mean,
)
from trainer.settings.train_settings import OMV, OPA, PAST_EMA

#: Columns of some rows -> predictions by name, in the order of the rows.
Predict = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]

#: Rows per forward pass.
_BATCH_ROWS = 8192


def load(chosen: ChosenModel, *, are_secret: bool = False) -> Predict:
    """Returns the function that computes the predictions of the chosen model.

    They have the names of its signature or, of a majority vote, ``PREDICTED`` and
    ``VOTE_SHARE``: `with_classes` adds the names of classes.

    Args:
      chosen: The model.
      are_secret: Whether the rows are, and each is predicted alone, which takes longer.

    Raises:
      InputError: the model or an iterate is damaged, or of another release.
    """
    model = _ExportedModel(chosen, are_secret=are_secret)
    of_iterates = chosen.average in (OPA, OMV)
    if not (of_iterates or chosen.is_exported):
        model.average_iterates()
    return redact_errors(
        model.outputs_of_iterates if of_iterates else model.predictions
    )


def _loaded(model: pathlib.Path) -> Any:
    """Loads a SavedModel, by a name that TensorFlow cannot take for a pattern."""
    with tempfile.TemporaryDirectory() as folder:
        link = os.path.join(folder, "model")
        os.symlink(os.path.abspath(model), link)
        return tf.saved_model.load(link)


class _ExportedModel:
    """A SavedModel whose weights may be replaced."""

    def __init__(self, chosen: ChosenModel, *, are_secret: bool) -> None:
        self._chosen, self._are_secret = chosen, are_secret
        self._names = [column.name for column in chosen.serving.inputs]
        digest = chosen.serving.digests.get(chosen.model.name)
        try:
            if run_files.digest_of_folder(chosen.model) != digest:
                raise ValueError("another digest")
            self._loaded = _loaded(chosen.model)
            given = {
                name: self._loaded.signatures[name]
                for name in (SERVING_SIGNATURE, OUTPUTS_SIGNATURE)
            }
            self._weights = list(self._loaded.weights)
        except Exception as error:  # of many kinds, if a file is damaged
            raise InputError(
                f"Expected {chosen.model} to be a model that this release exported, "
                f"with all of its files: {type(error).__name__}. Restore it, or train "
                "again."
            ) from None
        self._give = given
        if are_secret:
            for give in given.values():
                check_pure(give.graph, f"the model {chosen.model}")
            self._give = {name: _of_each(give) for name, give in given.items()}

    def predictions(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the predictions of the model with its current weights."""
        found = self._run(SERVING_SIGNATURE, columns)
        return {name: found[name] for name in self._chosen.serving.outputs}

    def average_iterates(self) -> None:
        """Sets the weights of the model to an average of the kept iterates."""
        count = len(self._chosen.iterates)
        weights = np.full(count, 1 / count)
        if self._chosen.average == PAST_EMA:
            assert self._chosen.keep_decay is not None  # checked
            weights = ema_weights(count, self._chosen.keep_decay)
        self._assign(weighted_mean(self._iterates(), weights))

    def outputs_of_iterates(
        self, columns: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns the mean or the majority of the predictions of the kept iterates."""
        task, names = self._chosen.serving.task, self._chosen.serving.outputs
        outputs = OutputsByName(task, names[0])
        for iterate in self._iterates():
            self._assign(iterate)
            found = self._run(OUTPUTS_SIGNATURE, columns)
            # A single output is named after the signature.
            outputs.add(found.get(OUTPUTS_SIGNATURE, found))
        if self._chosen.average == OMV:
            (vote,) = outputs.votes
            kind = np.int8 if task == BINARY else np.int32
            return {PREDICTED: vote.majority.astype(kind), VOTE_SHARE: vote.vote_share}
        if self._chosen.level is None:
            return {name: outputs[name].mean for name in names}
        return interval_columns(outputs, self._chosen.level)

    def _run(
        self, signature: str, columns: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        num_rows = len(next(iter(columns.values())))
        parts = []
        for first in range(0, num_rows, _BATCH_ROWS):
            rows = slice(first, first + _BATCH_ROWS)
            inputs = {name: tf.constant(columns[name][rows]) for name in self._names}
            found = self._give[signature](**inputs)
            parts.append({name: value.numpy() for name, value in found.items()})
        joined = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        if not self._are_secret:
            check_finite(joined, "--input")
        return joined

    def _iterates(self) -> Iterator[list[np.ndarray]]:
        return map(read_iterate, self._chosen.iterates)

    def _assign(self, values: Sequence[np.ndarray]) -> None:
        shapes = [tuple(weight.shape) for weight in self._weights]
        if [value.shape for value in values] != shapes:
            raise InputError(
                f"Expected the kept iterates of {self._chosen.run} to be of its "
                "model; their shapes differ. Restore them."
            )
        for weight, value in zip(self._weights, values, strict=True):
            weight.assign(value)


def _of_each(give: Any) -> Any:
    """Returns a signature's function, called for each row alone."""
    kinds = {name: spec.dtype for name, spec in give.structured_outputs.items()}

    def of_one(columns: Mapping[str, Any]) -> dict[str, Any]:
        found = give(**{name: value[tf.newaxis] for name, value in columns.items()})
        return {name: value[0] for name, value in found.items()}

    def of_all(**columns: Any) -> Any:
        return tf.map_fn(of_one, columns, fn_output_signature=kinds)

    return tf.function(of_all, reduce_retracing=True)
