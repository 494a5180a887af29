"""``dpsgd synth`` and ``dpsgd prepare``."""

from __future__ import annotations

import time
from typing import Any

import click

from accounting.cli import shared_options
from accounting.validation import InputError
from pipelines.cli.console import show
from pipelines.files.progress_bars import Bars


def _integers(name: str, text: str) -> tuple[int, ...]:
    """Returns the integers of a comma-separated list."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"Expected {name}={text!r} to be integers, separated by commas."
        ) from None


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
@shared_options.as_json
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
    from pipelines.tables.synthetic import SynthOptions, write_synth

    options = SynthOptions(num_rows=rows, num_files=files, seed=seed)
    began = time.perf_counter()
    with Bars(["write"]) as bars:
        paths = write_synth(
            out,
            options,
            on_progress=lambda done, total: bars.update("write", done, total),
        )
    summary = {
        "out": out,
        "rows": rows,
        "files": files,
        "seed": seed,
        "bytes_written": sum(path.stat().st_size for path in paths),
        "seconds": round(time.perf_counter() - began, 2),
    }
    show("Synthetic Criteo text", summary, as_json)


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
@shared_options.as_json
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
    from pipelines.tables import convert, criteo

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
    with Bars(["check", "write"]) as bars:
        summary = convert.prepare(
            source, out, prepared, num_threads=num_threads, on_progress=bars.update
        )
    seconds = time.perf_counter() - began
    show("Prepared data", _prepared(out, summary, seconds), as_json)


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
