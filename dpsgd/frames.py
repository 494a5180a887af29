"""`dpsgd.fit` and `dpsgd.predict`: `dpsgd fit` and `predict` for tables in memory.

    found = dpsgd.fit(table, label="income", epsilon=3, rows_are_independent=True)
    scores = dpsgd.predict(found["run"], new_rows)

A table is a pandas DataFrame, a pyarrow Table, or a path as on the command line.  One
in memory is written to OUT/private/table.parquet, for its owner alone, so that a fit
that was stopped goes on with the same call.

Public: choices and results.  Sensitive: tables, and files below ``private``.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError, did_you_mean
from dpsgd.fit_command import made
from dpsgd.fit_stages import FitOptions
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.files.outputs import make_private_folder
from pipelines.tables.prepared_files import new_table
from trainer.prediction import predict as prediction


def fit(
    table: Any,
    label: str,
    *,
    epsilon: float,
    out: str | os.PathLike[str] = "fit",
    ranges: Mapping[str, tuple[Any, Any]] | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Makes a private model of a table, and a page about it: see `dpsgd fit --help`.

    Args:
      table: A pandas DataFrame, whose index is ignored, a pyarrow Table, or the path of
        files.
      label: Column to predict.
      epsilon: Target epsilon, above 0, of model, metrics and ranges together.
      out: New folder, or that of the same call, which goes on.
      ranges: Name of a column -> least and largest possible value, known without the
        rows.
      **choices: Other options of `dpsgd fit` by name, with lists of names in place of
        commas: classes, numeric, category, text, date, boolean, drop, user,
        rows_are_independent, max_examples_per_user, batch_size, epochs, delta, train.

    Returns:
      "run", the folder of the model; "page"; "together", the claim of all that was
      released; "metrics" and "privacy" of the run.

    Raises:
      InputError: what only a person can know is missing, or a stage is refused.

    """
    names = [field.name for field in dataclasses.fields(FitOptions)]
    for name in choices:
        if name not in names:
            raise InputError(
                f"Expected no {name}; `dpsgd fit` has no such option."
                f"{did_you_mean(name, names)}"
            )
    folder = pathlib.Path(out)
    asked = FitOptions(
        label=label,
        epsilon=epsilon,
        out=str(folder),
        ranges=tuple(
            f"{name}:{low}:{high}" for name, (low, high) in (ranges or {}).items()
        ),
        table=_path_of(table, folder / PRIVATE_NAME / "table.parquet"),
        **{name: _as_text(value) for name, value in choices.items()},
    )
    return made(asked)


def _as_text(value: Any) -> Any:
    """Returns a list of names as an option takes it."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(value)
    return line.getvalue()


def _arrow(table: Any) -> pa.Table | None:
    """Returns a table in memory in Arrow's types; None for a path.

    Raises:
      InputError: something else, or a column that holds values of several types.
    """
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, str | os.PathLike):
        return None
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(table, pandas.DataFrame):
        raise InputError(
            "Expected a pandas DataFrame, a pyarrow Table, or the path of a table; got "
            f"{type(table).__qualname__}."
        )
    columns = {}
    for name, values in table.items():
        if not isinstance(name, str):
            raise InputError(
                f"Expected columns of texts as names, not {name!r}. Rename them, as by "
                "data.rename(columns=str)."
            )
        try:
            columns[name] = pa.array(values, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError):  # may quote a value
            raise InputError(
                f"Expected column {name} to hold values of one type. Convert it, as by "
                f"data[{name!r}].astype(str), or drop it."
            ) from None
    return pa.table(columns)


def _path_of(table: Any, path: pathlib.Path) -> str:
    """Returns the path of a table, which is written there if it is in memory.

    Raises:
      InputError: another table is there.
    """
    found = _arrow(table)
    if found is None:
        return os.fspath(table)
    make_private_folder(path.parent, remedy="Name another out.")
    if not path.exists():
        with new_table(path, found.schema) as writer:
            writer.write_table(found)
    elif not _is_same(pq.read_table(path), found):
        raise InputError(
            f"Expected the table of which {path.parent.parent} was made; this is "
            "another one. Give that one, or another out."
        )
    return str(path)


def _is_same(stored: pa.Table, table: pa.Table) -> bool:
    if stored.column_names != table.column_names:
        return False
    try:  # Parquet has fewer types
        return bool(stored.cast(table.schema).equals(table))
    except pa.ArrowException:
        return False


def predict(
    run: str | os.PathLike[str],
    table: Any,
    out: str | os.PathLike[str] | None = None,
    **how: Any,
) -> Any:
    """Predicts every row of a table by a finished run.

    Args:
      run: Folder of the run.
      table: A pandas DataFrame, a pyarrow Table, or a path: rows as they were prepared,
        or raw ones, which are read by the schema of the training examples.  No label is
        needed.
      out: New file, CSV if its name ends in ".csv", else Parquet; None to return the
        predictions.
      **how: Other arguments of `trainer.prediction.predict.predict`, such as carry.

    Returns:
      The predictions, a DataFrame if ``table`` is one, else a pyarrow Table; with
      ``out`` a summary of the file.

    Raises:
      InputError: name, value, bound, remedy.

    """
    found = _arrow(table)
    with tempfile.TemporaryDirectory() as name:
        source, target = table, out or pathlib.Path(name, "predictions.parquet")
        if found is not None:
            source = pathlib.Path(name, "table.parquet")
            pq.write_table(found, source)
        summary = prediction.predict(run, source, target, **how)
        if out is not None:
            return summary
        predictions = pq.read_table(target)
    if found is None or isinstance(table, pa.Table):
        return predictions
    return predictions.to_pandas()
