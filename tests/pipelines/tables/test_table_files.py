"""Tables of every format that people write, through ``prepare`` with a schema."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import pathlib
import re
import zipfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.files import storage
from pipelines.job.runtime import Runtime
from pipelines.tables import reading
from pipelines.tables.first_schema import first_schema
from pipelines.tables.prepare import PrepareSummary, TableOptions, prepare
from pipelines.tables.reading import RawInputs
from pipelines.tables.schema import Schema

CANARY = "5ec4e7ca"
COLUMNS: dict[str, dict[str, Any]] = {
    "id": {"kind": "numeric"},
    "job": {"kind": "category", "buckets": 50},
    "price": {"kind": "numeric", "range": [0, 10]},
    "day": {"kind": "date", "parts": ["month", "day"]},
    "ok": {"kind": "boolean"},
    "note": {"kind": "text", "tokens": 3},
    "y": {"kind": "label", "task": "binary"},
}
Row = dict[str, Any]


def make_rows(count: int) -> list[Row]:
    """Rows whose ``id`` is their number, with missing values and awkward texts."""
    start = datetime.date(2020, 1, 1)
    notes = ["plain", 'said "so", and left', "ünder the sea", None]
    return [
        {
            "id": number,
            "job": [None, "clerk", "farmer"][number % 3],
            "price": decimal.Decimal(number % 40) / 4 if number % 7 else None,
            "day": start + datetime.timedelta(days=number) if number % 5 else None,
            "ok": [True, False, None][number % 3],
            "note": notes[number % 4],
            "y": number % 2,
        }
        for number in range(count)
    ]


def write_text(path: pathlib.Path, rows: list[Row], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def schema_of(
    columns: dict[str, dict[str, Any]] | None = None, **others: Any
) -> Schema:
    others = {"split": {"by": "fraction"}, **others}
    return Schema.from_json({"version": 1, "columns": columns or COLUMNS, **others})


def rows_of(out: pathlib.Path) -> dict[str, str]:
    """The rows of each part, as text: NaN is itself."""
    parts = ("train", "val", "test")
    return {part: str(pq.read_table(out / part).to_pydict()) for part in parts}


def run(source: pathlib.Path, out: pathlib.Path, **options: Any) -> PrepareSummary:
    options.setdefault("schema", schema_of())
    return prepare(str(source), out, TableOptions(**options))


@pytest.fixture
def table(tmp_path: pathlib.Path) -> pathlib.Path:
    """``t.parquet``: 200 rows in row groups of 64."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(make_rows(200)), path, row_group_size=64)
    return path


@pytest.fixture
def wanted(table: pathlib.Path, tmp_path: pathlib.Path) -> dict[str, str]:
    """The rows that come of these rows."""
    run(table, tmp_path / "wanted")
    return rows_of(tmp_path / "wanted")


def test_every_format_gives_the_same_rows(
    wanted: dict[str, str], tmp_path: pathlib.Path
) -> None:
    rows = make_rows(200)
    folder = tmp_path / "formats"
    folder.mkdir()
    write_text(folder / "a.csv", rows)
    write_text(folder / "a.tsv", rows, "\t")
    text = (folder / "a.csv").read_bytes()
    (folder / "unix.csv").write_bytes(text.replace(b"\r\n", b"\n"))
    (folder / "a.csv.gz").write_bytes(
        gzip.compress(text[:900]) + gzip.compress(text[900:])
    )
    write_text(folder / "a.data", rows)
    lines = [json.dumps({k: str(v) if k in ("price", "day") and v is not None else v
                         for k, v in row.items()}) for row in rows]  # fmt: skip
    lines = [re.sub(r'"note": null, ', "", line) for line in lines]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "a.ndjson.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    # What spreadsheets write.
    (folder / "mark.csv").write_bytes(b"\xef\xbb\xbf" + text)
    with pa.CompressedOutputStream(str(folder / "a.csv.zst"), "zstd") as file:
        file.write(text)
    # What pandas and polars make of types.
    whole = pa.Table.from_pylist(rows)
    kinds = {"job": pa.dictionary(pa.int8(), pa.string()), "note": pa.large_string()}
    kinds |= {"day": pa.timestamp("ns", "UTC"), "id": pa.float64()}
    other = whole.cast(
        pa.schema([(f.name, kinds.get(f.name, f.type)) for f in whole.schema])
    ).append_column("__index_level_0__", pa.array(range(200)))
    pq.write_table(other, folder / "other.parquet")
    for path in sorted(folder.iterdir()):
        out = tmp_path / "out" / path.name
        summary = run(path, out)
        assert summary.num_rows == {"train": 160, "val": 20, "test": 20}
        assert rows_of(out) == wanted, path.name
        index = path.name == "other.parquet"
        assert summary.left_out == (("__index_level_0__",) if index else ())


def test_files_blocks_threads_and_row_groups_do_not_matter(
    wanted: dict[str, str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_ROWS", 7)
    monkeypatch.setattr("pipelines.tables.prepare._TASK_BYTES", 1)
    rows = make_rows(200)
    for kind in ("csv", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / f"empty.{kind}").touch()
        for name, part in (("1", rows[:50]), ("2", rows[50:51]), ("10", rows[51:])):
            path = folder / f"part-{name}.{kind}"
            if kind == "csv":
                write_text(path, part)
            else:
                schema = pa.Table.from_pylist(rows).schema
                pq.write_table(pa.Table.from_pylist(part, schema), path)
        out = tmp_path / f"{kind}-out"
        runtime = Runtime(num_threads=3)
        prepare(str(folder), out, TableOptions(schema=schema_of()), runtime=runtime)
        assert rows_of(out) == wanted


def test_rows_of_another_number_of_cells_are_malformed_wherever_they_stand(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{number},0" for number in range(40)]
    for place in (0, 1, 17, 18, 39):
        lines[place] = f"{place},0,{CANARY}"
    lines[5] = f"{CANARY},1"
    source = tmp_path / "t.csv"
    source.write_text("id,y\n" + "\n".join(lines))
    columns = {name: COLUMNS[name] for name in ("id", "y")}
    schema = schema_of(columns, split={"shares": [1, 0, 0]})
    for size in (3, 10_000):
        monkeypatch.setattr(reading, "_MOST_ROWS", size)
        with pytest.raises(InputError, match="6 of 40 are malformed") as caught:
            run(source, tmp_path / "no", schema=schema)
        message = str(caught.value)
        assert CANARY not in message
        assert f"{source}:2: another number of cells (5 rows)" in message
        assert f"{source}:7: id is not a number" in message
        out = tmp_path / f"out-{size}"
        summary = run(source, out, schema=schema, on_bad_row="skip")
        assert summary.num_bad_lines == 6
        kept = pq.read_table(out / "train")["id"].to_pylist()
        assert kept == [n for n in range(40) if n not in (0, 1, 5, 17, 18, 39)]


def test_rows_to_be_predicted_become_the_same_inputs_without_labels(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_ROWS", 30)
    split = {"by": "hash", "column": "who"}
    prepared = schema_of(split={"shares": [1, 0, 0]})
    run(table, tmp_path / "out", schema=prepared)
    wanted = pq.read_table(tmp_path / "out" / "train").drop_columns("label").to_pydict()
    rows = [{k: v for k, v in row.items() if k != "y"} for row in make_rows(200)]
    write_text(tmp_path / "new.csv", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "new.parquet")
    for name in ("new.csv", "new.parquet"):
        new = RawInputs(str(tmp_path / name), schema_of(split=split), ["note"])
        parts = list(new.parts(50))
        assert all(50 <= len(carried) < 80 for _, carried, _ in parts[:-1])
        found = {n: np.concatenate([p[0][n] for p in parts]) for n in parts[0][0]}
        assert repr({k: v.tolist() for k, v in found.items()}) == repr(wanted)
        notes = pa.concat_tables([carried for _, carried, _ in parts])["note"]
        assert [n or None for n in notes.to_pylist()] == [r["note"] for r in rows]
        assert parts[-1][2] == new.num_bytes


def test_a_header_that_is_named_in_the_schema_is_no_example(
    tmp_path: pathlib.Path,
) -> None:
    """Seen: it was read as a row of texts, for training and for predictions."""
    columns = {
        "job": {"kind": "category", "vocabulary": ["a", "b"]},
        "note": {"kind": "text", "tokens": 3},
        "y": {"kind": "label", "task": "binary", "classes": ["y", "n"]},
    }
    header = {"header": list(columns)}
    schema = schema_of(columns, input=header, split={"shares": [1, 0, 0]})
    lines = ["a,u v,n", "b,w,y", "a,,n"]
    (tmp_path / "plain.csv").write_text("\n".join(lines))
    (tmp_path / "named.csv").write_text("\n".join(["job, note, y", *lines]))
    for name in ("plain", "named"):
        run(tmp_path / f"{name}.csv", tmp_path / name, schema=schema)
    assert rows_of(tmp_path / "plain") == rows_of(tmp_path / "named")

    def predicted(text: str) -> list[int]:
        (tmp_path / "new.csv").write_text(text)
        new = RawInputs(str(tmp_path / "new.csv"), schema).parts(9)
        return [job for inputs, _, _ in new for job in inputs["job"].tolist()]

    assert predicted("\n".join(lines)) == [2, 3, 2]
    assert predicted("\n".join(["job,note,y", *lines])) == [2, 3, 2]
    assert predicted("note,job\nu,a\nw,b\n") == [2, 3]  # without labels
    assert predicted("a,u\nb,w\n") == [2, 3]  # in the order of the header
    with pytest.raises(InputError, match="another number of cells"):
        predicted("a\nb\n")
    with pytest.raises(InputError, match=r"new.csv:3: another number of cells"):
        predicted("job,note\na,u\nb\n")


@pytest.mark.parametrize("name", ["t.xlsx", "t.csv.zip"])
def test_a_file_of_another_kind_is_refused_wherever_a_table_is_read(
    name: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t.csv", f"id,y\n{CANARY},1\n")
    assert "unpack it" in refused(path, tmp_path / "out")
    for read in (first_schema, lambda text: RawInputs(text, schema_of())):
        with pytest.raises(InputError, match="unpack it") as caught:
            read(str(path))
        assert "\n" not in str(caught.value)


def test_rows_to_be_predicted_are_refused_without_their_content(
    tmp_path: pathlib.Path,
) -> None:
    write_text(tmp_path / "0.csv", make_rows(200))
    text = (tmp_path / "0.csv").read_text()
    (tmp_path / "1.csv").write_text(text + f"{CANARY},a,1,2020-01-01,1,x,0\n")
    with pytest.raises(InputError, match=r"1.csv:202: id is not a number") as caught:
        list(RawInputs(str(tmp_path / "*.csv"), schema_of()).parts(1))
    assert CANARY not in str(caught.value)
    (tmp_path / "0.csv").write_text(text.splitlines()[0] + "\n")
    with pytest.raises(InputError, match=r"rows in .*0.csv; it has none"):
        list(RawInputs(str(tmp_path / "0.csv"), schema_of()).parts(1))


def test_columns_of_rows_to_be_predicted_are_judged_before_any_row(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    more = schema_of({**COLUMNS, "more": COLUMNS["id"]})
    with pytest.raises(InputError, match="columns more in "):
        RawInputs(str(table), more)
    with pytest.raises(InputError, match=r"column nota.*carried.*Did you mean note\?"):
        RawInputs(str(table), schema_of(), ["nota"])
    other = pq.read_table(table).append_column("who", pa.array(["a"] * 200))
    pq.write_table(other, tmp_path / "u.parquet")
    pq.write_table(other.set_column(7, "who", [range(200)]), tmp_path / "v.parquet")
    with pytest.raises(InputError, match=r"who, .* not VARCHAR and BIGINT"):
        RawInputs(str(tmp_path / "[uv].parquet"), schema_of(), ["who"])


def refused(source: pathlib.Path, out: pathlib.Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(source, out, **options)
    assert not out.exists()
    assert "\n" not in str(caught.value)
    assert CANARY not in str(caught.value)
    return str(caught.value)


def test_columns_that_are_missing_or_of_other_types_are_told_in_one_line(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    more = {"more": COLUMNS["id"], "prise": COLUMNS["price"]}
    message = refused(table, tmp_path / "out", schema=schema_of({**COLUMNS, **more}))
    assert "columns more, prise in " in message
    assert "Did you mean price?" in message
    wrong = {**COLUMNS, "day": COLUMNS["id"], "id": {"kind": "text"}}
    message = refused(table, tmp_path / "out", schema=schema_of(wrong))
    assert re.search(r'day of type DATE \(.* write kind = "date"\)', message)
    assert re.search(r'id of type BIGINT \(.* write kind = "numeric"\)', message)


def test_files_that_are_no_table_are_refused(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.csv").write_text("id\n")
    (tmp_path / "two" / "b.parquet").write_bytes(table.read_bytes())
    assert "glob that matches one kind" in refused(tmp_path / "two", out)
    twice = tmp_path / "twice.csv"
    twice.write_text("id,id,y\n1,1,1\n")
    assert "different names in " in refused(twice, out)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(table.read_bytes()[:-9] + CANARY.encode())
    assert "readable to its end" in refused(broken, out)
    text = tmp_path / "t.csv"
    write_text(text, make_rows(200))
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(text.read_bytes())[:-20])
    assert "readable to its end" in refused(cut, out)
    whole = text.read_bytes().replace(b"\r\n", b"\n")
    for cells in (b",,,,,1\n", b"\n"):  # also in a row of another number of cells
        text.write_bytes(whole + b"1,\xff" + CANARY.encode() + cells)
        assert "It is not UTF-8" in refused(text, out)


@pytest.mark.parametrize(
    "text",
    [
        f'id,y\n1,0\n"{CANARY},1\n2,0\n',  # an open quotation
        f'id,y\n1,0\n"{CANARY}" pipe,1\n2,0\n',
        f"id,y\r\n1,0\n{CANARY},1\r\n2,0\r\n",  # mixed ends of lines
    ],
)
def test_no_word_of_duckdbs_is_repeated(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "t.csv").write_text(text, newline="")
    columns = {name: COLUMNS[name] for name in ("id", "y")}
    message = refused(tmp_path / "t.csv", tmp_path / "out", schema=schema_of(columns))
    assert "t.csv" in message


def test_cells_may_hold_quotation_marks_and_ends_of_lines(
    tmp_path: pathlib.Path,
) -> None:
    text = 'note,y\n"one\r\ntwo ""three""",0\n5" pipe,1\n#four,1\n"",0\n'
    (tmp_path / "t.csv").write_text(text, newline="")
    columns = {"note": {"kind": "text", "tokens": 4}, "y": COLUMNS["y"]}
    run(tmp_path / "t.csv", tmp_path / "out", schema=schema_of(columns))
    found = pq.read_table(tmp_path / "out" / "train")["note"].to_pylist()
    assert [[bool(word) for word in row] for row in found[:3]] == [
        [True, True, True, False], [True, True, False, False], [True, *[False] * 3],
    ]  # fmt: skip


def test_rows_keep_their_order_on_several_threads(tmp_path: pathlib.Path) -> None:
    """An IN of several constants was a join, which loses the order of rows."""
    words = ["nan", "True", "5.0", "a" * 90, "x"]
    lines = [f"{number},{words[number % 5]},0\n" for number in range(60_000)]
    (tmp_path / "t.csv").write_text("".join(["id,job,y\n", *lines]))
    columns = {name: COLUMNS[name] for name in ("id", "job", "y")}
    schema = schema_of(columns, split={"by": "fraction", "shares": [1, 0, 0]})
    options = TableOptions(schema=schema)
    runtime = Runtime(num_threads=3)
    prepare(str(tmp_path / "t.csv"), tmp_path / "out", options, runtime=runtime)
    found = pq.read_table(tmp_path / "out" / "train")
    assert found["id"].to_pylist() == list(range(60_000))
    jobs = found["job"].to_numpy()
    assert all((jobs[place::5] == jobs[place]).all() for place in range(5))


def test_numbers_with_a_decimal_comma_and_other_encodings(
    tmp_path: pathlib.Path,
) -> None:
    text = "preis;land;y\n1.234,5;Österreich;0\n-7;x;1\n1,2,3;x;1\n1.23,4;x;0\n"
    (tmp_path / "t.csv").write_text(text, encoding="latin-1")
    columns = {
        "preis": {"kind": "numeric"},
        "land": {"kind": "category", "vocabulary": ["Österreich"]},
        "y": COLUMNS["y"],
    }
    how = {"delimiter": ";", "decimal_comma": True, "encoding": "latin-1"}
    split = {"by": "fraction", "shares": [1, 0, 0]}
    schema = schema_of(columns, input=how, split=split)
    made = {"schema": schema, "on_bad_row": "skip"}
    summary = run(tmp_path / "t.csv", tmp_path / "out", **made)
    assert summary.num_bad_lines == 2
    found = pq.read_table(tmp_path / "out" / "train").to_pydict()
    assert found == {"preis": [1234.5, -7.0], "land": [2, 1], "label": [0, 1]}


def test_a_random_split_is_of_places_and_even(tmp_path: pathlib.Path) -> None:
    lines = [f"{number},{int(number >= 5000)}" for number in range(10_000)]
    (tmp_path / "t.csv").write_text("\n".join(["id,y", *lines]))
    columns = {name: COLUMNS[name] for name in ("id", "y")}
    splits = []
    for salt in ("", "other"):
        out = tmp_path / f"out{len(splits)}"
        split = {"by": "random", "shares": [60, 20, 20], "salt": salt}
        run(tmp_path / "t.csv", out, schema=schema_of(columns, split=split))
        splits.append(rows_of(out))
        for part, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
            found = pq.read_table(out / part)
            # Five standard deviations of a binomial of 10,000, and of its halves.
            assert abs(len(found) - 10_000 * share) < 5 * 50
            ones = sum(found["label"].to_pylist())
            assert abs(ones - 5_000 * share) < 5 * 36
    assert splits[0] != splits[1]


def test_no_row_for_train_is_refused_with_what_to_mend(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    split = {"by": "time", "column": "day"}
    split |= {"val_from": "2000-01-01", "test_from": "2000-01-01"}
    message = refused(
        table, tmp_path / "out", schema=schema_of(split=split), on_bad_row="skip"
    )
    assert "Fix [split] of the schema" in message


def test_times_of_spark_are_read_as_those_of_other_programs(
    tmp_path: pathlib.Path,
) -> None:
    """INT96 holds a time of UTC, of any year, which nanoseconds since 1970 do not."""
    years = (1600, 2020, 9000)
    moments = [datetime.datetime(year, 7, 1, 23, 30, 0, 123456) for year in years]
    split = {"by": "time", "column": "at"}
    split |= {"val_from": "2020-07-01", "test_from": "2250-01-01"}
    date = {"kind": "date", "zone": "Asia/Tokyo", "parts": ["year", "day", "hour"]}
    date |= {"range": ["1500-01-01", "9999-12-31"]}
    schema = schema_of({"at": date, "y": COLUMNS["y"]}, split=split)
    times = pa.array(moments, pa.timestamp("us", "UTC"))
    table = pa.table({"at": times, "y": [0, 1, 0]})
    found = []
    for name, is_int96 in (("spark", True), ("other", False)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path, use_deprecated_int96_timestamps=is_int96)
        types = {column.physical_type for column in pq.ParquetFile(path).schema}
        assert ("INT96" in types) == is_int96
        run(path, tmp_path / name, schema=schema)
        found.append(rows_of(tmp_path / name))
    assert found[0] == found[1]


@pytest.mark.parametrize("ending", ["csv.gz", "parquet"])
def test_a_table_in_a_store_becomes_the_same_rows(
    ending: str, wanted: dict[str, str], s3_folder: str, tmp_path: pathlib.Path
) -> None:
    rows, path = make_rows(200), tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_text(path, rows)
        path.write_bytes(gzip.compress(path.read_bytes()))
    storage.copy_to_store(path, f"{s3_folder}/table/part/{path.name}")
    prepare(f"{s3_folder}/table", tmp_path / "out", TableOptions(schema=schema_of()))
    assert rows_of(tmp_path / "out") == wanted
