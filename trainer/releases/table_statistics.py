"""``statistics``: ranges of columns and shares of classes, under an epsilon.

    OUT    the schema, with ``range`` and ``log`` of each numeric column without them

They are computed from rows that train nothing, such as the part `val` of `dpsgd
prepare`.  A row is in one part, so that statistics and a model of other rows together
have the larger epsilon of both, and not the sum.

Formal guarantees:
  - The statistics are (epsilon, delta)-private for one unit of the input under
    zero-out, as functions of one Gaussian release.
  - N statistics that were declared together are one Gaussian release, of the root of N
    times the noise.
  - What is counted depends on the schema and the columns of the table alone, which are
    public.  Whether a column's logarithm is taken depends on released counts.
  - The privacy unit is a row or, for rows that `dpsgd prepare` kept, a user, whose rows
    move sums at most k times as far.  The number of rows is then released with noise,
    and shown nowhere else; where noise hides it nothing is found, and OUT is written
    all the same, since epsilon is spent.  So everything depends on the sums alone, to
    which a ghost adds as little as a user who is not there: add-or-remove holds for
    users, too.  Users who are not bounded are refused.
  - If two processes write one OUT at once, one of them is refused, and shows nothing.
  - *Not* covered: an error for a file that cannot be read, after which nothing is
    released; other statistics of the same rows, whose epsilon adds.

Public: OUT, what is returned.  Sensitive: rows and counts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.intervals import upper_text
from accounting.core.plan import MOST_RUNS
from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import (
    InputError,
    check_claimed_delta,
    check_float,
    check_int,
)
from pipelines.core.users import Bounded
from pipelines.files.outputs import check_new, output_file
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.tables.kinds import LABEL
from pipelines.tables.schema import DATASET_NAME, Schema
from trainer.releases.evaluate import relations
from trainer.releases.held_out_sums import NoisySum, release
from trainer.releases.table_counts import (
    ROWS,
    Counted,
    Quantiles,
    count_rows,
    noise_of_rank,
)
from trainer.report.progress import Reporter, Silent


def with_fields(text: str, fields: Mapping[str, Sequence[str]]) -> str:
    """Returns the text of a schema with lines added to columns.

    Args:
      text: TOML with a header ``[columns.NAME]`` for each column of ``fields``.
      fields: Name of a column -> lines.

    Raises:
      InputError: a column has no header of its own.

    Example:
      >>> with_fields("[columns.age]\\nkind = 'numeric'", {"age": ["log = true"]})
      "[columns.age]\\nlog = true\\nkind = 'numeric'"
    """
    lines, missing = [], dict(fields)
    for line in text.split("\n"):
        lines.append(line)
        lines += missing.pop(_column_of(line), ())
    if missing:
        raise InputError(
            f"Expected a header [columns.{next(iter(missing))}] in the schema, behind "
            "which what is found is written. Write its fields below such a header."
        )
    return "\n".join(lines)


def _column_of(line: str) -> str:
    """Returns the column whose header a line is; empty if it is none."""
    if not line.lstrip().startswith("[columns."):
        return ""
    try:
        (found,) = tomllib.loads(line)["columns"]
    except (tomllib.TOMLDecodeError, ValueError):
        return ""
    return str(found)


#: Share of the values beyond each end of a range, if noise allows, and at most of a
#: column without missing values.
_BEYOND, _MOST_BEYOND = 0.01, 0.1
#: A column gets no range that leaves out a larger share of its values at each end.
_MOST_OF_PRESENT = 0.2
#: So many standard deviations of the noise are within the share beyond an end.
_SIDES = 5.0
#: A logarithm is taken if the upper end is so many times farther from the median.
_SKEWED = 5.0
_HIDDEN_BY_BINS = "nearly all values are 0, or some are too large or small to tell"
#: Largest standard deviation of a share of the rows.
_MOST_NOISE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatisticsPrice:
    """What statistics cost, and what noise leaves of them.

    Attributes:
      counted: What is counted.
      epsilon: Epsilon of all such statistics for one unit, above 0.
      delta: Delta of all such statistics, in (0, 1).
      of_runs: Number of such statistics that have them together.
    """

    counted: Counted
    epsilon: float
    delta: float
    of_runs: int = 1

    def claim(self, bounded: Bounded | None) -> str:
        """Returns the claim in two sentences, about a row or about bounded users."""
        unit = "one row of --input" if bounded is None else bounded.unit
        others = "rows" if bounded is None else "users"
        these = "These statistics are"
        if self.of_runs != 1:
            these = f"At most {self.of_runs:,} such statistics are together"
        return (
            f"{these} ({upper_text(self.epsilon)}, {self.delta!r})"
            f"-differentially private for {unit}, under {relations(bounded)}. A model "
            f"of other {others} adds nothing to that; other statistics of these "
            f"{others} add their epsilon and delta."
        )

    @functools.cached_property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over the sensitivity of all sums."""
        return gaussian_noise(self.epsilon, self.delta) * math.sqrt(self.of_runs)

    def stddev(self, name: str) -> float:
        """Returns the standard deviation of the noise of each value of a sum."""
        return self.counted.sums[name].stddev(self.noise_multiplier)

    @functools.cached_property
    def beyond(self) -> float:
        """Number of rows beyond an end of a range that noise does not hide."""
        first = next(iter(self.counted.ranges), None)
        if first is None:
            return 0.0
        return _SIDES * noise_of_rank(self.stddev(f"single {first}"))

    @property
    def least_rows(self) -> int:
        """Number of rows from which on noise leaves something of each statistic."""
        shares = {LABEL, ROWS} & {*self.counted.sums}
        of_shares = max(map(self.stddev, shares), default=0.0)
        return math.ceil(max(self.beyond / _MOST_BEYOND, of_shares / _MOST_NOISE))


def least_rows(
    schema: Schema,
    epsilon: float,
    delta: float,
    most: int | None = None,
    of_runs: int = 1,
) -> int:
    """Returns the number of rows from which on ranges are found.

    Args:
      schema: The schema that the rows were prepared with.
      epsilon: Epsilon for one of these rows, or users, above 0.
      delta: In (0, 1).
      most: Largest number of rows of one user; None if the unit is a row.
      of_runs: Number of such statistics that have them together.
    """
    counted = Counted.of(schema, most)
    price = StatisticsPrice(
        counted=counted, epsilon=epsilon, delta=delta, of_runs=of_runs
    )
    return price.least_rows


def without_range(schema: Schema) -> dict[str, str]:
    """Returns output -> name of the numeric columns that nothing scales."""
    return Counted.of(schema).ranges


def _check_table(dataset: Dataset, schema: Schema, table: str) -> None:
    description = dataset.description
    if description.get("name") != DATASET_NAME or (
        description.get("schema") != schema.to_json()
    ):
        raise InputError(
            f"Expected {table} to be prepared with this --schema; it was with another "
            "one. Give the schema of `dpsgd prepare`."
        )
    bounded = dataset.bounded
    if schema.user and bounded is None:
        raise InputError(
            f"Expected the users of {table} to be bounded: nothing bounds how many "
            "rows of one are held out. Give a part of what `dpsgd prepare "
            "--bound-held-out` makes."
        )


def _check_rows(price: StatisticsPrice, num_rows: float) -> None:
    if num_rows < price.least_rows:
        counted = price.counted
        raise InputError(
            f"Expected at least {price.least_rows} rows for ranges of "
            f"{len(counted.ranges)} columns at epsilon={price.epsilon:.6g}; --input "
            f"has {num_rows:.0f}. Give more rows, or what you know without them, or a "
            "larger --epsilon."
        )


def statistics(
    table: str,
    schema: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epsilon: float,
    delta: float,
    of_runs: int = 1,
    allow_large_delta: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Writes a schema with private ranges; returns all statistics.

    Args:
      table: Prepared rows that train nothing, such as the part `val`: Parquet (a
        folder, a file or a glob).
      schema: The schema that they were prepared with.
      out: New file for the schema with what is found.
      epsilon: Epsilon for one row, above 0.
      delta: In (0, 1).
      of_runs: Number of such statistics of these rows that have epsilon and delta
        together, declared before the first.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      reporter: Receives progress; None for none.

    Raises:
      InputError: name, value, bound, remedy.
    """
    check_float("epsilon", epsilon, above=0)
    check_claimed_delta(delta, allow_large=allow_large_delta)
    check_int("of_runs", of_runs, at_least=1, at_most=MOST_RUNS)
    path = pathlib.Path(out)
    check_new(path)
    read = Schema.read(schema)
    dataset = list_blocks(table)
    _check_table(dataset, read, table)
    bounded = dataset.bounded
    counted = Counted.of(read, bounded.max_examples_per_user if bounded else None)
    text = pathlib.Path(schema).read_text(encoding="utf-8")
    with_fields(text, {name: [] for name in counted.ranges.values()})  # has them
    if not counted.ranges:
        raise InputError(
            f"Expected {schema} to have a numeric column without range, log or scale; "
            "there is none, and nothing is to be found. Go on with this schema."
        )
    price = StatisticsPrice(
        counted=counted, epsilon=epsilon, delta=delta, of_runs=of_runs
    )
    _check_rows(price, dataset.num_examples)
    # Progress would tell how many rows users have.
    told = Silent() if bounded or reporter is None else reporter
    released = release(count_rows(counted, dataset, told), price.noise_multiplier)
    num_rows: float = dataset.num_examples
    if ROWS in released:
        num_rows = max(1.0, float(released[ROWS].values[0]))
    is_hidden = num_rows < price.least_rows  # of users alone: others were refused
    ranges = {
        name: _range(price, released, output, num_rows)
        for output, name in counted.ranges.items()
        if not is_hidden
    }
    with output_file(path) as write:
        write(_written(text, price, ranges).encode())
    return {
        "claim": price.claim(bounded),
        "epsilon": epsilon,
        "delta": delta,
        "noise_multiplier": price.noise_multiplier,
        "num_rows": num_rows,
        "least_rows": price.least_rows,
        "columns": ranges,
        "classes": [] if is_hidden else _shares(released.get(LABEL), num_rows),
    }


def _range(
    price: StatisticsPrice, released: dict[str, NoisySum], output: str, num_rows: float
) -> dict[str, Any]:
    """Returns what is known of a column; without a range where noise or bins hide it.

    Noise is that of counts, and a range is of the values that there are.
    """
    single, groups = released[f"single {output}"], released[f"groups {output}"]
    found = Quantiles(single, groups, num_rows)
    beyond = max(_BEYOND, price.beyond / max(1.0, found.present))
    shown: dict[str, Any] = {
        "low": None, "high": None, "log": False, "beyond": beyond,
        "why_no_range": "too few values for the noise",
    }  # fmt: skip
    if beyond > _MOST_OF_PRESENT:
        return shown
    low, high = found.low(beyond), found.high(1 - beyond)
    if not found.reaches(low, high):
        return {**shown, "why_no_range": _HIDDEN_BY_BINS}
    middle = (found.low(0.5) + found.high(0.5)) / 2
    return {
        **shown,
        "low": low,
        "high": high,
        "log": high - middle > _SKEWED * (middle - low),
        "why_no_range": "",
    }


def _shares(found: NoisySum | None, num_rows: float) -> list[dict[str, float]]:
    """Returns counts as shares of the rows, with the deviation of their noise."""
    if found is None:
        return []
    stddev = found.stddev / num_rows
    shares = np.clip(found.values / num_rows, 0, 1).tolist()
    return [{"share": share, "stddev": stddev} for share in shares]


def _written(
    text: str, price: StatisticsPrice, ranges: dict[str, dict[str, Any]]
) -> str:
    """Returns the schema with what was found."""
    epsilon = upper_text(price.epsilon)
    where = f"  # by dpsgd statistics, epsilon {epsilon}, delta {price.delta!r}"
    if price.of_runs != 1:
        where += f", of at most {price.of_runs:,} together"
    lines = {
        name: [
            f"range = [{each['low']!r}, {each['high']!r}]{where}",
            *([f"log = true{where}"] if each["log"] else []),
        ]
        for name, each in ranges.items()
        if each["low"] is not None
    }
    return with_fields(text, lines)
