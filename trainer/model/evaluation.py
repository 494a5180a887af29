"""Evaluation on held-out examples, which the privacy statement does not protect.

Rows are read one row group at a time; memory holds only what ``metrics.Scores`` keeps
of them.  A folder is listed once, so that rows and digest are of the same files.  A row
whose label the loss does not take is refused, and no error quotes a row.  A file that
the batches were sampled from is refused, whatever its name: its size and footer show
it.  Training rows in other files are not noticed.

Public: metrics, if the held-out examples need no protection.  Sensitive: rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column
from pipelines.core.files.local_files import digest_of
from pipelines.core.users import BOUNDED, Bounded
from pipelines.inputs.input_files import find_files
from pipelines.inputs.parquet_blocks import (
    check_bounded,
    column_of,
    description_of,
    values_of,
)
from pipelines.inputs.source_table import footer_digest
from trainer.core.run.redact_errors import redact_errors
from trainer.model.metrics import (
    Metric,
    Metrics,
    Scores,
    guessing,
    joined,
    unit_of_loss,
)
from trainer.model.rows import Target

if TYPE_CHECKING:  # it loads TensorFlow, which this module does without
    from trainer.model.trainable_model import TrainableModel

#: Columns of some rows -> outputs of the network: an array, or a dict of arrays;
#: masked where positions do not count.
Predict = Callable[[Mapping[str, np.ndarray]], Any]

#: Rows per forward pass.
_BATCH_ROWS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """A Parquet file, its name in its folder, and what its footer says."""

    path: pathlib.Path
    name: str
    schema: pa.Schema
    num_rows: int

    @property
    def description(self) -> dict[str, Any]:
        return description_of(self.schema, str(self.path))


class HeldOut:
    """Held-out examples in a folder of Parquet files, which match those of training.

    Args:
      directory: Folder of the files, ``*.parquet``.
      columns: Columns of one row of the training examples.
      description: The training examples' own description.
      input_digests: ``footer_digest`` of every file of the training examples.
      option: Flag that gave ``directory``, for messages.

    Attributes:
      num_rows: Number of examples.
      option: As given.

    Raises:
      InputError: there is no file or no row, columns or preparation are not those of
        the batches, or a file is one of the training examples.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        columns: Sequence[Column],
        description: Mapping[str, Any],
        input_digests: Collection[str] = (),
        *,
        option: str = "--eval",
    ) -> None:
        self._columns, self.option = columns, option
        # As `dpsgd batches` finds its input.
        found = find_files(os.fspath(directory), option=option)
        self._files = [_read(pathlib.Path(path), name) for path, name in found]
        for file in self._files:
            _check_file(file, columns, description)
        if input_digests:
            _check_apart(self._files, f"{option} {directory}", input_digests)
        self.num_rows = sum(file.num_rows for file in self._files)
        if not self.num_rows:
            raise InputError(f"Expected examples in {option} {directory}; it has none.")

    @functools.cached_property
    def bounded(self) -> Bounded | None:
        """How users are bounded; None if they are not.

        Raises:
          InputError: files bound users in different ways, or a user may have more rows.
        """
        first, *others = [Bounded.of(file.description) for file in self._files]
        if any(each != first for each in others):
            raise InputError(
                f"Expected all files of {self.option} to bound users in one way. Give "
                "the output of one `dpsgd prepare`."
            )
        if first is not None:
            paths = [os.fspath(file.path) for file in self._files if file.num_rows]
            footers = {path: footer_digest(path) for path in paths}
            check_bounded(first, self.num_rows, footers, self.option)
        return first

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over names and contents of the files, as hex digits."""
        total = hashlib.sha256()
        for file in self._files:
            total.update(f"{file.name}\n{digest_of(file.path)}\n".encode())
        return total.hexdigest()

    def check_others(self, names: Sequence[str]) -> None:
        """Accepts names of further columns that all files have, of one type each.

        Raises:
          InputError: a file lacks one, or its type differs between files.
        """
        first = self._files[0]
        for file in self._files:
            for name in names:
                if name not in file.schema.names:
                    raise InputError(
                        f"Expected column {name} in {file.path}; it has "
                        f"{', '.join(file.schema.names)}."
                    )
                if file.schema.field(name).type != first.schema.field(name).type:
                    raise InputError(
                        f"Expected column {name} of {file.path} to be of the type that "
                        f"it has in {first.path}. Convert one of them."
                    )

    def batches(
        self, num_rows: int = _BATCH_ROWS, names: Collection[str] | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields columns of up to ``num_rows`` rows.  Sensitive.

        Args:
          num_rows: Largest number of rows at a time.
          names: Names of the columns; None for those of the batches.
        """
        chosen = [c for c in self._columns if names is None or c.name in names]
        return (columns for columns, _ in self._parts(num_rows, chosen, ()))

    def parts(
        self, num_rows: int, others: Sequence[str] = ()
    ) -> Iterator[tuple[dict[str, np.ndarray], pa.RecordBatch]]:
        """Yields columns of rows, and the same rows as Arrow record batch.  Sensitive.

        Args:
          num_rows: Largest number of rows at a time.
          others: Further columns of the record batch; ``check_others`` accepted them.
        """
        return self._parts(num_rows, self._columns, others)

    def _parts(
        self, num_rows: int, columns: Sequence[Column], others: Sequence[str]
    ) -> Iterator[tuple[dict[str, np.ndarray], pa.RecordBatch]]:
        names = list(dict.fromkeys([*(c.name for c in columns), *others]))
        for path in (file.path for file in self._files):
            with _one_line_errors(path), pq.ParquetFile(path) as opened:
                for rows in opened.iter_batches(num_rows, columns=names):
                    found = {
                        c.name: values_of(rows[c.name], c, self.option) for c in columns
                    }
                    yield found, rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates the current weights of a model on held-out examples.

    Attributes:
      held_out: The examples.
      model: Model with the labels and the loss.
      predict: Computes the outputs of the model's network.
      metric: A user's metric, reported beside those of the loss.
      target: What is predicted: numbers are evaluated in its unit.
    """

    held_out: HeldOut
    model: TrainableModel
    predict: Predict
    metric: Metric | None = None
    target: Target | None = None

    @redact_errors
    def metrics(self) -> Metrics:
        """Returns the metrics of all examples.

        Raises:
          InputError: the loss does not take a label, an output is not finite, or the
            model, the loss or the metric fails.
        """
        return self._metrics(self._outputs())

    @redact_errors
    def outputs(self) -> tuple[Any, Any]:
        """Returns labels and outputs of all examples, in order; raises as ``metrics``.

        Each is an array (examples, ...), or a dict of them.
        """
        labels, outputs = zip(*self._outputs(), strict=True)
        return joined(labels), joined(outputs)

    @redact_errors
    def guessing(self) -> Metrics | None:
        """Returns the metrics of the best constant prediction; None if not known.

        Raises:
          InputError: the loss does not take a label.
        """
        loss, labels = self.model.loss, []
        for columns in self.held_out.batches(names=self.model.label_names):
            _check_labels(self.model, columns, self.held_out.option)
            labels.append(_each(np.asarray, self.model.labels(columns)))
        found = guessing(joined(labels), task=loss.task, loss=loss.name)
        if found is not None and (of_numbers := found.get("loss")) is not None:
            found["loss"] = of_numbers * self._unit_of_loss
        return found

    @redact_errors
    def metrics_of(self, labels: Any, outputs: Any) -> Metrics:
        """Returns the metrics of given outputs.

        Args:
          labels: Labels, as the method ``outputs`` returns them.
          outputs: An array (examples, ...), or a dict of them.

        Raises:
          InputError: the loss or the metric fails.
        """
        num_rows = len(next(iter(_leaves(labels))))
        return self._metrics(
            (_each(of_part, labels), _each(of_part, outputs))
            for of_part in (
                operator.itemgetter(slice(first, first + _BATCH_ROWS))
                for first in range(0, num_rows, _BATCH_ROWS)
            )
        )

    def _metrics(self, parts: Iterable[tuple[Any, Any]]) -> Metrics:
        loss = self.model.loss
        scores = Scores(loss.task, self.metric)
        for labels, outputs in parts:
            scores.add(
                labels=self._in_units(labels),
                outputs=outputs,
                losses=loss.of_arrays(labels, outputs) * self._unit_of_loss,
                predictions=self._in_units(_each(np.asarray, loss.predict(outputs))),
            )
        return scores.metrics()

    @property
    def _unit_of_loss(self) -> float:
        unit = 1.0 if self.target is None else self.target.half_range
        return unit_of_loss(self.model.loss.name, unit)

    def _in_units(self, values: Any) -> Any:
        """Returns labels or predictions in the unit of the label, if it has one."""
        if self.target is None or isinstance(values, Mapping):
            return values
        return self.target.in_units(values)

    def _outputs(self) -> Iterator[tuple[Any, Any]]:
        """Yields labels, masked as the outputs are, and plain outputs of some rows."""
        for columns in self.held_out.batches():
            _check_labels(self.model, columns, self.held_out.option)
            found = self.predict(columns)
            outputs = _each(np.ma.getdata, found)
            check_finite(outputs, self.held_out.option)
            yield _each(_masked_as, self.model.labels(columns), found), outputs


def _leaves(values: Any) -> Iterable[Any]:
    return values.values() if isinstance(values, Mapping) else (values,)


def _each(function: Callable[..., Any], *values: Any) -> Any:
    """Returns the function of arrays, or of those with the same name in dicts."""
    if isinstance(values[0], Mapping):
        return {name: function(*(v[name] for v in values)) for name in values[0]}
    return function(*values)


def with_masks(outputs: Any, masks: Any) -> Any:
    """Returns outputs as arrays, masked where Keras's masks say that none counts.

    Args:
      outputs: A tensor (rows, ...), or a dict of them.
      masks: Keras's masks of them, (rows, positions), of the same structure, or None.
    """
    return _each(_with_mask, outputs, masks)


def _with_mask(output: Any, mask: Any) -> np.ndarray:
    values = np.asarray(output)
    if mask is None:
        return values
    hidden = ~np.asarray(mask)
    hidden = hidden.reshape(*hidden.shape, *[1] * (values.ndim - hidden.ndim))
    return np.ma.array(values, mask=np.broadcast_to(hidden, values.shape))


def _masked_as(labels: Any, output: Any) -> np.ndarray:
    """Returns labels with the mask of the positions that they are of."""
    values = np.asarray(labels)
    if not isinstance(output, np.ma.MaskedArray):
        return values
    hidden = np.ma.getmaskarray(output)
    hidden = hidden if hidden.ndim == values.ndim else hidden[..., 0]
    # Labels of other shapes are those of a user's loss, which says what counts.
    return np.ma.array(values, mask=hidden) if hidden.shape == values.shape else values


def _check_labels(
    model: TrainableModel, columns: Mapping[str, np.ndarray], option: str
) -> None:
    if not np.all(model.accepts(columns)):
        names = " and ".join(model.label_names)
        raise InputError(
            f"Expected the values of column {names} of {option} to be "
            f"{model.allowed_labels} for loss={model.loss.name!r}. Fix or drop "
            "the other rows, or choose another --loss."
        )


def check_finite(outputs: Any, option: str = "--eval") -> None:
    """Accepts finite outputs of a model.

    Args:
      outputs: An array, or a dict of arrays.
      option: Flag that gave the rows, for messages.

    Raises:
      InputError: an output is not finite.
    """
    if not all(np.isfinite(array).all() for array in _leaves(outputs)):
        raise InputError(
            f"Expected finite predictions for the examples of {option}; the weights "
            "have diverged, or the model cannot take a value of theirs. Try a smaller "
            "--learning-rate."
        )


def _read(path: pathlib.Path, name: str) -> _File:
    with _one_line_errors(path), pq.ParquetFile(path) as file:
        return _File(
            path=path,
            name=name,
            schema=file.schema_arrow,
            num_rows=file.metadata.num_rows,
        )


def _check_file(
    file: _File, columns: Sequence[Column], description: Mapping[str, Any]
) -> None:
    """Refuses a file that does not match the training examples."""
    path, schema = file.path, file.schema
    missing = [c.name for c in columns if c.name not in schema.names]
    if missing:
        raise InputError(
            f"Expected column{'s' * (len(missing) > 1)} {', '.join(missing)} of the "
            f"batches in {path}; it has {', '.join(schema.names)}. Give the test split "
            "of the same `dpsgd prepare`."
        )
    for column in columns:
        found = schema.field(column.name)
        if column_of(found) != column:
            raise InputError(
                f"Expected column {column.name} of {path} to be {column.dtype} of "
                f"shape {column.shape}, as in the batches; it is {found.type}."
            )
    # Users of training and of held-out examples are bounded each by themselves.
    if {**file.description, BOUNDED: None} != {**description, BOUNDED: None}:
        raise InputError(
            f"Expected {path} to be prepared as the examples of the batches were; its "
            "description differs. Use the test split of the same `dpsgd prepare`."
        )


def _check_apart(
    files: Sequence[_File], given: str, input_digests: Collection[str]
) -> None:
    """Refuses held-out files of which one with rows is among the training examples."""
    for file in files:  # empty files are alike
        if file.num_rows and footer_digest(os.fspath(file.path)) in input_digests:
            raise InputError(
                f"Expected {given} to hold no training examples; {file.name} has the "
                "size and the footer of a file that the batches were sampled from, and "
                "metrics of training examples are not private. Give other files, such "
                "as the test split of `dpsgd prepare`. Training rows that were written "
                "again into other files are not noticed."
            )


@contextlib.contextmanager
def _one_line_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises errors without their text, which may quote the file's content."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"Expected {path} to be an intact Parquet file: {type(error).__name__}. "
            "Restore it, or give a split of `dpsgd prepare`, which makes it from text."
        ) from None
