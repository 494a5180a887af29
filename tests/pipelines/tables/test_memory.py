"""Columns in memory: their types, what is refused, and the file that is written."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from accounting.core.validation import InputError
from pipelines.inputs.parquet_blocks import list_blocks, read_block
from pipelines.inputs.source_table import table_of
from pipelines.tables import prepared_files
from pipelines.tables.prepared_files import columns_of, digest, write_columns

pd = pytest.importorskip("pandas", reason="no pandas: pip install '.[dev]'")

#: A value that no message may quote.
SECRET = "314159"


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "age": random.normal(size=100),
        "children": random.integers(-5, 5, 100),
        "label": random.random(100) < 0.5,
    }


def equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return list(found) == list(wanted) and all(
        found[name].dtype == wanted[name].dtype
        and np.array_equal(found[name], wanted[name])
        for name in wanted
    )


@pytest.mark.parametrize(
    "kind",
    [
        lambda a: pd.DataFrame(a, index=np.arange(100)[::-1]),
        lambda a: pd.DataFrame(a).convert_dtypes(),  # pandas' types with masks
        lambda a: {name: pd.Series(values) for name, values in a.items()},
        pa.table,
        lambda a: pa.concat_tables([pa.table(a)[:7], pa.table(a)[7:]]),
        lambda a: {name: values.tolist() for name, values in a.items()},
        lambda a: {name: np.repeat(v, 2)[::2] for name, v in a.items()},  # with gaps
    ],
)
def test_every_kind_of_table_has_the_same_columns(kind: Callable[..., Any]) -> None:
    wanted = columns_of(arrays())
    found = columns_of(kind(arrays()))
    assert equal(found, wanted)
    assert digest(found) == digest(wanted)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("float64", "float32"), ("float32", "float32"), ("float16", "float16"),
        (">f4", "float32"), ("int64", "int32"), ("uint64", "int32"), ("int8", "int8"),
        ("uint8", "uint8"), ("bool", "uint8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (3,), (4, 2, 1)])
def test_a_type_follows_from_the_given_one_and_the_file_keeps_all(
    tmp_path: pathlib.Path, given: str, stored: str, shape: tuple[int, ...]
) -> None:
    values = (np.random.default_rng(1).random((9, *shape)) * 3).astype(given)
    columns = columns_of({"values": values, "label": np.arange(9)})
    assert columns["values"].dtype == stored
    path = tmp_path / "data.parquet"
    write_columns(path, columns)
    listed = list_blocks(str(path))
    (block,) = listed.blocks
    assert listed.columns == prepared_files.described(columns, str(path)).columns
    assert equal(read_block(block, listed.columns, listed.is_listed), columns)
    assert path.stat().st_mode & 0o777 == 0o600


def test_tables_of_equal_statistics_are_told_apart(tmp_path: pathlib.Path) -> None:
    """Else the batches of one would be taken for those of the other."""
    sources = []
    for name, values in (("one", [0, 1, 1, 2]), ("two", [0, 2, 1, 2])):
        (tmp_path / name).mkdir()
        write_columns(tmp_path / name / "data.parquet", columns_of({"label": values}))
        sources.append(set(table_of(list_blocks(str(tmp_path / name))).sources))
    assert not sources[0] & sources[1]
    renamed = columns_of({"a": [1], "b": [2]}), columns_of({"b": [1], "a": [2]})
    assert digest(renamed[0]) != digest(renamed[1])


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([SECRET, 1], object), r"column x .*object.*dpsgd fit"),
    "texts": (np.array([SECRET, "b"]), r"column x .*dpsgd fit"),
    "series": (pd.Series([SECRET, "b"]), r"column x .*dpsgd fit"),
    "arrow": (pa.array([SECRET, "b"]), r"column x .*string.*dpsgd fit"),
    "dates": (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), r"column x .*datetime"),
    "lists": (pa.array([[1.0], [2.0, 3.0]]), r"column x .*list"),
    "ragged": ([[1.0], [2.0, 3.0]], r"column x .*one shape"),
    "nothing a row": (np.zeros((2, 0)), r"column x .*\(2, 0\)"),
    "no axis": (np.float32(3), r"column x .*shape \(\)"),
    "complex": (np.zeros(2, complex), r"column x .*complex"),
    "category": (pd.Series([SECRET, "b"], dtype="category"), r"column x .*public list"),
    "dictionary": (pa.array([SECRET]).dictionary_encode(), r"column x .*public list"),
    "null": (pa.array([1, None]), r"column x .*null.*NaN"),
    "missing": (pd.Series([1, None], dtype="Int64"), r"column x .*null"),
    "masked": (np.ma.array([1.0, 2.0], mask=[False, True]), r"column x .*null"),
    "too large": (np.array([int(SECRET) << 20, 1]), r"column x .*int32.*2\*\*31"),
    "too small": (np.array([-int(SECRET) << 20, 1]), r"column x .*int32"),
    "no rows": (np.zeros(0), "there are none"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_a_column_of_numbers_is_refused_by_name(
    values: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        columns_of({"x": values})
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": np.zeros(3), "label": np.zeros(2)}, "one length.*'x': 3"),
        ({}, "there are none"),
        ({0: np.zeros(3)}, r"texts.*\[0\]"),
        (pd.DataFrame(np.zeros((2, 2)), columns=["a", "a"]), "different names"),
        (pa.table([[1], [2]], names=["a", "a"]), "different names"),
        ({"weight": np.zeros(3)}, "weight.*Rename"),
        (np.zeros((3, 2)), "DataFrame.*ndarray"),
        ((np.zeros(3), np.zeros(3)), "DataFrame.*tuple"),
    ],
)
def test_what_is_no_table_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        columns_of(data)
