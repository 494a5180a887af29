"""``dpsgd synth``, ``schema`` and ``prepare`` as a person runs them."""

from __future__ import annotations

import json
import pathlib
import shutil

import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from tests.command_line import Result, invoke
from tests.criteo import write_schema
from tests.pipelines.conftest import write_text


def run_prepare(*arguments: object) -> Result:
    return invoke(["prepare", *arguments])


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What ``dpsgd synth --rows 1000`` writes, in three files."""
    out = tmp_path_factory.mktemp("commands") / "raw"
    write_text(out, 1000, 3)
    return out


def test_prepare_reads_what_synth_wrote(
    raw: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    made = write_schema(tmp_path / "schema.toml", 7)
    made.write_text(made.read_text().replace("[80, 10, 10]", "[1, 1, 0]"))
    result = run_prepare(
        "--input", raw, "--out", tmp_path / "data", "--schema", made, "--json",
        "--row-group-rows", 300, "--threads", 2,
    )  # fmt: skip
    summary = json.loads(result.stdout)
    assert summary["rows"] == {"train": 500, "val": 500, "test": 0}
    assert summary["input_files"] == 3
    assert summary["malformed_lines"] == 0
    files = sorted((tmp_path / "data" / "train").iterdir())
    assert [pq.read_metadata(file).num_rows for file in files] == [300, 200]
    description = json.loads(pq.read_metadata(files[0]).metadata[b"dpsgd.dataset"])
    assert [each["sizes"] for each in description["inputs"]] == [[], [7] * 26]


def test_skipped_lines_are_counted_and_named(
    raw: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"canary\n" + (raw / "part-00000.txt").read_bytes())
    criteo = ("--schema", "criteo")
    failed = run_prepare("--input", bad, "--out", tmp_path / "data", *criteo)
    assert isinstance(failed.exception, InputError)
    assert "1 of 334 are malformed" in str(failed.exception)
    result = run_prepare(
        "--input", bad, "--out", tmp_path / "data", "--on-bad-row=skip", "--json",
        *criteo,
    )  # fmt: skip
    summary = json.loads(result.stdout)
    assert summary["malformed_lines"] == 1
    assert summary["first_malformed_lines"] == [f"{bad}:1: another number of cells"]
    for outcome in (failed, result):
        assert "canary" not in outcome.output + str(outcome.exception)


def test_what_prepare_says_does_not_depend_on_what_rows_hold(
    tmp_path: pathlib.Path,
) -> None:
    """Seen to fail with the size of the compressed files."""
    table, made, said = tmp_path / "t.csv", tmp_path / "schema.toml", []
    made.write_text(
        'version = 1\n[columns.age]\nkind = "numeric"\n[columns.paid]\nkind = "label"\n'
        'task = "binary"\nclasses = ["0", "1"]\n'
    )
    for ages in (range(100, 500), [100] * 400):
        table.write_text(
            "age,paid\n" + "".join(f"{a},{n % 2}\n" for n, a in enumerate(ages))
        )
        result = run_prepare(
            "--input", table, "--schema", made, "--out", tmp_path / "data", "--json"
        )
        summary = json.loads(result.stdout)
        del summary["seconds"]
        said.append(summary)
        shutil.rmtree(tmp_path / "data")
    assert said[0] == said[1]


def test_a_schema_is_written_and_read(tmp_path: pathlib.Path) -> None:
    table, made = tmp_path / "t.csv", tmp_path / "schema.toml"
    table.write_text("age,job,income\n39,clerk,no\n40,,yes\n,x,no\n")
    arguments = [
        str(table), "--label", "income", "--classes", "no,yes", "--numeric", "age",
        "--out", str(made), "--json",
    ]  # fmt: skip
    told = json.loads(invoke(["schema", *arguments]).stdout)
    assert (told["columns"], told["to_be_chosen"]) == (3, 1)
    assert "no value" in told["looked_at"]
    refused = run_prepare("--input", table, "--schema", made, "--out", tmp_path / "no")
    assert "to be chosen: job" in str(refused.exception)
    made.write_text(made.read_text().replace("choose", "drop"))
    result = run_prepare(
        "--input", table, "--schema", made, "--out", tmp_path / "data", "--json"
    )
    summary = json.loads(result.stdout)
    assert sum(summary["rows"].values()) == 3
    assert "columns_left_out" not in summary
    again = invoke(["schema", *arguments])
    assert "to be a new file" in str(again.exception)
