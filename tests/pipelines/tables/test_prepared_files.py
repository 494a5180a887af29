"""``verify_prepared``: every fault of prepared data is found by the file's name."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.tables.prepare import TableOptions, prepare
from pipelines.tables.prepared_files import RECORD_NAME, verify_prepared
from pipelines.tables.schema import Schema
from tests.command_line import invoke

FILE = "train/part-00001.parquet"
SCHEMA = {
    "version": 1,
    "columns": {
        "x": {"kind": "numeric"},
        "y": {"kind": "label", "task": "binary"},
    },
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """100 rows in files of 20."""
    root = tmp_path_factory.mktemp("prepared")
    rows = pa.table({"x": range(100), "y": [row % 2 for row in range(100)]})
    pq.write_table(rows, root / "t.parquet")
    options = TableOptions(
        schema=Schema.from_json(SCHEMA), row_group_rows=10, row_groups_per_file=2
    )
    prepare(str(root / "t.parquet"), root / "data", options)
    return root / "data"


@pytest.fixture
def data(intact: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy, to be damaged."""
    return pathlib.Path(shutil.copytree(intact, tmp_path / "data"))


def test_intact_data_has_no_findings_and_is_counted(intact: pathlib.Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify_prepared(intact, progress=lambda *now: told.append(now))
    assert (found.num_files, found.num_rows, found.findings) == (6, 100, ())
    assert told == [(done, 6) for done in range(1, 7)]


def test_every_changed_byte_is_found_by_the_name_of_its_file(
    data: pathlib.Path,
) -> None:
    whole = (data / FILE).read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        (data / FILE).write_bytes(changed)
        (finding,) = verify_prepared(data).findings
        assert finding == f"Expected {FILE} to be byte for byte as it was written."


def test_missing_and_further_files_are_found(data: pathlib.Path) -> None:
    (data / FILE).rename(data / "train" / "part-00009.parquet")
    (data / "val" / ".hidden").touch()
    assert verify_prepared(data).findings == (
        "Expected no file train/part-00009.parquet: prepare did not write it.",
        "Expected no file val/.hidden: prepare did not write it.",
        f"Expected {FILE} to be readable: No such file or directory.",
    )


def _edit(data: pathlib.Path, change: Callable[[Any], None], *, sign: bool) -> None:
    fields = json.loads((data / RECORD_NAME).read_text())
    change(fields)
    if sign:
        others = ("format", "version", "fingerprint")
        kept = {name: each for name, each in fields.items() if name not in others}
        fields["fingerprint"] = fingerprint(kept)
    (data / RECORD_NAME).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        (lambda f: f["settings"].update(on_bad_row="skip"), False),
        (lambda f: f["files"].update({"../../secret": f["files"][FILE]}), True),
        (lambda f: f["files"].update({FILE: 7}), True),
    ],
)
def test_an_edited_record_is_refused(
    change: Callable[[Any], None], sign: bool, data: pathlib.Path
) -> None:
    _edit(data, change, sign=sign)
    with pytest.raises(InputError, match=rf"{RECORD_NAME} to be as it was written"):
        verify_prepared(data)


def test_the_command_takes_prepared_data_as_it_takes_batches(
    data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)

    def verify(folder: str) -> Any:
        return invoke(["verify", folder])

    assert verify(".").stdout == "intact: 6 files, 100 rows\n"
    with pytest.raises(InputError, match=r"not a part of it\. Give `dpsgd verify \.`"):
        raise verify("train").exception  # type: ignore[misc]
    (data / FILE).write_bytes(b"")
    result = verify(".")
    assert result.stdout.startswith(f"found: Expected {FILE} to be byte for byte")
    assert "findings: 1" in str(result.exception)
