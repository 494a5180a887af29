"""``predict``: predictions of a finished run for every row of a table.

    summary = predict("run", "data/test", "predictions.parquet", average="ema")

The table is one that `dpsgd prepare` wrote, or a raw one, which is read with the schema
in the manifest of the run.  It needs no label, and may hold training examples:
predictions are functions of released weights and of the rows, and cost no privacy of
the training examples.  The privacy statement does not protect the rows of the table.

The output has one row per row of the table, in the same order.  It is Parquet or CSV,
as its name says; CSV has no lists.  Its columns are the carried ones, and by the task

    binary    predicted, probability (of the second class)
    classes   predicted, probabilities; with names, probability_NAME of each class
    a number  prediction, in the units of the label whose range the schema has

or, for averages of outputs,

    opa    the mean over the kept iterates: probability, probabilities of all classes,
           or outputs by name; with intervals also stddev over the iterates, low and
           high (see ``trainer.run.iterates``)
    omv    vote_share, the share of votes for label 1 or for each class; the predicted
           class is that of most kept iterates

The predicted class is the one that held-out accuracy counts, up to rounding: label 1
above probability 0.5, or the first of the most probable classes.  Without names in the
schema, a class is its number.

`check` writes nothing, and refuses what the files' metadata show to be wrong before
TensorFlow is loaded.  The output appears complete or not at all, and replaces nothing.
Memory depends neither on the number of rows nor on that of kept iterates.  No error
quotes a row.

Public: settings, names of columns and classes, number of rows.  Sensitive: rows, and
predictions as their owner decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME
from pipelines.core.batches.manifest import Manifest, row_bytes
from pipelines.files.outputs import Sink, check_new, output_file
from pipelines.files.storage import read_json
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.tables import table_files
from pipelines.tables.cells import CELLS_NAME
from pipelines.tables.reading import Part, RawInputs
from trainer.model.evaluation import HeldOut
from trainer.model.metrics import BINARY, OTHER
from trainer.model.rows import as_table, schema_of
from trainer.prediction.chosen_model import PREDICTED, ChosenModel, choose
from trainer.report.progress import Reporter, Silent
from trainer.report.run_files import PREDICTION, PROBABILITIES, PROBABILITY
from trainer.run.iterates import STDDEV
from trainer.settings.requests import check_local

_CSV = ".csv"
#: Suffixes of names; without one the file is Parquet.
_SUFFIXES = (".parquet", _CSV, "")


def check_name(path: pathlib.Path) -> None:
    """Refuses the name of a file of another format."""
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(
            f"Expected --out {path} to end in .parquet or {_CSV}, the formats that can "
            f"be written. Give --out {path.with_suffix(_CSV)}."
        )


class WrittenTable:
    """Writes tables of one schema to a new file.

    Args:
      path: New file in an existing folder, of a name that ``check_name`` accepts.

    Attributes:
      num_rows: Number of rows written so far.
      columns: Names of the columns; empty before the first part.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._contexts = contextlib.ExitStack()
        self._writer: Any = None
        self.num_rows = 0
        self.columns: tuple[str, ...] = ()

    def __enter__(self) -> WrittenTable:
        self._sink = Sink(self._contexts.enter_context(output_file(self._path)))
        return self

    def __exit__(self, *error: Any) -> None:
        # The file gets an error of its writer's end, too, and is removed.
        self._contexts.__exit__(*error)

    def write(self, table: pa.Table) -> None:
        """Appends the rows of a table."""
        if self._writer is None:
            is_csv = self._path.suffix.lower() == _CSV
            lists = (f.name for f in table.schema if pa.types.is_nested(f.type))
            if is_csv and (name := next(lists, "")):
                raise InputError(
                    f"Expected no column of lists in CSV, as {name}. Give --out "
                    f"{self._path.with_suffix('.parquet')}."
                )
            open_writer = pa_csv.CSVWriter if is_csv else pq.ParquetWriter
            writer = open_writer(self._sink, table.schema)
            self._writer = self._contexts.enter_context(writer)
            self.columns = tuple(table.column_names)
        self._writer.write_table(table)
        self.num_rows += table.num_rows


OPTION = "--input"


def open_rows(
    path: pathlib.Path, manifest: Manifest, carried: Sequence[str]
) -> tuple[int, Callable[[int], Iterator[Part]]]:
    """Returns the size of a table, and what reads its rows; its columns are checked.

    Args:
      path: A file, a folder or a glob.
      manifest: Manifest of the run, with the columns that its model takes.
      carried: Columns to yield unchanged.

    Returns:
      The size in units of progress: rows, or bytes of a raw table.  A function that
      yields inputs of the model, carried columns, and units read so far, in parts of
      about a number of rows.

    Raises:
      InputError: there is no table, or the model cannot take its columns.
    """
    schema = schema_of(manifest)
    if schema is None or any(map(_is_prepared, table_files.list_table(str(path)))):
        held_out = HeldOut(path, manifest.columns, manifest.dataset, option=OPTION)
        held_out.check_others(carried)
        parts = functools.partial(_prepared_parts, held_out, [*carried])
        return held_out.num_rows, parts
    found = manifest.dataset.get("cells")
    if found != CELLS_NAME:
        raise InputError(
            f"Expected the training examples to be prepared with cells {CELLS_NAME}; "
            f"they are {found}, and this release would read some cells of "
            f"{OPTION} as other numbers. Give a table that was prepared as they were, "
            "or prepare, batch and train again."
        )
    raw = RawInputs(str(path), schema, carried)
    return raw.num_bytes, raw.parts


def _is_prepared(file: table_files.TableFile) -> bool:
    if file.format != table_files.PARQUET:
        return False
    return DATASET_METADATA_KEY in (file.arrow_schema().metadata or {})


def _prepared_parts(
    held_out: HeldOut, carried: list[str], num_rows: int
) -> Iterator[Part]:
    done = 0
    for columns, rows in held_out.parts(num_rows, carried):
        done += rows.num_rows
        yield columns, pa.Table.from_batches([rows.select(carried)]), done


def named(
    found: Mapping[str, np.ndarray], chosen: ChosenModel
) -> dict[str, np.ndarray]:
    """Returns predictions of a model as its table's owner names them.

    Args:
      found: Column -> predictions, as for `with_classes`.
      chosen: The model.
    """
    serving, target = chosen.serving, chosen.target
    if target is None or target.range is None or serving.outputs != (PREDICTION,):
        return with_classes(found, serving.task, target.classes if target else ())
    unit = target.half_range
    return {
        name: values * unit if name == STDDEV else target.in_units(values)
        for name, values in found.items()
    }


def with_classes(
    found: Mapping[str, np.ndarray], task: str, classes: Sequence[str]
) -> dict[str, np.ndarray]:
    """Returns predictions with the predicted class first.

    Args:
      found: Column -> predictions (rows, ...), the first of them probabilities, or the
        number of the predicted class under ``PREDICTED``.
      task: Task of the loss: "binary", "classes" or "other".
      classes: Names of the classes; empty for none.
    """
    if task == OTHER:
        return dict(found)
    first, most = next(iter(found.items()))
    number = most if first == PREDICTED else _number(most, task)
    others = {name: values for name, values in found.items() if name != PREDICTED}
    # A model may have more classes than the table, or several labels in a row.
    widths = {values.shape[-1] for values in others.values()}
    is_named = number.ndim == 1 and (task == BINARY or widths == {len(classes)})
    if not (classes and is_named):
        return {PREDICTED: number, **others}
    columns: dict[str, np.ndarray] = {PREDICTED: np.array(classes, object)[number]}
    if task == BINARY:
        return {**columns, **others}
    for column, values in others.items():
        one = PROBABILITY if column == PROBABILITIES else column
        names = (f"{one}_{name}" for name in classes)
        columns |= zip(names, values.T, strict=True)
    return columns


def _number(probabilities: np.ndarray, task: str) -> np.ndarray:
    if task == BINARY:
        return (probabilities.reshape(-1) > 0.5).astype(np.int8)
    return probabilities.argmax(-1).astype(np.int32)


#: Largest number and bytes of the rows that are read, predicted and written at a time.
_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSummary:
    """Summary of the predictions.

    Attributes:
      out: The file.
      num_rows: Number of rows, that of the table.
      columns: Names of the columns.
      average: Name of the weights that predict.
      uncertainty: Level of the intervals; None for none.
    """

    out: pathlib.Path
    num_rows: int
    columns: tuple[str, ...]
    average: str
    uncertainty: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return {**dataclasses.asdict(self), "out": str(self.out)}


def predict(
    run: str | os.PathLike[str],
    table: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    average: str | None = None,
    uncertainty: float | None = None,
    carry: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> PredictSummary:
    """Writes the predictions of a finished run for every row of a table.

    Args:
      run: Folder of the run.
      table: File, folder or glob: Parquet with the columns of the batches, or a raw
        table (CSV, TSV, Parquet), which is read by the schema of the training examples.
        No label is needed.
      out: New file: Parquet, or CSV if its name ends in ".csv".
      average: One of `requests.AVERAGES` that the run has; if None the last weights,
        or the mean prediction where there are intervals.
      uncertainty: Level of intervals in (0, 1); None for none.
      carry: Columns of the table to copy to the output, such as an id.
      reporter: Receives progress; None for none.

    Raises:
      InputError: name, value, bound, remedy.
    """
    folder, path = pathlib.Path(run), pathlib.Path(out)
    check_local(run=folder, input=table, out=path)
    chosen = choose(folder, average=average, uncertainty=uncertainty)
    check_new(path)
    check_name(path)
    if len({*carry}) < len(carry):
        raise InputError("Expected each column of --carry once. Omit the second.")
    inputs_of_model = chosen.serving.inputs
    # Without the label, which the table need not have.
    manifest = Manifest.from_json(read_json(folder / MANIFEST_NAME))
    manifest = dataclasses.replace(manifest, columns=inputs_of_model)
    total, parts = open_rows(pathlib.Path(table), manifest, carry)
    reporter = reporter or Silent()
    reporter.say("loading TensorFlow")
    # Here, because TensorFlow takes seconds to load: the checks precede it.
    from trainer.prediction.exported_model import load

    predict_rows = load(chosen)
    size = max(1, row_bytes(inputs_of_model))
    num_rows = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // size))
    reporter.start(total, done=0)
    with WrittenTable(path) as file:
        for inputs, carried, done in parts(num_rows):
            found = as_table(named(predict_rows(inputs), chosen))
            names = [*carried.column_names, *found.column_names]
            if len({*names}) < len(names):
                raise InputError(
                    "Expected no column of --carry to be called as a prediction: "
                    f"{', '.join(found.column_names)}. Omit it, or rename it in the "
                    "table."
                )
            file.write(pa.table([*carried.columns, *found.columns], names))
            reporter.advance(done)
    reporter.stop()
    return PredictSummary(
        out=path,
        num_rows=file.num_rows,
        columns=file.columns,
        average=chosen.average,
        uncertainty=chosen.level,
    )
