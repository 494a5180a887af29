"""``statistics``: ranges of columns and shares of classes, under an epsilon.

    OUT    the schema, with ``range`` and ``log`` of each numeric column without them

They are computed from rows that train nothing, such as the part `val` of `dpsgd
prepare`.  A row is in one part, so that statistics and a model of other rows together
have the larger epsilon of both, and not the sum.

Formal guarantees:
  - the statistics are (epsilon, delta)-private for one row of the input under zero-out:
    they are functions of one Gaussian release.
  - the choice of what is counted depends on the schema and the number of rows alone,
    which are public; whether a column's logarithm is taken, on released counts.
  - the privacy unit is a row.  A table whose unit is a user is refused.
  - *not* covered: an error for a file that cannot be read, after which nothing is
    released; other statistics of the same rows, whose epsilon adds.

Public: OUT, what is returned.  Sensitive: rows and counts.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from accounting.core import deltas
from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import NAMES, REPLACE_SPECIAL
from accounting.core.pld.gaussian import gaussian_noise
from accounting.core.validation import InputError, check_float
from pipelines.files.storage import write_atomically
from pipelines.inputs.parquet_blocks import Dataset, list_blocks, read_block
from pipelines.tables.schema.column_kinds import COUNT, LABEL
from pipelines.tables.schema.schema import DATASET_NAME, Schema
from trainer.releases.release import NoisySum, RowSum, release
from trainer.releases.schema_text import with_fields
from trainer.releases.value_counts import Quantiles, ValueCounts, noise_of_rank
from trainer.report.progress import Reporter, Silent

#: Share of the values beyond each end of a range, if noise allows, and at most.
_BEYOND, _MOST_BEYOND = 0.01, 0.1
#: So many standard deviations of the noise are within the share beyond an end.
_SIDES = 5.0
#: A logarithm is taken if the upper end is so many times farther from the median.
_SKEWED = 5.0
#: Share of the squared sensitivity for the classes of the label.
_OF_LABEL = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatisticsRequest:
    """Statistics that can be computed.

    Attributes:
      dataset: The rows.
      schema: How they were prepared.
      text: The schema as it was written.
      columns: Output -> name in the table, of the columns that get a range.
      epsilon: Above 0.
      delta: In (0, 1).
      beyond: Share of the values beyond each end of a range.
      out: New file.
    """

    dataset: Dataset
    schema: Schema
    text: str
    columns: dict[str, str]
    epsilon: float
    delta: float
    beyond: float
    out: pathlib.Path

    @property
    def claim(self) -> str:
        """The claim in two sentences."""
        return (
            f"These statistics are ({upper_text(self.epsilon)}, {self.delta!r})"
            "-differentially private for one row of --input under the "
            f"{NAMES[REPLACE_SPECIAL]} relation. A model of other rows adds nothing to "
            "that; other statistics of these rows add their epsilon and delta."
        )


def check(
    table: str,
    schema: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epsilon: float,
    delta: float,
    allow_large_delta: bool = False,
) -> StatisticsRequest:
    """Returns the checked request; arguments as for `statistics`.

    Args:
      allow_large_delta: Whether to accept a delta that protects next to nothing.

    Raises:
      InputError: name, value, bound, remedy.
    """
    check_float("epsilon", epsilon, above=0)
    deltas.check(delta, allow_large=allow_large_delta)
    path = pathlib.Path(out)
    if path.exists():
        raise InputError(f"Expected --out {path} to be new. Choose another name.")
    read = Schema.read(schema)
    dataset = list_blocks(table)
    _check_table(dataset, read, table)
    columns = without_range(read)
    text = pathlib.Path(schema).read_text(encoding="utf-8")
    with_fields(text, {name: [] for name in columns.values()})  # has their headers
    if not columns:
        raise InputError(
            f"Expected {schema} to have a numeric column without range, log or scale; "
            "each has one, and nothing is to be found. Go on with this schema."
        )
    return StatisticsRequest(
        dataset=dataset,
        schema=read,
        text=text,
        columns=columns,
        epsilon=epsilon,
        delta=delta,
        beyond=_beyond(dataset.num_rows, len(columns), epsilon, delta),
        out=path,
    )


def without_range(schema: Schema) -> dict[str, str]:
    """Returns output -> name of the numeric columns that nothing scales."""
    return {
        each.name: name
        for name in schema.inputs
        for each in schema.outputs_of(name)
        if each.role == COUNT and each.dtype == "float32" and not each.shape
    }


def _check_table(dataset: Dataset, schema: Schema, table: str) -> None:
    description = dataset.description
    if description.get("name") != DATASET_NAME or (
        description.get("schema") != schema.to_json()
    ):
        raise InputError(
            f"Expected {table} to be prepared with this --schema; it was with another "
            "one. Give the schema of `dpsgd prepare`."
        )
    if dataset.bounded is not None or schema.user:
        raise InputError(
            "Expected the privacy unit of the rows to be a row; it is a user, and "
            "nothing bounds a user's rows here. Write ranges that you know without "
            "the rows into the schema."
        )


def least_rows(num_columns: int, epsilon: float, delta: float) -> int:
    """Returns the number of rows from which on ranges are found.

    Args:
      num_columns: Number of columns that get a range, at least 1.
      epsilon: For one of these rows, above 0.
      delta: In (0, 1).
    """
    return math.ceil(_needed(num_columns, epsilon, delta) / _MOST_BEYOND)


def _needed(num_columns: int, epsilon: float, delta: float) -> float:
    """Returns the number of rows beyond an end that noise does not hide."""
    stddev = gaussian_noise(epsilon, delta) / math.sqrt(_share(num_columns))
    return _SIDES * noise_of_rank(stddev)


def _share(num_columns: int) -> float:
    """Returns the share of each of a column's two sums in the squared sensitivity."""
    # A little less, so that all shares add up to 1 at most in floating point.
    return (1 - _OF_LABEL) / (2 * num_columns) * (1 - 1e-12)


def _beyond(num_rows: int, num_columns: int, epsilon: float, delta: float) -> float:
    """Returns the share of values beyond each end of a range."""
    least = least_rows(num_columns, epsilon, delta)
    if num_rows < least:
        raise InputError(
            f"Expected at least {least} rows for ranges of "
            f"{num_columns} columns at epsilon={epsilon:.6g}; --input has {num_rows}. "
            "Give more rows, or ranges that you know without them, or a larger "
            "--epsilon."
        )
    return max(_BEYOND, _needed(num_columns, epsilon, delta) / num_rows)


def statistics(
    table: str,
    schema: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epsilon: float,
    delta: float,
    allow_large_delta: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Writes a schema with private ranges; returns them, and shares of classes.

    Args:
      table: Prepared rows that train nothing, such as the part `val`: Parquet (a
        folder, a file or a glob).
      schema: The schema that they were prepared with.
      out: New file for the schema with ranges.
      epsilon: For one of these rows, above 0.
      delta: In (0, 1).
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      reporter: Receives progress; None for none.

    Raises:
      InputError: name, value, bound, remedy.
    """
    request = check(
        table,
        schema,
        out,
        epsilon=epsilon,
        delta=delta,
        allow_large_delta=allow_large_delta,
    )
    return statistics_checked(request, reporter or Silent())


def statistics_checked(
    request: StatisticsRequest, reporter: Reporter
) -> dict[str, Any]:
    """Does what ``statistics`` does, for a request that is already checked.

    Args:
      request: From ``check``.
      reporter: Receives progress.
    """
    noise = gaussian_noise(request.epsilon, request.delta)
    released = release(_sums(request, reporter), noise)
    found = {
        name: _range(request, released, output)
        for output, name in request.columns.items()
    }
    where = f"by dpsgd statistics, epsilon {request.epsilon:g}, delta {request.delta:g}"
    lines = {name: _lines(fields, where) for name, fields in found.items()}
    write_atomically(request.out, with_fields(request.text, lines).encode())
    return {
        "claim": request.claim,
        "epsilon": request.epsilon,
        "delta": request.delta,
        "noise_multiplier": noise,
        "num_rows": request.dataset.num_rows,
        "beyond": request.beyond,
        "columns": found,
        "classes": _classes(released.get(LABEL), request.dataset.num_rows),
    }


def _sums(request: StatisticsRequest, reporter: Reporter) -> dict[str, RowSum]:
    dataset, classes = request.dataset, request.schema.label.num_classes
    counts = {name: ValueCounts() for name in request.columns}
    labels = np.zeros(classes or 0, np.int64)
    reporter.start(dataset.num_rows, done=0)
    for columns, done in _blocks(request):
        for name, each in counts.items():
            each.add(columns[name])
        if classes:
            known = np.clip(columns[LABEL].astype(np.int64), 0, classes - 1)
            labels += np.bincount(known, minlength=classes)
        reporter.advance(done)
    reporter.stop()
    share = _share(len(counts))
    found = {LABEL: RowSum(values=labels, bound=1, share=_OF_LABEL)} if classes else {}
    for name, each in counts.items():
        for part, values in (("single", each.single), ("groups", each.groups)):
            found[f"{part} {name}"] = RowSum(values=values, bound=1, share=share)
    return found


def _blocks(
    request: StatisticsRequest,
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Yields the columns of each block, and the number of rows so far.  Sensitive."""
    dataset, done = request.dataset, 0
    wanted = {*request.columns, LABEL}
    chosen = tuple(each for each in dataset.columns if each.name in wanted)
    for block in dataset.blocks:
        done += block.num_rows
        yield read_block(block, chosen, dataset.is_listed), done


def _range(
    request: StatisticsRequest, released: dict[str, NoisySum], output: str
) -> dict[str, Any]:
    single, groups = released[f"single {output}"], released[f"groups {output}"]
    num_rows = request.dataset.num_rows
    found = Quantiles(single, groups, num_rows)
    low, high = found.low(request.beyond), found.high(1 - request.beyond)
    middle = (found.low(0.5) + found.high(0.5)) / 2
    if high <= low:  # one value: any range of it will do
        low, high = low - 1.0, high + 1.0
    return {
        "low": low,
        "high": high,
        "log": high - middle > _SKEWED * (middle - low),
        "missing": found.missing / num_rows,
        "stddev_of_missing": single.stddev / num_rows,
    }


def _classes(found: NoisySum | None, num_rows: int) -> list[dict[str, float]]:
    if found is None:
        return []
    return [
        {"share": float(np.clip(count, 0, num_rows)) / num_rows, "stddev": stddev}
        for count, stddev in ((each, found.stddev / num_rows) for each in found.values)
    ]


def _lines(fields: dict[str, Any], where: str) -> list[str]:
    found = [f"range = [{fields['low']!r}, {fields['high']!r}]  # {where}"]
    return [*found, f"log = true  # {where}"] if fields["log"] else found
