"""Tables of any format as relations of DuckDB: CSV, TSV, JSON lines and Parquet.

A table is a file, a folder or a glob, here or in a store.  Files of text may be
compressed (.gz, .zst).  Their columns are read as text, since the schema alone decides
what cells are: no value decides the type of a column.  The columns of each file are
taken from its own header, footer or first record; a first line that may be a row and
not a header is not quoted.  Columns are named f0, f1, ... in SQL, by their place in the
file: DuckDB takes names that differ in case for one, and binds a schema by place.

Public: names, columns and types.  Sensitive: rows.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError, did_you_mean
from pipelines.files import storage
from pipelines.files.storage import StrPath, is_remote
from pipelines.files.stores import file_system
from pipelines.inputs.input_files import find_files, without_values
from pipelines.tables import cells
from pipelines.tables.schema import InputOptions, Schema

TEXT, JSON, PARQUET = "text", "JSON lines", "Parquet"
_PACKED = {".gz": "gzip", ".zst": "zstd"}
_FORMATS = {
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
}
#: Endings of what is no table of text.
_REFUSED = re.compile(
    r"\.(zip|bz2|xz|7z|tar|rar|xlsx?|ods|feather|arrow|orc|avro|sqlite|db|pkl|npz?|pdf)$"
)
#: JSON escapes it: no line of JSON holds it.
_NO_DELIMITER = "\x1f"
_ZONED = "TIMESTAMP WITH TIME ZONE"
#: Column that says whether a line is JSON.
_IS_JSON = "is_json"
_HEAD_BYTES = 1 << 20
_NO_HEADER = (
    "If that row is no header, give all names by `dpsgd schema --header`, or by "
    "header = [...] below [input] of the schema."
)
#: Objects of JSON whose keys are the columns.
_JSON_LINES = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFile:
    """A file of a table.

    Attributes:
      path: Path of the file.
      name: Path relative to the input.
      size: Bytes of the file.
      format: One of "text", "JSON lines" and "Parquet".
    """

    path: str
    name: str
    size: int
    format: str

    @property
    def shown(self) -> str:
        """Path for messages, without the values of partition columns."""
        return self.path.removesuffix(self.name) + without_values(self.name)

    @functools.cached_property
    def row_bytes(self) -> float:
        """About how many bytes of the file a row has: an estimate for the progress."""
        if self.format == PARQUET:
            return self.size / max(1, self.footer().num_rows)
        with storage.open_file(self.path) as raw, contextlib.suppress(EOFError):
            text = _unpacked(self, raw)
            head = text.read(_HEAD_BYTES)
            at = raw.tell() if text is not raw else len(head)
            return at / max(1, head.count(b"\n"))
        return 1.0

    def arrow_schema(self) -> pa.Schema:
        """Returns the schema of a Parquet file."""
        return self.footer().schema.to_arrow_schema()

    def footer(self) -> pq.FileMetaData:
        """Returns the footer of a Parquet file.  Sensitive: it may hold values."""
        with plain_errors(self), storage.open_file(self.path) as raw:
            return pq.read_metadata(raw)


def format_of(path: str) -> str:
    """Returns the format of a file, by its name; text for an unknown one.

    Raises:
      InputError: the file is an archive, a spreadsheet, or packed Parquet.
    """
    stem, ending = os.path.splitext(path.lower())
    if _REFUSED.search(path.lower()):
        raise InputError(
            f"Expected {path} to be CSV, TSV, JSON lines (also {', '.join(_PACKED)}) "
            "or Parquet. Save it as one of these (a spreadsheet as CSV), or unpack it."
        )
    if ending in _PACKED:
        ending = os.path.splitext(stem)[1]
    return _FORMATS.get(ending, TEXT)


def list_table(pattern: StrPath) -> list[TableFile]:
    """Returns the files of a table in natural order of their names (day_2, day_10).

    Args:
      pattern: A file, a folder or a glob.

    Raises:
      InputError: there is no file, all files are empty, or their formats differ.
    """
    pattern = os.fspath(pattern)
    found = sorted(find_files(pattern, suffix=""), key=lambda f: _natural(f[0]))
    files = [
        TableFile(path=path, name=name, size=size, format=format_of(path))
        for path, name in found
        if (size := storage.size(path))
    ]
    if not files:
        raise InputError(f"Expected rows in --input={pattern!r}; it is empty.")
    formats = {file.format: file.shown for file in files}
    if len(formats) > 1:
        raise InputError(
            f"Expected files of one kind; {' and '.join(formats.values())} differ. "
            "Give --input a glob that matches one kind, such as 'table/**/*.parquet'."
        )
    return files


def _natural(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


@contextlib.contextmanager
def plain_errors(file: TableFile) -> Iterator[None]:
    """Raises errors of readers without their text, which may quote a row."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError, EOFError, UnicodeError,
            csv.Error, ValueError, RuntimeError) as error:  # fmt: skip
        text, hint = str(error), "Is it all there, and what its name says?"
        if isinstance(error, InputError):
            raise
        if isinstance(error, UnicodeError) or "encoding" in text or "UTF-8" in text:
            hint = NOT_UTF8
        elif "invalid state" in text:
            hint = "Do all of its lines end in the same way?"
        elif isinstance(error, duckdb.OutOfMemoryException):
            hint = "Give more memory, or smaller files."
        raise InputError(
            f"Expected input file {file.shown} to be readable to its end: "
            f"{type(error).__name__}. {hint}"
        ) from None


NOT_UTF8 = (
    "It is not UTF-8. Write encoding below [input] of the schema, such as encoding = "
    '"latin-1", or write it as UTF-8.'
)


# --- Columns ------------------------------------------------------------------------


def columns_of(
    file: TableFile, options: InputOptions, label: str = ""
) -> dict[str, str]:
    """Returns name -> type of the columns of a file.

    Args:
      file: File of a table.
      options: How text is read.
      label: A column of a text without a header that may be left out.

    Raises:
      InputError: there is no header, a name occurs twice, or a row is in place of a
        header.
    """
    with plain_errors(file):
        if file.format == TEXT:
            return dict.fromkeys(_text_names(file, options, label)[0], "VARCHAR")
        if file.format == JSON:
            return dict.fromkeys(_json_names(file), "JSON")
        return _typed_columns(file)


def _typed_columns(file: TableFile) -> dict[str, str]:
    if is_remote(file.path):
        database = connect()
        database.register_filesystem(file_system(file.path))
    else:
        database = _of_process(os.getpid()).cursor()  # one for each thread
    schema, utc = file.arrow_schema(), _int96(file)
    found = database.sql(f"SELECT * FROM {_from_parquet(file)}")
    _refuse_twice(schema.names, file)
    types = {}
    for field, kind in zip(schema, map(str, found.types), strict=True):
        size = _sizes(field.type)  # DuckDB does not tell a fixed one
        full = kind.partition("[")[0] + size if size else kind
        if pa.types.is_duration(field.type):  # Parquet has a number without its unit
            full = "INTERVAL"
        types[field.name] = _ZONED if field.name in utc else full
    return types


def _int96(file: TableFile) -> frozenset[str]:
    """Returns the columns of Spark's times, which are of UTC, and do not say so."""
    schema = file.footer().schema
    columns = [schema.column(place) for place in range(len(schema))]
    return frozenset(each.path for each in columns if each.physical_type == "INT96")


def _sizes(kind: pa.DataType) -> str:
    """Returns the sizes of nested lists, such as [3][]; empty for other types."""
    if pa.types.is_fixed_size_list(kind):
        return f"{_sizes(kind.value_type)}[{kind.list_size}]"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"{_sizes(kind.value_type)}[]"
    return ""


@functools.lru_cache(maxsize=1)  # opening one takes longer than to read a footer
def _of_process(number: int) -> duckdb.DuckDBPyConnection:
    """Returns a database for types of columns; none survives a fork."""
    del number
    return connect()


def _refuse_twice(names: Sequence[str], file: TableFile) -> None:
    twice = [place for place, name in enumerate(names, 1) if names.count(name) > 1]
    if twice or not names:
        # They are not quoted: what is taken for a header may be a row.
        places = ", ".join(map(str, twice))
        found = f"some of columns {places} have one name" if names else "it is empty"
        raise InputError(
            f"Expected a header with different names in {file.shown}; {found}. "
            f"{_NO_HEADER}"
        )


def _head(file: TableFile, encoding: str = "utf-8-sig") -> io.TextIOWrapper:
    """Returns the text of a file; rows are read ahead, but not checked."""
    raw = _unpacked(file, storage.open_file(file.path))
    return io.TextIOWrapper(raw, encoding, errors="replace", newline="")


def _unpacked(file: TableFile, raw: Any) -> Any:
    """Returns the stream of a text that may be compressed."""
    packed = _PACKED.get(os.path.splitext(file.path.lower())[1])
    if not packed:
        return raw
    return pa.CompressedInputStream(pa.PythonFile(raw, "r"), packed)


def delimiter_of(file: TableFile, options: InputOptions) -> str:
    """Returns the delimiter of cells.

    Args:
      file: File of a table.
      options: How text is read.
    """
    return options.delimiter or ("\t" if ".tsv" in file.path.lower() else ",")


def _first_row(file: TableFile, options: InputOptions) -> list[str]:
    encoding = options.encoding.replace("utf-8", "utf-8-sig")
    quoting: Any = {} if options.quotes else {"quoting": csv.QUOTE_NONE}
    with _head(file, encoding) as text:
        rows = csv.reader(text, delimiter=delimiter_of(file, options), **quoting)
        return [cell.strip() for cell in next((row for row in rows if row), [])]


def _text_names(
    file: TableFile, options: InputOptions, label: str
) -> tuple[list[str], bool]:
    """Returns the names of the columns of a text, and whether its first row has them.

    If the schema has ``header``, a first row of some of its names, each once, is no
    example.
    """
    names, header = _first_row(file, options), options.header
    known = set(names) & set(header)
    is_header = len(set(names)) == len(names) and known in (set(names), set(header))
    if header and not is_header:
        is_unlabelled = len(names) == len(header) - 1
        return [n for n in header if not is_unlabelled or n != label], False
    _refuse_twice(names, file)
    if not options.header and _looks_like_a_row(names):
        raise InputError(
            f"Expected names of columns in the first row of {file.shown}; there is a "
            f"number among them. {_NO_HEADER}"
        )
    return names, True


def _looks_like_a_row(names: Sequence[str]) -> bool:
    """Whether a name is a number, and they do not count from 0.

    A row that is taken for a header would be published in the schema.
    """
    if len(names) == 1:  # of another delimiter
        names = re.split("[;|\t,]", names[0])
    named = [name for name in names if name]
    counted = named == [str(number) for number in range(len(named))]
    return not counted and any(map(_is_number, named))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json_names(file: TableFile) -> list[str]:
    """Returns the keys of the first objects: one without a value may lack its key."""
    names: dict[str, None] = {}
    with _head(file) as text:
        for line in itertools.islice(filter(str.strip, text), _JSON_LINES):
            found: Any = None
            with contextlib.suppress(ValueError):
                found = json.loads(line)
            if not isinstance(found, Mapping):
                break
            names.update(dict.fromkeys(found))
    if not names:
        raise InputError(
            f"Expected {file.shown} to hold one JSON object on each line; its first "
            "line is none."
        )
    return list(names)


def refuse_missing(
    needed: Sequence[str], names: Sequence[str], file: TableFile, options: InputOptions
) -> None:
    """Refuses a file that lacks columns, all in one line.

    Args:
      needed: Names of the needed columns.
      names: Names of the columns of the file.
      file: The file.
      options: How text is read.

    Raises:
      InputError: a column is missing.
    """
    missing = [name for name in needed if name not in names]
    if not missing:
        return
    told = f"it has {', '.join(names)}."
    may_be_cells = file.format == TEXT and not options.header
    if may_be_cells and len(missing) == len(needed):
        told = f"its first row has no such name. {_NO_HEADER}"
    hints = [did_you_mean(name, names) for name in missing]
    if len(names) == 1 and (other := set(names[0]) & set(";\t|")):
        hints.append(
            f" Give `dpsgd schema --delimiter {min(other)!r}`, or write delimiter = "
            f"{json.dumps(min(other))} below [input] of the schema."
        )
    raise InputError(
        f"Expected columns {', '.join(missing)} in {file.shown}; {told}{''.join(hints)}"
    )


# --- Relations ----------------------------------------------------------------------


def connect(
    *, num_threads: int = 1, memory_limit: int = 1 << 30, folder: str = ""
) -> duckdb.DuckDBPyConnection:
    """Returns a database in memory that reads nothing but what it is told.

    Args:
      num_threads: Number of its threads.
      memory_limit: Memory of the database, in bytes.
      folder: Private folder for what does not fit; empty for none.
    """
    database = duckdb.connect(
        config={
            "threads": num_threads,
            "memory_limit": f"{memory_limit}B",
            "temp_directory": folder,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
    )
    database.execute("SET TimeZone = 'UTC'")
    database.execute("SET enable_progress_bar = false")
    database.execute("SET arrow_large_buffer_size = true")  # as our hash takes them
    # An IN of several constants would become a join, which loses the order of rows.
    database.execute("SET disabled_optimizers = 'in_clause'")
    return database


def _path(file: TableFile) -> str:
    """Returns the path as a pattern that matches this file alone."""
    return cells.literal(re.sub(r"([*?\[])", r"[\1]", file.path))


def _from_parquet(file: TableFile) -> str:
    return f"read_parquet([{_path(file)}], hive_partitioning = false)"


def _from_text(file: TableFile, names: Sequence[str], **settings: str) -> str:
    columns = ", ".join(f"'{name}': 'VARCHAR'" for name in names)
    packed = _PACKED.get(os.path.splitext(file.path.lower())[1], "none")
    told = {
        "columns": f"{{{columns}}}",
        "header": "false",
        "auto_detect": "false",
        "comment": "''",
        "nullstr": "''",
        "allow_quoted_nulls": "false",
        "store_rejects": "true",
        "compression": f"'{packed}'",
        **settings,
    }
    text = ", ".join(f"{name} = {value}" for name, value in told.items())
    return f"read_csv([{_path(file)}], {text})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A file as a relation.

    Attributes:
      sql: What follows FROM.
      columns: Name of a column -> its name in SQL.
      types: Name of a column -> its type.
      faults: (condition, reason) of rows that are none.
      first_row: Number of the first row, for messages: a header is row 1.
    """

    sql: str
    columns: Mapping[str, str]
    types: Mapping[str, str]
    faults: Sequence[tuple[str, str]] = ()
    first_row: int = 1


def relation_of(
    file: TableFile, schema: Schema, database: duckdb.DuckDBPyConnection
) -> Relation:
    """Returns a file as a relation of all its columns.

    Args:
      file: File of a table.
      schema: Schema of the table.
      database: Database that reads it.

    Raises:
      InputError: as for ``columns_of``.
    """
    options = schema.input
    types = columns_of(file, options, schema.label_name)
    names = [f"f{place}" for place in range(len(types))]
    faults, first_row = [], 1
    if is_remote(file.path):
        database.register_filesystem(file_system(file.path))
    if file.format == TEXT:
        _, has_header = _text_names(file, options, schema.label_name)
        first_row += has_header
        quote = "'\"'" if options.quotes else "''"
        table = _from_text(
            file, names, delim=cells.literal(delimiter_of(file, options)),
            header=str(has_header).lower(), quote=quote, escape=quote,
            encoding=cells.literal(options.encoding),
        )  # fmt: skip
    elif file.format == JSON:
        types = {name: _json_type(schema, name) for name in types}
        table = _from_json(file, types)
        faults.append((f"NOT {_IS_JSON}", "is no JSON object"))
        names.append(_IS_JSON)
    else:
        table = _from_parquet(file)
    columns = dict(zip(types, names, strict=False))
    sql = f"{table} AS t({', '.join(names)})"
    if file.format == PARQUET and (utc := _int96(file)):
        zoned = [f"timezone('UTC', {columns[n]}) AS {columns[n]}" for n in utc]
        sql = f"(SELECT * REPLACE ({', '.join(zoned)}) FROM {sql})"
    return Relation(
        sql=sql, columns=columns, types=types, faults=faults, first_row=first_row
    )


def _json_type(schema: Schema, name: str) -> str:
    kind = schema.columns.get(name)
    is_list = kind is not None and kind.is_list and not getattr(kind, "separator", "")
    return "VARCHAR[]" if is_list else "VARCHAR"


def _from_json(file: TableFile, types: Mapping[str, str]) -> str:
    spec: Any = {n: [t[:-2]] if t.endswith("[]") else t for n, t in types.items()}
    table = _from_text(
        file, ["line"], delim=cells.literal(_NO_DELIMITER), quote="''", escape="''"
    )
    structure = cells.literal(json.dumps(spec, ensure_ascii=False))
    fields = ", ".join(f"j[{cells.literal(name)}]" for name in types)
    valid = "coalesce(json_valid(line) AND json_type(line) = 'OBJECT', false)"
    return (
        f"(SELECT {fields}, ok FROM (SELECT {valid} AS ok, CASE WHEN {valid} THEN "
        f"from_json(line, {structure}) END AS j FROM {table}))"
    )
