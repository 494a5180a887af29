"""Columns of a table in Arrow's types to columns of numbers, by the schema.

Formal guarantees:
  - A row's numbers depend only on this row and on the schema.
  - A missing number is NaN, or the schema's choice; a missing category, word or part of
    a date is 0, and a present one never is.
  - A cell that its kind does not accept makes its row malformed, for a reason that
    names column and kind, and quotes nothing of the cell.
  - Equal cells give equal numbers in every file format: texts of numbers and numbers,
    dictionaries and their values.  (The last bit of ``log`` may differ between
    machines.)

Public: kinds, names and reasons.  Sensitive: cells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accounting.validation import InputError
from pipelines.inputs.type_kinds import is_list, is_text, kind_of_type
from pipelines.tables.cells import Cells, any_of_row, cast, elements, padded
from pipelines.tables.dates import microseconds, part_of, since_1970, times_of
from pipelines.tables.hashing import AFTER, buckets_of, hash_fields, words_of
from pipelines.tables.schema import column_kinds as kinds
from pipelines.tables.schema.fields import TRUTHS, WHOLE_NUMBER
from pipelines.tables.schema.schema import HASH, Schema

_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_MOST_FLOAT = float(np.finfo(np.float32).max)


@dataclasses.dataclass(kw_only=True)
class Converted:
    """Columns of consecutive rows.  Sensitive.

    Attributes:
      arrays: Name of an output -> array of shape (rows, *shape).
      faults: (whether each row is malformed, reason); the first fault of a row counts.
      splits: Index in ``SPLITS`` of every row, int8; None if shares decide.
      users: Ids of the users, large strings; None without a column of that kind.
    """

    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    faults: list[tuple[np.ndarray, str]] = dataclasses.field(
        default_factory=list, repr=False
    )
    splits: np.ndarray | None = dataclasses.field(default=None, repr=False)
    users: pa.Array | None = dataclasses.field(default=None, repr=False)


def convert(
    schema: Schema,
    columns: dict[str, pa.Array],
    *,
    check_only: bool = False,
    padded: bool = False,
    inputs_only: bool = False,
) -> Converted:
    """Converts the columns of some rows.

    Args:
      schema: Schema of the table.
      columns: Name -> array of every column that the schema needs; with ``check_only``
        only of those that may hold a fault.  Sensitive.
      check_only: Whether to return only faults and splits.
      padded: Whether spaces around texts are ignored.
      inputs_only: Whether to omit label and split, for predictions.

    Raises:
      InputError: cells that Arrow cannot read.
    """
    found = Converted()

    def cells_of(name: str) -> Cells:
        return Cells(
            name,
            columns[name],
            schema.input.missing_values,
            found.faults,
            padded=padded,
            decimal=schema.input.decimal,
        )

    for name in schema.inputs if inputs_only else schema.kept:
        kind = schema.columns[name]
        if check_only and name not in columns:
            continue
        if kind.kind == kinds.USER:
            with _plain_errors(name):
                found.users = _users(cells_of(name))
            continue
        outputs = [output.name for output in schema.outputs_of(name)]
        with _plain_errors(name):
            arrays = _CONVERTERS[kind.kind](
                cells_of(name), kind, outputs[0], check_only
            )
        found.arrays.update(zip(outputs, arrays, strict=True) if arrays else ())
    if schema.split.column and not inputs_only:
        with _plain_errors(schema.split.column):
            found.splits = _splits(schema, cells_of(schema.split.column))
    return found


@contextlib.contextmanager
def _plain_errors(name: str) -> Iterator[None]:
    """Raises Arrow's errors without their text, which may quote a cell."""
    try:
        yield
    except pa.ArrowException as error:
        raise InputError(
            f"Expected the cells of column {name} to be of the type that their file "
            f"says, and texts to be UTF-8: {type(error).__name__}. Write it again, or "
            'kind = "drop" in the schema.'
        ) from None


def takes_all(kind: kinds.Kind, found: pa.DataType) -> bool:
    """Whether no cell of a type can be malformed; arguments as for ``refusal``."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    return kind.kind == "text" or (kind.kind == "category" and is_text(found))


# --- Numbers ------------------------------------------------------------------------


def _floats(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Returns cells as float64, NaN if missing, and which are not numbers."""
    array = cells.with_points
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if pa.types.is_integer(array.type) or pa.types.is_decimal(array.type):
        values, bad = array.cast(pa.float64(), safe=False), np.zeros(len(array), bool)
    else:
        values, bad = cast(array, pa.float64())
    return values.to_numpy(zero_copy_only=False).astype(np.float64, copy=False), bad


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


def _numbers(
    cells: Cells, kind: kinds.Numeric, name: str, check_only: bool
) -> list[np.ndarray]:
    if kind.length is not None:
        return _number_lists(cells, kind)
    values, bad = _floats(cells)
    cells.fault(bad, "is not a number")
    if kind.range is None:
        cells.fault(np.isinf(values), "is not finite; give it a range in the schema")
    if check_only:
        _refuse_absent(cells, kind.missing, values)
        return []
    return _with_missing(cells, kind.missing, values, lambda v: _transform(kind, v))


def _refuse_absent(cells: Cells, missing: str | float, values: np.ndarray) -> None:
    if missing == kinds.REFUSE:
        cells.fault(np.isnan(values), "is missing")


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
    _refuse_absent(cells, missing, values)
    absent = np.isnan(values)
    if missing == kinds.INDICATOR:
        values = transform(values)
        values[absent] = 0
        return [values, absent.astype(np.int8)]
    if not isinstance(missing, str):
        values = np.where(absent, missing, values)
    return [transform(values)]


def _number_lists(cells: Cells, kind: kinds.Numeric) -> list[np.ndarray]:
    flat, starts, ends, absent = elements(cells, kind.separator)
    values, bad = _floats(flat)
    if kind.range is None:
        bad |= np.isinf(values)
    cells.fault(any_of_row(bad, starts, ends), "holds what is not a number")
    if kind.missing == kinds.REFUSE:
        gaps = any_of_row(np.isnan(values), starts, ends)
        cells.fault(absent | gaps, "is missing, or a number of it is")
    values = np.nan_to_num(_transform(kind, values), nan=0.0)
    return [padded(values, starts, ends, kind.length or 1)]


def _booleans(
    cells: Cells, kind: kinds.Boolean, name: str, check_only: bool
) -> list[np.ndarray]:
    values, bad = _truth(cells)
    cells.fault(bad, "is neither true nor false")
    return _with_missing(cells, kind.missing, values, _as_float32)


def _as_float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _truth(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Returns 0, 1 or, if missing, NaN, and which cells are malformed."""
    if is_text(cells.array.type):
        word = pc.utf8_lower(_one_text(cells.array))
        true = pc.is_in(word, value_set=pa.array(_TRUE, word.type))
        false = pc.is_in(word, value_set=pa.array(_FALSE, word.type))
        true, false = (each.to_numpy(zero_copy_only=False) for each in (true, false))
        values = np.where(true, 1.0, np.where(false, 0.0, np.nan))
        return values, ~(true | false | cells.missing)
    values, bad = _floats(cells)
    return values, bad | ~((values == 0) | (values == 1) | np.isnan(values))


# --- Categories and words -----------------------------------------------------------


def _texts(cells: Cells) -> tuple[pa.Array, np.ndarray]:
    """Returns values as texts, and which are malformed.

    Whole numbers and booleans have one text each, in every type: pandas stores, and
    writes to CSV, integers with missing values as floating-point numbers.
    """
    array, bad = cells.array, np.zeros(len(cells), bool)
    if is_text(array.type):
        return _one_text(array), bad
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
        array, bad = cast(array, pa.int64())
    return array.cast(pa.large_string()), bad


def _one_text(texts: pa.Array) -> pa.Array:
    """Returns texts with 5 for 5.0 and true for True, which pandas writes."""
    if pc.any(pc.ends_with(texts, ".0")).as_py():
        texts = pc.replace_substring_regex(texts, WHOLE_NUMBER, r"\1")
    truths = pc.is_in(texts, value_set=pa.array(TRUTHS, texts.type))
    if pc.any(truths).as_py():
        texts = pc.if_else(truths, pc.ascii_lower(texts), texts)
    return texts


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
    missing = texts.is_null().to_numpy(zero_copy_only=False)
    if vocabulary is None:
        ids = buckets_of(hash_texts(texts, salt), buckets).astype(np.int32)
    else:
        listed = pa.array(vocabulary, pa.large_string())
        index = pc.fill_null(pc.index_in(texts, value_set=listed), -1)
        ids = index.to_numpy(zero_copy_only=False).astype(np.int32) + np.int32(2)
    ids[missing] = 0
    return ids


def _categories(
    cells: Cells, kind: kinds.Category, name: str, check_only: bool
) -> list[np.ndarray]:
    if kind.length is None:
        texts, bad = _texts(cells)
        cells.fault(bad, "is not a whole number, as a category has to be")
        if check_only:
            return []
        return [_ids(texts, kind.buckets, kind.vocabulary, salt_of(name))]
    flat, starts, ends, _ = elements(cells, kind.separator)
    texts, bad = _texts(flat)
    reason = "holds what is not a whole number, as a category has to be"
    cells.fault(any_of_row(bad, starts, ends), reason)
    if check_only:
        return []
    ids = _ids(texts, kind.buckets, kind.vocabulary, salt_of(name))
    return [padded(ids, starts, ends, kind.length)]


def _words(
    cells: Cells, kind: kinds.Text, name: str, check_only: bool
) -> list[np.ndarray]:
    if check_only:
        return []
    array = pc.fill_null(cells.array.cast(pa.large_string()), "")
    plain = pc.replace_substring_regex(
        pc.utf8_lower(array), pattern=r"[^\pL\pN]+", replacement=" "
    )
    words = cells.of(pc.split_pattern(pc.utf8_trim(plain, characters=" "), " "))
    flat, starts, ends, _ = elements(words, "")  # of no words: one empty, missing word
    ids = _ids(flat.array, kind.buckets, None, salt_of(name))
    return [padded(ids, starts, ends, kind.tokens)]


def _dates(
    cells: Cells, kind: kinds.Date, name: str, check_only: bool
) -> list[np.ndarray]:
    times, bad = times_of(cells, kind)
    cells.fault(bad, "is not a date of the format that the schema says")
    if check_only:
        return []
    return [part_of(times, kind, part) for part in kind.parts]


# --- Users, labels and splits -------------------------------------------------------


def _users(cells: Cells) -> pa.Array:
    """Returns ids as texts, equal for equal ids of any type."""
    texts, bad = _texts(cells)
    cells.fault(bad | cells.missing, "is missing, or no whole number or text")
    return texts.cast(pa.large_string())


def _labels(
    cells: Cells, kind: kinds.Label, name: str, check_only: bool
) -> list[np.ndarray]:
    if kind.task == kinds.REGRESSION:
        values, bad = _floats(cells)
        cells.fault(bad | np.isnan(values), "is not a number, as this label has to be")
        return [_transform(kinds.Numeric(range=kind.range), values)]
    dtype = np.int8 if kind.task == kinds.BINARY else np.int32
    if isinstance(kind.classes, tuple):
        texts, _ = _texts(cells)
        listed = pa.array(kind.classes, pa.large_string())
        index = pc.fill_null(pc.index_in(texts, value_set=listed), -1)
        values = index.to_numpy(zero_copy_only=False)
        cells.fault(values < 0, "is missing, or none of the classes of this label")
        return [values.astype(dtype)]
    values, bad = _truth(cells) if kind.classes is None else _floats(cells)
    last = kind.num_classes - 1
    with np.errstate(invalid="ignore"):
        good = (values >= 0) & (values <= last) & (np.floor(values) == values) & ~bad
    reason = (
        f"is no integer from 0 to {last}; list all values in the schema, as "
        'classes = [1, 2, 3], or write task = "regression"'
    )
    cells.fault(~good, reason)
    return [np.where(good, values, 0).astype(dtype)]


def _splits(schema: Schema, cells: Cells) -> np.ndarray:
    """Returns the split of every row, int8, by the split column of the schema."""
    split = schema.split
    if split.by == HASH:
        texts, bad = _texts(cells)
        cells.fault(bad | cells.missing, "is missing, or no value to split by")
        salt = salt_of(f"split {split.salt}")
        unit = (hash_texts(texts, salt) >> np.uint64(11)).astype(np.float64) / 2.0**53
        bounds = np.cumsum(split.shares)[:2] / sum(split.shares)
        return np.searchsorted(bounds, unit, side="right").astype(np.int8)
    known = schema.columns.get(split.column)
    kind = known if isinstance(known, kinds.Date) else kinds.Date()
    times, bad = times_of(cells, kind)
    cells.fault(bad | cells.missing, "is missing, or no date to split by")
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
    if pa.types.is_null(found):  # a column without values can be of any kind
        return None
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
    while is_list(found):
        found = found.value_type
    if pa.types.is_null(found) or is_text(found):
        return None
    if not any(check(found) for check in _TAKEN[kind.kind]):
        return f'write kind = "{kind_of_type(found)}"'
    if isinstance(kind, kinds.Date):
        if pa.types.is_integer(found) and not kind.unit:
            return 'write unit = "s", "ms" or "us"'
        if kind.unit and not pa.types.is_integer(found):
            return "it is no integer: leave unit out"
    return None


_ANY_NUMBER = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_boolean,
)
_TAKEN: dict[str, tuple[Callable[[pa.DataType], bool], ...]] = {
    "numeric": _ANY_NUMBER,
    "boolean": _ANY_NUMBER,
    "category": (*_ANY_NUMBER, pa.types.is_date),
    "text": (),
    "date": (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer),
    "label": _ANY_NUMBER,
    "user": (pa.types.is_integer, pa.types.is_floating),
}
