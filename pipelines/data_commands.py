"""``dpsgd synth`` and ``dpsgd prepare``."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from accounting.validation import InputError


def _integers(name: str, text: str) -> tuple[int, ...]:
    """Returns the integers of a comma-separated list."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"Expected {name}={text!r} to be integers, separated by commas."
        ) from None


@contextlib.contextmanager
def _bars(labels: Sequence[str]) -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars on standard error; yields update(label, done, total)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(file=sys.stderr))
    tasks = {label: bars.add_task(label, total=None, start=False) for label in labels}

    def update(label: str, done: int, total: int) -> None:
        task = tasks[label]
        if bars.tasks[task].start_time is None:
            bars.start()  # not before there is something to show
            bars.start_task(task)
        bars.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bars.live.is_started:  # otherwise it would print an empty line
            bars.stop()


def _show(title: str, fields: dict[str, Any], as_json: bool) -> None:
    """Prints JSON, or a table with a line for each field."""
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in fields.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:,}" for key, number in value.items())
        elif isinstance(value, list):
            value = "\n".join(map(str, value))
        elif isinstance(value, (int, float)):
            value = f"{value:,}"
        table.add_row(name.replace("_", " "), value)
    Console().print(table)


@click.command()
@click.option("--rows", type=int, required=True, help="Rows of all files together.")
@click.option("--out", required=True, help="New or empty folder.")
@click.option("--files", type=int, default=1, show_default=True, help="Files.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Which rows.  It may have a default, since there is nobody to protect.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def synth(rows: int, out: str, files: int, seed: int, as_json: bool) -> None:
    """Writes text in the format of the Criteo data set, with something to learn in it.

    Every row is made up: a label, 13 integers and 26 strings of hexadecimal digits,
    with skewed frequencies and missing values.  All seeds follow one law, so that a
    model trained on one can be tested on another; a good one has an AUC near 0.82.

    \b
    Example:
      dpsgd synth --rows 100000 --out raw
      dpsgd prepare --input raw --format criteo-tsv --out data
    """
    from pipelines.synth import SynthOptions, write_synth

    options = SynthOptions(num_rows=rows, num_files=files, seed=seed)
    began = time.perf_counter()
    with _bars(["write"]) as update:
        paths = write_synth(
            out, options, on_progress=lambda done, total: update("write", done, total)
        )
    summary = {
        "out": out,
        "rows": rows,
        "files": files,
        "seed": seed,
        "bytes_written": sum(path.stat().st_size for path in paths),
        "seconds": round(time.perf_counter() - began, 2),
    }
    _show("Synthetic Criteo text", summary, as_json)


@click.command()
@click.option(
    "--input", "source", required=True, help="File, folder or quoted glob; text or .gz."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["criteo-tsv"]),
    default="criteo-tsv",
    show_default=True,
    help="Label, 13 integers and 26 strings; tab-separated, without a header.",
)
@click.option("--out", required=True, help="New or empty folder.")
@click.option(
    "--buckets",
    default="1024",
    show_default=True,
    help="Values of each category after hashing, 0 for missing among them: one number, "
    "or 26 separated by commas.",
)
@click.option(
    "--vocabulary",
    help='JSON file such as {"C1": ["68fd1e64"], ...}: strings that get a value of '
    "their own; other columns are hashed.  It must be public.",
)
@click.option(
    "--split",
    default="80,10,10",
    show_default=True,
    help="Shares of train, val and test, first to last.",
)
@click.option(
    "--on-bad-row",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What a malformed line does.",
)
@click.option(
    "--row-group-rows",
    type=int,
    default=131_072,
    show_default=True,
    help="Rows of a row group, the block that the batch job samples at once.",
)
@click.option("--threads", type=int, help="Threads that parse.  [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prepare(source: str, kind: str, out: str, as_json: bool, **options: Any) -> None:
    """Turns raw text into numeric Parquet, split by time.

    Writes OUT/train, OUT/val and OUT/test, cut from the rows in their order; several
    files are read in the order of their names, with numbers by value.  Columns: label,
    13 integers (NaN where missing) and 26 categories (0 where missing).  Every line is
    checked before anything is written.

    Categories are hashed, each column in its own way, so that a value depends on no
    other row.  A vocabulary counted from the training data would itself tell about
    every row, and no epsilon of DP-SGD covers that: --vocabulary takes one that is
    public, and none is counted here.

    \b
    Example:
      dpsgd prepare --input 'criteo/day_*.gz' --format criteo-tsv --out data
    """
    from pipelines import criteo, preparing

    del kind  # there is one
    options = {name: value for name, value in options.items() if value is not None}
    num_threads = options.pop("threads", None)
    buckets = _integers("--buckets", options.pop("buckets"))
    if "vocabulary" in options:
        options["vocabulary"] = criteo.read_vocabulary(options["vocabulary"])
    prepared = criteo.PrepareOptions(
        num_buckets=buckets * criteo.NUM_CATEGORIES if len(buckets) == 1 else buckets,
        split=_integers("--split", options.pop("split")),
        **options,
    )
    began = time.perf_counter()
    with _bars(["check", "write"]) as update:
        summary = preparing.prepare(
            source, out, prepared, num_threads=num_threads, on_progress=update
        )
    seconds = time.perf_counter() - began
    _show("Prepared data", _prepared(out, summary, seconds), as_json)


def _prepared(out: str, summary: Any, seconds: float) -> dict[str, Any]:
    fields = {
        "out": out,
        "rows": summary.num_rows,
        "input_files": summary.num_files,
        "malformed_lines": summary.num_bad_lines,
        "bytes_read": summary.bytes_read,
        "bytes_written": summary.bytes_written,
        "seconds": round(seconds, 2),
        "rows_per_second": round(sum(summary.num_rows.values()) / seconds),
    }
    if summary.num_bad_lines:
        fields["first_malformed_lines"] = list(summary.bad_lines)
    return fields
