"""Synthetic text in Criteo's format, from which a model can learn.

Marginals resemble those of click logs: a quarter of the labels are 1, a few values of
each category are frequent and most are rare, integers are heavy-tailed and some are
negative, and missing values come in groups of columns.

The log-odds of a click are a sum of terms linear in the logarithm of some integers, of
an effect of each frequent value of some categories, and of two mild interactions.
Their constants are in the code, so that all seeds share one distribution.  For one
version of NumPy, row i is a function of (seed, number of users, i) alone: more rows
extend fewer.

With users a row also has the number of its user, in a last column, and the text has a
header.  The m users have ranks, and the user of rank r has about
``mean * (m / r)**(2/3) / 3`` rows: a heavy tail, of index 1.5.  All rows of a user
share some categories and a taste, a term of the log-odds of a click that no column
reveals.  A second row of a user is therefore less informative than a row of another
user.  The number of users is public: ``rows / rows_per_user``; some have no row.

Memory does not depend on the number of rows or of users.  ``out`` appears complete or
not at all; a stop by a signal leaves none of it.

Everything here is public: there is no person behind a row.  So the seed may have a
default, which no key of sampling or noise ever has.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.csv

from accounting.core.validation import check_float, check_int
from pipelines.core.hashing import GOLDEN, mix
from pipelines.core.keys import derive
from pipelines.files.key_sources import insecure_key
from pipelines.files.outputs import staged_folder

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
#: Names of the cells of a line, as in the schema ``criteo``.
COLUMNS = (
    "label",
    *(f"I{number}" for number in range(1, NUM_INTEGERS + 1)),
    *(f"C{number}" for number in range(1, NUM_CATEGORIES + 1)),
)

#: ``on_progress(rows done, rows in all)``.
Progress = Callable[[int, int], None]

#: Rows per block, 4 MB of text.  Changing it changes the rows.
BLOCK_ROWS = 16_384

_TEXT = pyarrow.csv.WriteOptions(
    include_header=False, delimiter="\t", quoting_style="none"
)

#: Column of the users.
USER = "user"
#: Categories that all rows of a user share.
_PROFILE = (1, 5, 13, 16, 22)
#: Scale of the logistic distribution of tastes: standard deviation 0.9 in the log-odds.
_TASTE = 0.5

# Seed of the effects; changing it changes the distribution.
_LAW_SEED = 20141


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Integer:
    """``floor(exp(location + scale * z)) - shift`` for a standard normal z.

    ``slope`` is the change of the log-odds by z; ``group`` is missing together.
    """

    location: float
    scale: float
    missing: float
    slope: float = 0.0
    shift: int = 1
    group: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Category:
    """Values of ranks 0 to ``size - 1``, of probability about ``rank ** -exponent``.

    ``spread`` is the standard deviation of the effects of the first ``_NUM_FREQUENT``.
    """

    size: int
    exponent: float
    missing: float = 0.0
    spread: float = 0.0
    group: str = ""


_INTEGERS = (
    _Integer(location=1.2, scale=1.2, missing=0.45, slope=0.5, group="a"),
    _Integer(location=1.9, scale=2.0, missing=0.0, slope=0.4, shift=3),
    _Integer(location=2.0, scale=1.4, missing=0.21, slope=0.3, group="b"),
    _Integer(location=1.8, scale=1.0, missing=0.21, group="b"),
    _Integer(location=8.0, scale=2.0, missing=0.03, slope=-0.4, group="c"),
    _Integer(location=3.8, scale=1.6, missing=0.22, slope=-0.35),
    _Integer(location=1.6, scale=1.4, missing=0.04, slope=0.5, group="c"),
    _Integer(location=2.2, scale=1.1, missing=0.001),
    _Integer(location=3.8, scale=1.5, missing=0.04, group="c"),
    _Integer(location=0.3, scale=0.5, missing=0.45, group="a"),
    _Integer(location=0.9, scale=0.8, missing=0.04, slope=0.4, group="c"),
    _Integer(location=0.3, scale=0.9, missing=0.76),
    _Integer(location=1.9, scale=1.3, missing=0.21, group="b"),
)

_CATEGORIES = (
    _Category(size=1_472, exponent=1.6, spread=0.4),
    _Category(size=577, exponent=0.9, spread=0.5),
    _Category(size=82_741, exponent=0.9, missing=0.03, group="d"),
    _Category(size=18_940, exponent=1.0, missing=0.03, group="d"),
    _Category(size=305, exponent=1.9),
    _Category(size=23, exponent=1.2, missing=0.12, spread=0.5),
    _Category(size=1_172, exponent=0.4),
    _Category(size=633, exponent=1.8),
    _Category(size=3, exponent=2.6, spread=0.4),
    _Category(size=9_090, exponent=1.1),
    _Category(size=5_918, exponent=0.6),
    _Category(size=64_300, exponent=0.9, missing=0.03, group="d"),
    _Category(size=3_207, exponent=0.6),
    _Category(size=27, exponent=1.3, spread=0.5),
    _Category(size=1_550, exponent=0.6),
    _Category(size=44_262, exponent=0.9, missing=0.03, group="d"),
    _Category(size=10, exponent=1.0, spread=0.6),
    _Category(size=5_485, exponent=0.8),
    _Category(size=2_161, exponent=1.4, missing=0.44, group="e"),
    _Category(size=3, exponent=0.4, missing=0.44, spread=0.5, group="e"),
    _Category(size=56_473, exponent=0.9, missing=0.03, group="d"),
    _Category(size=17, exponent=1.4, missing=0.76),
    _Category(size=15, exponent=1.1, spread=0.5),
    _Category(size=27_360, exponent=0.9, missing=0.03, group="d"),
    _Category(size=104, exponent=1.3, missing=0.44, spread=0.4, group="e"),
    _Category(size=12_934, exponent=1.0, missing=0.44, group="e"),
)

_NUM_FREQUENT = 12
# (category, integer) whose effect and z multiply, times a slope.
_MIXED = (16, 6, 0.25)
# (category, category) whose effects multiply, times a slope.
_PAIRED = (5, 13, 0.5)
# Makes a quarter of the labels 1.
_INTERCEPT = -2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """What to write.  All fields are public.

    Attributes:
      num_rows: Number of rows.
      seed: Seed of the rows.
      rows_per_user: Mean number of rows of a user, at least 1; None for no users.

    Raises:
      InputError: a value out of range.
    """

    num_rows: int
    seed: int = 0
    rows_per_user: float | None = None

    def __post_init__(self) -> None:
        check_int("--rows", self.num_rows, at_least=1)
        check_int("--seed", self.seed, at_least=0)
        if self.rows_per_user is not None:
            check_float("--rows-per-user", self.rows_per_user, at_least=1)

    @property
    def num_users(self) -> int:
        """Number of users, with or without rows; 0 if rows have none."""
        mean = self.rows_per_user
        return max(1, round(self.num_rows / mean)) if mean else 0


def synth_generator(*labels: str | int, seed: int) -> np.random.Generator:
    """Returns the generator for a part of the rows.

    Args:
      *labels: Labels of the part.
      seed: Seed of the rows.
    """
    key = derive(insecure_key(seed), "synth", *labels)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))


def _effects() -> np.ndarray:
    """Returns the effects of the frequent values, of shape (26, _NUM_FREQUENT + 1).

    The last column, of zeros, is for all other values and for missing ones.
    """
    effects = synth_generator("law", seed=_LAW_SEED).standard_normal(
        (NUM_CATEGORIES, _NUM_FREQUENT + 1)
    )
    effects *= np.array([category.spread for category in _CATEGORIES])[:, None]
    effects[:, _NUM_FREQUENT] = 0
    return effects


def _missing(
    generator: np.random.Generator, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where values are missing, of shapes (13, rows) and (26, rows)."""
    columns: list[_Integer | _Category] = [*_INTEGERS, *_CATEGORIES]
    missing = np.zeros((len(columns), num_rows), bool)
    groups: dict[str, np.ndarray] = {}
    for number, column in enumerate(columns):
        if column.missing:
            group = column.group or str(number)
            if group not in groups:
                groups[group] = generator.random(num_rows)
            missing[number] = groups[group] < column.missing
    return missing[:NUM_INTEGERS], missing[NUM_INTEGERS:]


def _ranks(uniform: np.ndarray) -> np.ndarray:
    """Returns ranks, by inverting a continuous power law for each category.

    Args:
      uniform: Uniform numbers in [0, 1), of shape (26, rows).
    """
    ranks = uniform.copy()
    for row, category in zip(ranks, _CATEGORIES, strict=True):
        if category.exponent == 1:
            np.exp(row * np.log1p(category.size), out=row)
        else:
            power = 1 - category.exponent
            row *= (category.size + 1) ** power - 1
            row += 1
            np.power(row, 1 / power, out=row)
    sizes = np.array([category.size for category in _CATEGORIES])[:, None]
    return np.minimum(ranks.astype(np.int64) - 1, sizes - 1)


def _names(ranks: np.ndarray) -> np.ndarray:
    """Returns a 32-bit name for each rank, distinct within a category."""
    salts = np.arange(1, NUM_CATEGORIES + 1, dtype=np.uint32)[:, None]
    names = ranks.astype(np.uint32) + salts * np.uint32(0x9E3779B9)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        names ^= names >> np.uint32(15)
        names *= np.uint32(multiplier)
    return names ^ (names >> np.uint32(16))


def _log_odds(
    normals: np.ndarray, ranks: np.ndarray, effects: np.ndarray
) -> np.ndarray:
    """Returns the log-odds of a click, of shape (rows,).

    Args:
      normals: Normal numbers behind the integers, of shape (13, rows), 0 if missing.
      ranks: Ranks of shape (26, rows), -1 if missing.
      effects: From ``_effects``.
    """
    # No product of matrices, which is rounded differently from machine to machine.
    slopes = [
        integer.slope * values
        for integer, values in zip(_INTEGERS, normals, strict=True)
        if integer.slope
    ]
    # Missing values, -1, take the last column, as do all values that are not frequent.
    terms = {
        column: effects[column][np.minimum(ranks[column], _NUM_FREQUENT)]
        for column, category in enumerate(_CATEGORIES)
        if category.spread
    }
    odds = _INTERCEPT + sum(slopes) + sum(terms.values())
    category, integer, slope = _MIXED
    odds += slope * terms[category] * normals[integer]
    first, second, slope = _PAIRED
    return odds + slope * terms[first] * terms[second]


def _hex_column(names: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Returns strings of eight hexadecimal digits, null where missing."""
    offsets = np.arange(len(names) + 1, dtype=np.int32) * 8
    digits = names.astype(">u4").tobytes().hex().encode("ascii")
    present = np.packbits(~missing, bitorder="little")
    return pa.StringArray.from_buffers(
        len(names), pa.py_buffer(offsets), pa.py_buffer(digits), pa.py_buffer(present)
    )


def _users(seed: int, num_users: int, number: int) -> np.ndarray:
    """Returns the users of a block, int64 in [0, num_users), the busiest first."""
    uniform = synth_generator("users", number, seed=seed).random(BLOCK_ROWS)
    # The share of users up to rank r in all rows is (r / num_users)**(1/3).
    users = (uniform * uniform * uniform * num_users).astype(np.int64)
    return np.minimum(users, num_users - 1)


def _of_user(seed: int, users: np.ndarray, label: str | int) -> np.ndarray:
    """Returns a number in (0, 1) for each user."""
    key = derive(insecure_key(seed), "synth", "user", label)
    salt = np.frombuffer(key[:8], "<u8")[0]
    words = mix(mix(users.astype(np.uint64) * np.uint64(GOLDEN) ^ salt))
    return ((words >> np.uint64(12)) + 0.5) / 2.0**52


def _block(
    seed: int, number: int, effects: np.ndarray, users: np.ndarray | None
) -> pa.Table:
    """Returns the rows of a block, from ``number * BLOCK_ROWS``, in 40 columns or 41.

    Rows of one user share some categories and a taste that no column reveals.
    """
    generator = synth_generator("rows", number, seed=seed)
    absent_integers, absent_categories = _missing(generator, BLOCK_ROWS)
    normals = generator.standard_normal((NUM_INTEGERS, BLOCK_ROWS))
    uniform = generator.random((NUM_CATEGORIES, BLOCK_ROWS))
    if users is not None:
        for category in _PROFILE:
            uniform[category] = _of_user(seed, users, category)
    ranks = _ranks(uniform)
    odds = _log_odds(
        np.where(absent_integers, 0, normals),
        np.where(absent_categories, -1, ranks),
        effects,
    )
    if users is not None:
        taste = _of_user(seed, users, "taste")
        odds += _TASTE * (np.log(taste) - np.log1p(-taste))
    label = generator.random(BLOCK_ROWS) * (1 + np.exp(-odds)) < 1
    columns = [pa.array(label.astype(np.int8))]
    for law, values, absent in zip(_INTEGERS, normals, absent_integers, strict=True):
        numbers = np.exp(law.location + law.scale * values).astype(np.int64) - law.shift
        columns.append(pa.array(np.maximum(numbers, 1 - law.shift), mask=absent))
    columns += map(_hex_column, _names(ranks), absent_categories)
    table = pa.Table.from_arrays(columns, names=list(COLUMNS))
    return table if users is None else table.append_column(USER, pa.array(users))


def synthetic_rows(options: SynthOptions) -> Iterator[pa.Table]:
    """Yields rows as tables of the 40 columns, and USER, one table per block."""
    effects, seed = _effects(), options.seed
    for number, first in enumerate(range(0, options.num_rows, BLOCK_ROWS)):
        many = options.num_users
        users = _users(seed, many, number) if many else None
        yield _block(seed, number, effects, users).slice(0, options.num_rows - first)


def write_synth(
    out: str | os.PathLike[str],
    options: SynthOptions,
    *,
    on_progress: Progress = lambda *_: None,
) -> pathlib.Path:
    """Writes ``out/part-00000.txt``, or ``.tsv`` of users, and returns its path.

    Args:
      out: New or empty folder.
      options: What to write.
      on_progress: Called with rows done and rows in all.

    Raises:
      InputError: ``out`` is in use, or cannot be written.
    """
    name = "part-00000.tsv" if options.num_users else "part-00000.txt"
    # It is public.
    with staged_folder(out, mode=0o777) as root, open(root / name, "wb") as file:
        if options.num_users:
            file.write(("\t".join((*COLUMNS, USER)) + "\n").encode())
        done = 0
        for table in synthetic_rows(options):
            pyarrow.csv.write_csv(table, file, _TEXT)
            done += len(table)
            on_progress(done, options.num_rows)
    return pathlib.Path(out) / name
