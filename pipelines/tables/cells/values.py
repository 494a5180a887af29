"""One number and one text for each value, in whatever type or format it is stored.

Programs write a number in several ways: 5 as 5, 5.0, 5.00 or 5E+0, true as True.  Here
all of these have one text, so that a table gives the same categories and users in CSV
and in Parquet.  A number of single precision or a decimal becomes the double that is
nearest to its shortest text, which is what a reader of that text gets.

Formal guarantees:
  - A value has the same number, and the same text, in every type that holds it and in
    each text that pandas, polars, DuckDB, Spark and Arrow write for it.
  - -0 is 0.  NaN is missing, and so is a value that equals a missing value.
  - A number has a text only if it is whole and its type tells it from its neighbours;
    a text that is no number is its own, and so is one of a rounded number: see
    ``rounded_texts``.

Sensitive: cells.  Public: everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.type_kinds import is_text
from pipelines.tables.cells.cells import Cells, cast
from pipelines.tables.schema.fields import (
    EXPONENT,
    MOST_EXACT,
    ONE_TEXT,
    WHOLE_NUMBER,
    digits_of,
)

_LARGE = pa.large_string()
_SPECIAL = pa.array(list(ONE_TEXT), _LARGE)
_MEANT = pa.array(list(ONE_TEXT.values()), _LARGE)
#: What may be a number that is not written as digits alone.
_MAY_BE_NUMBER = r"^-?[0-9]+[.,eE]"
#: Whole numbers are exact up to 2 to the power of this.
_EXACT_BITS = {pa.float32(): 24, pa.float64(): 53}


def numbers_of(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Returns cells as float64, NaN if missing, and which are not numbers.

    Args:
      cells: Numbers, booleans or texts.
    """
    array = cells.array
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.type == pa.float32() or pa.types.is_decimal(array.type):
        array = array.cast(_LARGE)
    if pa.types.is_integer(array.type):
        found, bad = array.cast(pa.float64(), safe=False), np.zeros(len(array), bool)
    else:
        found, bad = cast(array, pa.float64())
    values = found.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0  # no -0
    if absent := _missing_numbers(cells.missing_values):
        values[np.isin(values, absent)] = np.nan
    return values, bad


@functools.lru_cache(maxsize=64)  # called for every column of every block
def _missing_numbers(missing_values: Sequence[str]) -> tuple[float, ...]:
    numbers, _ = cast(pa.array(missing_values, _LARGE), pa.float64())
    return tuple(numbers.drop_null().to_pylist())


def texts_of(cells: Cells) -> tuple[pa.Array, np.ndarray]:
    """Returns cells as large strings, null if missing, and which are malformed.

    Args:
      cells: Texts, booleans, dates, or numbers, which have to be whole.
    """
    array, bad = cells.array, np.zeros(len(cells), bool)
    if is_text(array.type):
        texts = one_text(array)
    elif pa.types.is_floating(array.type):
        texts, bad = _texts_of_floats(array)
    else:
        if pa.types.is_decimal(array.type):
            wide = pa.types.is_decimal256(array.type)
            array, bad = cast(array, pa.decimal256(76) if wide else pa.decimal128(38))
        elif pa.types.is_date(array.type):
            array = array.cast(pa.date32())
        texts = array.cast(_LARGE)
    if len(cells.missing_values) > 1:  # beside the empty text
        absent = pc.is_in(texts, value_set=_missing_texts(cells.missing_values))
        texts = pc.if_else(absent, pa.scalar(None, _LARGE), texts)
    return texts, bad


def _texts_of_floats(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    bits = _EXACT_BITS[array.type]
    values = array.to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        good = (np.floor(values) == values) & (np.abs(values) < 2.0**bits)
    whole = pa.array(np.where(good, values, 0).astype(np.int64), mask=~good)
    return whole.cast(_LARGE), ~good & ~np.isnan(values)


@functools.lru_cache(maxsize=64)
def _missing_texts(missing_values: Sequence[str]) -> pa.Array:
    return one_text(pa.array(missing_values, _LARGE)).drop_null()


def one_text(texts: pa.Array) -> pa.Array:
    """Returns texts with one text for each number and boolean, as ``fields.one_word``.

    Args:
      texts: Large strings.
    """
    if pc.any(pc.match_substring_regex(texts, _MAY_BE_NUMBER)).as_py():
        texts = _with_digits(texts)
    special = pc.is_in(texts, value_set=_SPECIAL)
    if not pc.any(special).as_py():
        return texts
    return pc.if_else(
        special, _MEANT.take(pc.index_in(texts, value_set=_SPECIAL)), texts
    )


def rounded_texts(cells: Cells) -> np.ndarray:
    """Returns which texts are of floating-point numbers that have lost digits.

    Programs write them with an exponent or a point; ids that they were before are
    other texts.

    Args:
      cells: Cells of any type.
    """
    texts = cells.array
    if not is_text(texts.type):
        return np.zeros(len(cells), bool)
    is_float = pc.match_substring_regex(texts, f"{EXPONENT}|{WHOLE_NUMBER}")
    numbers = pc.if_else(is_float, texts, pa.scalar("0", _LARGE)).cast(pa.float64())
    large: np.ndarray = np.abs(numbers.to_numpy(zero_copy_only=False)) >= MOST_EXACT
    return large


def _with_digits(texts: pa.Array) -> pa.Array:
    """Returns texts with whole numbers as digits alone."""
    texts = pc.replace_substring_regex(texts, WHOLE_NUMBER, r"\1")
    with_exponent = pc.fill_null(pc.match_substring_regex(texts, EXPONENT), False)
    if not pc.any(with_exponent).as_py():
        return texts
    digits = [digits_of(text) for text in texts.filter(with_exponent).to_pylist()]
    return pc.replace_with_mask(texts, with_exponent, pa.array(digits, _LARGE))
