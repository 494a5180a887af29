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
import datetime
import io
import os
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError, did_you_mean
from dpsgd.fit_command import holds_results, made
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
    folder, dropped = pathlib.Path(out), choices.get("drop") or ()
    known = _arrow(table, [dropped] if isinstance(dropped, str) else [*dropped])
    if known is not None and not isinstance(dropped, str):
        choices["drop"] = [name for name in dropped if name in known.column_names]
    if words := choices.get("train"):
        choices["train"] = words if isinstance(words, str) else shlex.join(words)
    asked = FitOptions(
        label=label,
        epsilon=epsilon,
        out=str(folder),
        ranges=_range_options(ranges or {}),
        table=_path_of(table, known, folder),
        **{n: _as_text(each) for n, each in choices.items() if each is not None},
    )
    return made(asked)


def _range_options(ranges: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Returns ranges as the option takes them.

    Raises:
      InputError: a range has no two ends.
    """
    found = []
    for name, ends in dict(ranges).items():
        if isinstance(ends, str) or len(ends) != 2:
            raise InputError(
                f"Expected ranges[{name!r}] to be the least and the largest possible "
                f"value, such as (0, 120); got {ends!r}."
            )
        texts = (  # a colon separates the ends
            one.strftime("%Y-%m-%dT%H%M%S")
            if isinstance(one, datetime.datetime)
            else str(one)
            for one in ends
        )
        found.append(":".join([name, *texts]))
    return tuple(found)


def _as_text(value: Any) -> Any:
    """Returns a list of names as an option takes it."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(value)
    return line.getvalue()


def _arrow(table: Any, unused: Collection[str] | None = None) -> pa.Table | None:
    """Returns a table in memory in Arrow's types; None for a path.

    Args:
      table: A table in memory, or a path.
      unused: Columns that are left out if Arrow has no type for them; None for all.

    Raises:
      InputError: something else, names that differ from texts or occur twice, or a
        column that holds values of several types.
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
        if not isinstance(name, str) or name in columns:
            raise InputError(
                f"Expected columns of different texts as names; found {name!r}"
                f"{' twice' if name in columns else ''}. Rename them, as by "
                "data.columns = data.columns.map(str)."
            )
        try:
            columns[name] = _column(values, pandas)
        except (pa.ArrowException, TypeError, ValueError):  # may quote a value
            if unused is None or name in unused:
                continue
            raise InputError(
                f"Expected column {name} to hold values of one type that Arrow has. "
                f"Convert it, as by data[{name!r}].astype(str), or drop it."
            ) from None
    return pa.table(columns)


def _column(values: Any, pandas: Any) -> pa.Array:
    """Returns a column of a DataFrame: Parquet has no sparse ones, nor all types."""
    if isinstance(values.dtype, pandas.SparseDtype):
        values = values.sparse.to_dense()
    if isinstance(values.dtype, pandas.CategoricalDtype) and isinstance(
        values.cat.categories.dtype, pandas.IntervalDtype
    ):  # of pd.cut
        values = values.cat.rename_categories(str)
    if isinstance(values.dtype, pandas.PeriodDtype):
        values = values.dt.to_timestamp()
    return pa.array(values, from_pandas=True)


def _path_of(table: Any, found: pa.Table | None, out: pathlib.Path) -> str:
    """Returns the path of a table, which is written below ``out`` if it is in memory.

    Raises:
      InputError: results of another table are there.
    """
    if found is None:
        return os.fspath(table)
    path = out / PRIVATE_NAME / "table.parquet"
    make_private_folder(path.parent)
    if not path.exists() or not holds_results(out):
        with new_table(path, found.schema) as writer:
            writer.write_table(found)
    elif not _is_same(pq.read_table(path), found):
        raise InputError(
            f"Expected the table of which {out} was made; this is another one. Give "
            "that one, or another out."
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
      The predictions, a DataFrame with the index of ``table`` if it is one, else a
      pyarrow Table; with ``out`` a summary of the file.

    Raises:
      InputError: name, value, bound, remedy.

    """
    if isinstance(how.get("carry"), str):
        how["carry"] = [how["carry"]]
    found = _arrow(table)
    with tempfile.TemporaryDirectory() as name:
        source, target = table, out or pathlib.Path(name, "predictions.parquet")
        if found is not None:
            source = pathlib.Path(name, "table.parquet")
            pq.write_table(found, source)
        try:
            summary = prediction.predict(run, source, target, **how)
        except InputError as error:
            raise InputError(str(error).replace(str(source), "the table")) from None
        if out is not None:
            return summary
        predictions = pq.read_table(target)
    if found is None or isinstance(table, pa.Table):
        return predictions
    return predictions.to_pandas().set_axis(table.index)
