"""Columns of a table in Arrow's types to columns of numbers, by the schema.

Formal guarantees:
  - A row's numbers depend only on this row and on the schema.
  - A missing number is NaN, or the schema's choice; a missing category, word or part of
    a date is 0, and a present one never is.
  - A cell that its kind does not accept makes its row malformed, for a reason that
    names column and kind, and quotes nothing of the cell.
  - Equal cells give equal numbers in every file format: see ``values``.  What cannot be
    made so is malformed.  (The last bit of ``log`` may differ between machines.)

Public: kinds, names and reasons.  Sensitive: cells.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.users.hashing import AFTER, buckets_of, hash_fields, words_of
from pipelines.inputs.type_kinds import is_list, is_text, kind_of_type
from pipelines.tables.cells.cells import (
    Cells,
    any_of_row,
    elements,
    nulls,
    padded,
    plain_errors,
)
from pipelines.tables.cells.dates import microseconds, part_of, since_1970, times_of
from pipelines.tables.cells.ids import ids_of
from pipelines.tables.cells.values import numbers_of, texts_of
from pipelines.tables.schema import column_kinds as kinds
from pipelines.tables.schema.schema import HASH, Schema

_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_NO_TEXT = (
    "no whole number, or one of more digits than floating point holds; as a category "
    "store it as a text"
)
_MOST_FLOAT = float(np.finfo(np.float32).max)


@dataclasses.dataclass(kw_only=True)
class Converted:
    """Columns of consecutive rows.  Sensitive.

    Attributes:
      arrays: Name of an output -> array of shape (rows, *shape).
      faults: (whether each row is malformed, reason); the first fault of a row counts.
      splits: Index in ``SPLITS`` of every row, int8; None if shares decide.
      texts: Name -> large strings: ids of users, and values of categories that are
        kept, empty where missing.
    """

    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    faults: list[tuple[np.ndarray, str]] = dataclasses.field(
        default_factory=list, repr=False
    )
    splits: np.ndarray | None = dataclasses.field(default=None, repr=False)
    texts: dict[str, pa.Array] = dataclasses.field(default_factory=dict, repr=False)


def convert(
    schema: Schema,
    columns: dict[str, pa.Array],
    *,
    inputs_only: bool = False,
    with_values: bool = False,
) -> Converted:
    """Converts the columns of some rows.

    Args:
      schema: Schema of the table.
      columns: Name -> array of every column that the schema needs.  Sensitive.
      inputs_only: Whether to omit label and split, for predictions.
      with_values: Whether values of categories that the schema does not list are kept.

    Raises:
      InputError: cells that Arrow cannot read.
    """
    found = Converted()
    kept = schema.unlisted if with_values else {}

    def cells_of(name: str) -> Cells:
        return Cells(name, columns[name], schema.input.missing_values, found.faults)

    for name in schema.inputs if inputs_only else schema.kept:
        kind = schema.columns[name]
        if kind.kind == kinds.USER:
            with plain_errors(name):
                found.texts[name] = ids_of(cells_of(name))
            continue
        outputs = [output.name for output in schema.outputs_of(name)]
        if outputs[0] in kept:
            with plain_errors(name):
                found.texts[outputs[0]] = _values(cells_of(name))
            continue
        with plain_errors(name):
            arrays = _CONVERTERS[kind.kind](cells_of(name), kind, outputs[0])
        found.arrays.update(zip(outputs, arrays, strict=True))
    if schema.split.column and not inputs_only:
        with plain_errors(schema.split.column):
            found.splits = _splits(schema, cells_of(schema.split.column))
    return found


# --- Numbers ------------------------------------------------------------------------


def _transform(kind: kinds.Numeric, values: np.ndarray) -> np.ndarray:
    """Returns values clipped, log-transformed and scaled, by the schema."""
    ends = np.array(kind.range or (-_MOST_FLOAT, _MOST_FLOAT))
    values = np.clip(values, *ends)
    if kind.log:
        values = np.sign(values) * np.log1p(np.abs(values))
        ends = np.sign(ends) * np.log1p(np.abs(ends))
    if kind.scale is not None:
        values = (values - (kind.mean or 0.0)) / kind.scale
    elif kind.range is not None:
        values = 2 * (values - ends[0]) / (ends[1] - ends[0]) - 1
    elif kind.log:
        values = values / kinds.LOG_SCALE
    if kind.scale is not None:  # otherwise values are in float32's range already
        values = np.clip(values, -_MOST_FLOAT, _MOST_FLOAT)
    return values.astype(np.float32)


def _numbers(cells: Cells, kind: kinds.Numeric, name: str) -> list[np.ndarray]:
    if kind.length is not None:
        return _number_lists(cells, kind)
    values, bad = numbers_of(cells)
    cells.fault(bad, "is not a number")
    if kind.range is None:
        cells.fault(np.isinf(values), "is not finite; give it a range in the schema")
    return _with_missing(cells, kind.missing, values, lambda v: _transform(kind, v))


def _with_missing(
    cells: Cells,
    missing: str | float,
    values: np.ndarray,
    transform: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """Returns transformed values, and their indicator if ``missing`` asks for it.

    Args:
      cells: Cells of the column.
      missing: The schema's choice for missing values.
      values: float64, NaN where missing.
      transform: Function to float32.
    """
    absent = np.isnan(values)
    if missing == kinds.REFUSE:
        cells.fault(absent, "is missing")
    if missing == kinds.INDICATOR:
        values = transform(values)
        values[absent] = 0
        return [values, absent.astype(np.int8)]
    if not isinstance(missing, str):
        values = np.where(absent, missing, values)
    return [transform(values)]


def _number_lists(cells: Cells, kind: kinds.Numeric) -> list[np.ndarray]:
    flat, starts, ends, absent = elements(cells, kind.separator)
    values, bad = numbers_of(flat)
    if kind.range is None:
        bad |= np.isinf(values)
    cells.fault(any_of_row(bad, starts, ends), "holds what is not a number")
    if kind.missing == kinds.REFUSE:
        gaps = any_of_row(np.isnan(values), starts, ends)
        cells.fault(absent | gaps, "is missing, or a number of it is")
    values = np.nan_to_num(_transform(kind, values), nan=0.0)
    return [padded(values, starts, ends, kind.length or 1)]


def _booleans(cells: Cells, kind: kinds.Boolean, name: str) -> list[np.ndarray]:
    values, bad = _truth(cells)
    cells.fault(bad, "is neither true nor false")
    values = np.where(bad, np.nan, values)
    return _with_missing(cells, kind.missing, values, lambda v: v.astype(np.float32))


def _truth(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Returns 0, 1 or, if missing, NaN, and which cells are malformed."""
    if is_text(cells.array.type) or pa.types.is_boolean(cells.array.type):
        texts, _ = texts_of(cells)
        word = pc.utf8_lower(texts)
        true = pc.is_in(word, value_set=pa.array(_TRUE, word.type))
        false = pc.is_in(word, value_set=pa.array(_FALSE, word.type))
        true, false = (each.to_numpy(zero_copy_only=False) for each in (true, false))
        values = np.where(true, 1.0, np.where(false, 0.0, np.nan))
        return values, ~(true | false | nulls(texts))
    values, bad = numbers_of(cells)
    return values, bad | ~((values == 0) | (values == 1) | np.isnan(values))


# --- Categories and words -----------------------------------------------------------


@functools.cache
def salt_of(name: str) -> np.uint64:
    """Returns the salt of the hash of a column or split."""
    data = name.encode()
    at = np.array([0, len(data)], np.int64)
    return np.uint64(
        hash_fields(words_of(data + AFTER), at[:1], at[1:], np.uint64(0))[0]
    )


def hash_texts(texts: pa.Array, salt: np.uint64) -> np.ndarray:
    """Returns uint64 hashes; null has the hash of the empty text.

    Args:
      texts: Texts of type large_string.
      salt: From ``salt_of``.
    """
    if not len(texts):
        return np.empty(0, np.uint64)
    _, offsets, data = texts.buffers()
    first, count = texts.offset, len(texts)
    at = np.frombuffer(offsets, np.int64)[first : first + count + 1]
    text = b"" if data is None else memoryview(data)[at[0] : at[-1]]
    at = at - at[0]
    return hash_fields(words_of(b"".join((text, AFTER))), at[:-1], at[1:], salt)


def _ids(
    texts: pa.Array, buckets: int, vocabulary: Sequence[str] | None, salt: np.uint64
) -> np.ndarray:
    """Returns int32 ids of large strings, 0 for null."""
    missing = nulls(texts)
    if vocabulary is None:
        ids = buckets_of(hash_texts(texts, salt), buckets).astype(np.int32)
    else:
        listed = pa.array(vocabulary, pa.large_string())
        index = pc.fill_null(pc.index_in(texts, value_set=listed), -1)
        ids = index.to_numpy(zero_copy_only=False).astype(np.int32) + np.int32(2)
    ids[missing] = 0
    return ids


def _values(cells: Cells) -> pa.Array:
    """Returns the texts of a category, empty where missing."""
    texts, bad = texts_of(cells)
    cells.fault(bad, f"is {_NO_TEXT}")
    return pc.fill_null(texts, "")


def _categories(cells: Cells, kind: kinds.Category, name: str) -> list[np.ndarray]:
    if kind.length is None:
        texts, bad = texts_of(cells)
        cells.fault(bad, f"is {_NO_TEXT}")
        return [_ids(texts, kind.buckets, kind.vocabulary, salt_of(name))]
    flat, starts, ends, _ = elements(cells, kind.separator)
    texts, bad = texts_of(flat)
    cells.fault(any_of_row(bad, starts, ends), f"holds {_NO_TEXT}")
    ids = _ids(texts, kind.buckets, kind.vocabulary, salt_of(name))
    return [padded(ids, starts, ends, kind.length)]


def _words(cells: Cells, kind: kinds.Text, name: str) -> list[np.ndarray]:
    array = pc.fill_null(cells.array.cast(pa.large_string()), "")
    plain = pc.replace_substring_regex(
        pc.utf8_lower(array), pattern=r"[^\pL\pN]+", replacement=" "
    )
    words = cells.of(pc.split_pattern(pc.utf8_trim(plain, characters=" "), " "))
    flat, starts, ends, _ = elements(words, "")  # of no words: one empty, missing word
    ids = _ids(flat.array, kind.buckets, None, salt_of(name))
    return [padded(ids, starts, ends, kind.tokens)]


def _dates(cells: Cells, kind: kinds.Date, name: str) -> list[np.ndarray]:
    times, bad = times_of(cells, kind)
    cells.fault(bad, "is not a date of the format that the schema says")
    return [part_of(times, kind, part) for part in kind.parts]


# --- Labels and splits --------------------------------------------------------------


def _labels(cells: Cells, kind: kinds.Label, name: str) -> list[np.ndarray]:
    if kind.task == kinds.REGRESSION:
        values, bad = numbers_of(cells)
        cells.fault(bad | np.isnan(values), "is not a number, as this label has to be")
        return [_transform(kinds.Numeric(range=kind.range), values)]
    dtype = np.int8 if kind.task == kinds.BINARY else np.int32
    if isinstance(kind.classes, tuple):
        texts, _ = texts_of(cells)
        cells.fault(nulls(texts), "is missing")
        listed = pa.array(kind.classes, pa.large_string())
        index = pc.fill_null(pc.index_in(texts, value_set=listed), -1)
        values = index.to_numpy(zero_copy_only=False)
        cells.fault(values < 0, kinds.NO_CLASS)
        return [values.astype(dtype)]
    values, bad = _truth(cells) if kind.classes is None else numbers_of(cells)
    cells.fault(~bad & np.isnan(values), "is missing")
    last = kind.num_classes - 1
    with np.errstate(invalid="ignore"):
        good = (values >= 0) & (values <= last) & (np.floor(values) == values) & ~bad
    reason = (
        f"is no integer from 0 to {last}: list its values by --classes of `dpsgd "
        "schema` and `fit`, or give the range of a number by --range"
    )
    cells.fault(~good, reason)
    return [np.where(good, values, 0).astype(dtype)]


def _splits(schema: Schema, cells: Cells) -> np.ndarray:
    """Returns the split of every row, int8, by the split column of the schema."""
    split = schema.split
    if split.by == HASH:
        if split.column == schema.user:  # a user's rows are in one split
            texts, bad = ids_of(cells), np.zeros(len(cells), bool)
        else:
            texts, bad = texts_of(cells)
        cells.fault(bad | nulls(texts), "is missing, or no value to split by")
        salt = salt_of(f"split {split.salt}")
        unit = (hash_texts(texts, salt) >> np.uint64(11)).astype(np.float64) / 2.0**53
        bounds = np.cumsum(split.shares)[:2] / sum(split.shares)
        return np.searchsorted(bounds, unit, side="right").astype(np.int8)
    known = schema.columns.get(split.column)
    kind = known if isinstance(known, kinds.Date) else kinds.Date()
    times, bad = times_of(cells, kind)
    cells.fault(bad | nulls(times), "is missing, or no date to split by")
    starts = [since_1970(each) for each in (split.val_from, split.test_from) if each]
    return np.searchsorted(starts, microseconds(times), side="right").astype(np.int8)


_CONVERTERS: dict[str, Callable[..., list[np.ndarray]]] = {
    "numeric": _numbers,
    "boolean": _booleans,
    "category": _categories,
    "text": _words,
    "date": _dates,
    "label": _labels,
}


def refusals(
    schema: Schema, found: dict[str, pa.DataType], *, inputs_only: bool = False
) -> list[str]:
    """Returns the columns whose types do not fit the schema, with types and remedies.

    Args:
      schema: Schema of the table.
      found: Name -> type, of the columns that are read.
      inputs_only: As in ``convert``.
    """
    wrong = {}
    for name, kind in found.items():
        column = schema.columns.get(name)
        remedy = None if column is None else refusal(column, kind)
        if remedy is None and name == schema.split.column and not inputs_only:
            remedy = _split_refusal(schema, kind)
        if remedy is not None:
            wrong[name] = remedy
    return [f"{name} of type {found[name]} ({why})" for name, why in wrong.items()]


def _split_refusal(schema: Schema, found: pa.DataType) -> str | None:
    """Returns why a type cannot split rows as the schema says; None if it can."""
    if schema.split.by == HASH:  # a time has many texts
        if refusal(kinds.Category(), found) is None:
            return None
        return "to split by hash, name a column of integers or text"
    known = schema.columns.get(schema.split.column)
    kind = known if isinstance(known, kinds.Date) else kinds.Date()
    wrong = refusal(kind, found) is not None
    return "to split by time, name a column of dates" if wrong else None


def refusal(kind: kinds.Kind, found: pa.DataType) -> str | None:
    """Returns the remedy for cells of a type that a kind does not accept; else None.

    Args:
      kind: Kind of the column in the schema.
      found: Type of the column in the file.
    """
    if isinstance(found, pa.BaseExtensionType):
        found = found.storage_type
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_null(found) or isinstance(kind, kinds.Drop):
        return None  # without values it can be of any kind
    return _list_refusal(kind, found) or _value_refusal(kind, found)


def _list_refusal(kind: kinds.Kind, found: pa.DataType) -> str | None:
    has_length = getattr(kind, "length", None) is not None
    if is_list(found) == has_length:
        return None
    if is_list(found):
        if isinstance(kind, kinds.Numeric | kinds.Category):
            return "write length = 8, or how much of a list is kept"
        return 'write kind = "numeric" or "category", with a length'
    if not is_text(found):
        return "it is no list: leave length out"
    return None if getattr(kind, "separator", "") else 'write separator = "|"'


def _value_refusal(kind: kinds.Kind, found: pa.DataType) -> str | None:
    while is_list(found) or pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_null(found) or is_text(found):
        return None
    if pa.types.is_float16(found):  # programs write different texts of it
        return "store it in single precision"
    if isinstance(kind, kinds.Date) and pa.types.is_integer(found):
        return "store times as timestamps or text"
    if not any(check(found) for check in _TAKEN[kind.kind]):
        return f'write kind = "{kind_of_type(found)}"'
    if isinstance(kind, kinds.Label) and pa.types.is_boolean(found):
        counted = kind.task == kinds.REGRESSION or isinstance(kind.classes, int)
        return 'write task = "binary"' if counted else None
    return None


_NUMBER = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
_ANY_NUMBER = (*_NUMBER, pa.types.is_boolean)
_TAKEN: dict[str, tuple[Callable[[pa.DataType], bool], ...]] = {
    "numeric": _NUMBER,
    "boolean": _ANY_NUMBER,
    "category": (*_ANY_NUMBER, pa.types.is_date),
    "text": (),
    "date": (pa.types.is_timestamp, pa.types.is_date),
    "label": _ANY_NUMBER,
    "user": _NUMBER,
}
