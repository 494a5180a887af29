"""``dpsgd batches`` and ``dpsgd verify``."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from accounting.cli import registered, shared_options
from accounting.plan import TRUNCATED_POISSON
from accounting.validation import InputError
from pipelines.cli.console import show
from pipelines.files.progress_bars import Bars
from pipelines.files.stopping import stoppable
from pipelines.job.batch_settings import BatchSettings

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

    from pipelines.batches.manifest import Manifest
    from pipelines.inputs.parquet_blocks import Dataset
    from pipelines.job.packing import Layout
    from pipelines.job.sizing import Estimate

#: Output of a worker's bundle that Beam's Java modules can queue, with some to spare.
MOST_BUNDLE_BYTES = 850 << 20
_JAVA_RUNNERS = ("FlinkRunner", "SparkRunner", "PortableRunner")

#: Files that a dry run lists for people.
_LISTED = 20

_STOPPED = (
    "Stopped by a signal. Give the same command again: it goes on where it stopped."
)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType):
    """A number of bytes such as 2GiB, 512MiB or 1000000."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Returns the number of bytes, or fails with the forms that are read."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(value).lower())
        if not match:
            self.fail(f"{value!r} is not a size such as 2GiB.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


def _beam_options(arguments: list[str]) -> PipelineOptions:
    """Beam's options from what is left of the command line; refuses unknown ones."""
    from apache_beam.options.pipeline_options import (
        PipelineOptions,
        _BeamArgumentParser,
    )

    class Parser(_BeamArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise InputError(f"Expected options of Beam: {message}.")

    parser = Parser(add_help=False, allow_abbrev=False)
    for options in PipelineOptions.__subclasses__():
        with contextlib.suppress(argparse.ArgumentError):
            options._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise InputError(
            f"Expected {unknown[0]} to be an option of dpsgd batches or of Beam. "
            "See `dpsgd batches --help`."
        )
    return PipelineOptions(arguments)


def _settings(options: dict[str, Any]) -> BatchSettings:
    names = (
        "sampler", "num_steps", "truncated_batch_size", "epsilon", "delta",
        "physical_batch_size",
    )  # fmt: skip
    return BatchSettings(
        expected_batch_size=options["batch_size"],
        num_epochs=options["epochs"],
        **{name: options[name] for name in names},
    )


def _engine_note(runner: str, options: PipelineOptions, shuffle_bytes: int) -> str:
    """What to know before Flink or Spark shuffle rows, which may never end; else empty.

    A worker samples its blocks as one bundle.  Beam's Java modules (seen with 2.62; see
    apache/beam#38570) queue up to 100 messages of 10 MiB of a bundle's output, in
    memory, and read them when the bundle is done: with more, both sides wait for ever.
    """
    if runner not in _JAVA_RUNNERS:
        return ""
    needed = -(-shuffle_bytes // MOST_BUNDLE_BYTES)
    # Spark has no such option, and does not tell how many workers it has.
    told = runner != "SparkRunner" and options.get_all_options().get("parallelism")
    if (told or 1) >= needed:
        return ""
    return (
        f"note: the engine's workers hand over {shuffle_bytes / 2**30:.1f} GiB. With "
        "Java modules of Beam 2.62 a worker that hands over 1 GB waits for ever: have "
        f"{needed} workers or more (on Flink also --parallelism), or --shuffle files "
        "with a --scratch that every worker mounts."
    )


def _summary(layout: Layout, cost: Estimate, worker_bytes: int) -> dict[str, Any]:
    plan = layout.plan
    return {
        "sampler": plan.sampler,
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "truncated_batch_size": plan.truncated_batch_size,
        "physical_batch_size": layout.physical_batch_size,
        "files": layout.num_groups,
        "expected_padding": round(cost.padding, 4),
        "shuffle_bytes": cost.shuffle_bytes,
        "output_bytes": cost.output_bytes,
        "bytes_per_worker": worker_bytes,
    }


def _listing(dataset: Dataset, as_json: bool) -> dict[str, Any]:
    """Returns what was found at ``--input``, for people no more than they read."""
    if as_json:
        return {"input_files": dataset.files, "hidden_files": list(dataset.hidden)}
    lines = [f"{name}: {rows:,} rows" for name, rows in dataset.files.items()]
    found = {"input_files": _first(lines), "hidden_files": _first(dataset.hidden)}
    return {name: listed for name, listed in found.items() if listed}


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _LISTED
    told = [f"and {more:,} more; --json lists them"] if more > 0 else []
    return [*lines[:_LISTED], *told]


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option(
    "--input",
    "source",
    required=True,
    help="Parquet: a folder, of which every visible file at any depth is read, a file "
    "or a quoted glob; also s3:// and such.  --dry-run lists what is found.",
)
@click.option("--out", required=True, help="New folder, or that of the same job.")
@click.option(
    "--sampler",
    default=TRUNCATED_POISSON,
    show_default=True,
    type=registered.SAMPLER,
)
@shared_options.batch_size("Expected rows per step.", required=True)
@shared_options.epochs("Steps are epochs x rows / batch size.")
@shared_options.num_steps("Steps, instead of --epochs.")
@shared_options.truncated_batch_size(
    "Cap on the rows of a step; auto is the smallest that costs no epsilon."
)
@shared_options.epsilon(
    "For auto: the largest epsilon that the batches are meant for.",
    default=BatchSettings.epsilon,
    show_default=True,
)
@shared_options.delta("For auto: the smallest delta.  [default: 0.1 / rows]")
@click.option("--physical-batch-size", type=int, help="Rows of one record.")
@click.option(
    "--key-file",
    help="Sampling key of this data set alone: a file of mode 0600, made if missing; a "
    "file in a store; or secretmanager://projects/P/secrets/S/versions/V.  "
    "[default: OUT/private/sampling.key, where OUT is on this machine]",
)
@click.option(
    "--memory-limit",
    type=ByteSize(),
    default="4GiB",
    show_default=True,
    help="Of this process: on the local runner, whose shuffle goes through files, and "
    "while the order of shuffled batches is searched.",
)
@click.option(
    "--shuffle",
    type=click.Choice(["auto", "files", "engine"]),
    default="auto",
    show_default=True,
    help="Rows wait between map and reduce in files, which every worker reaches, or in "
    "the engine.  auto: in the engine on Dataflow or if they would be in a store.",
)
@click.option(
    "--scratch",
    help="Folder for the files of the shuffle.  [default: in OUT or, without --runner "
    "and with OUT in a store, among temporary files]",
)
@click.option("--dry-run", is_flag=True, help="Print what was found and would be done.")
@shared_options.as_json
@click.pass_context
def batches(ctx: click.Context, source: str, out: str, **options: Any) -> None:
    """Samples and writes the batches of a whole training run, with Apache Beam.

    Every example flips its own coin for every step; a truncated step keeps a random
    subset.  The result is a folder of TFRecords, each record a batch of fixed size in
    which a weight of 0 marks padding, and a manifest that the trainer and the
    accountant read.  A killed job is finished by the same command.

    Every other option goes to Beam, such as --runner=FlinkRunner; without --runner the
    job runs in this process.

    \b
    Example:
      dpsgd batches --input data/train --out batches --batch-size 1024 --epochs 1
    """
    from pipelines.job.make_batches import quiet_beam

    quiet_beam()
    from pipelines.files import paths, storage
    from pipelines.inputs.parquet_blocks import list_blocks
    from pipelines.job import poisson_batching as job
    from pipelines.job.job_folder import check_out
    from pipelines.job.sizing import estimate, make_layout, worker_bytes

    settings = _settings(options)
    beam_options = _beam_options(ctx.args)
    storage.use_options(beam_options)
    dataset = list_blocks(source)
    plan = settings.plan(dataset.num_examples)
    shared_options.warn(settings.delta, plan.num_examples)
    layout = make_layout(plan, dataset, settings.physical_batch_size)
    cost = estimate(layout)
    runner = job.runner_of(beam_options)
    place = job.spill_place(
        paths.absolute(out), options["scratch"], local=runner == job.LOCAL
    )
    shuffle = job.choose_shuffle(options["shuffle"], runner, place)
    by_value = shuffle == job.ENGINE
    needed = worker_bytes(layout, dataset, by_value=by_value)
    summary = {**_summary(layout, cost, needed), "shuffle": shuffle}
    if by_value and (note := _engine_note(runner, beam_options, cost.shuffle_bytes)):
        click.echo(note, err=True)
    if options["dry_run"]:
        found = _listing(dataset, options["as_json"])
        show("Would write", {**found, **summary}, options["as_json"])
        return
    check_out(out)
    names = ("key_file", "memory_limit", "shuffle", "scratch")
    beside = {name: options[name] for name in names}
    manifest = _write(dataset, layout, out, **beside, options=beam_options)
    show(
        f"Batches in {out}",
        {**summary, "manifest_fingerprint": manifest.fingerprint},
        options["as_json"],
    )


def make_batches(source: str, out: str, settings: BatchSettings) -> None:
    """Does what ``dpsgd batches`` does on the local runner, and shows its progress.

    Args:
      source: Parquet: a folder, a file or a glob.
      out: An empty or new folder, or that of the same job, unfinished.
      settings: How to sample.

    Raises:
      InputError: before any work, for anything that the user can mend.
    """
    from pipelines.job.make_batches import open_input, quiet_beam

    quiet_beam()
    _write(*open_input(source, out, settings), out)


def _write(dataset: Dataset, layout: Layout, out: str, **others: Any) -> Manifest:
    """Writes batches, with a bar for each kind of progress."""
    from pipelines.job import poisson_batching, progress
    from pipelines.sampling.shuffle import num_block_passes

    totals = {
        progress.BOUNDARIES: num_block_passes(layout.plan, len(dataset.blocks)),
        progress.BLOCKS: len(dataset.blocks),
        progress.STEPS: layout.plan.num_steps,
    }
    totals = {label: total for label, total in totals.items() if total}
    with (
        stoppable(_STOPPED),
        Bars(totals) as bars,
        progress.listen(bars.advance),
    ):
        for label, total in totals.items():
            bars.set_total(label, total)
        return poisson_batching.write_batches(
            dataset=dataset, layout=layout, out=out, **others
        )


@click.command()
@click.argument("directory")
@shared_options.as_json
def verify(directory: str, as_json: bool) -> None:
    """Holds every byte of a folder of batches against manifest and checksums.

    \b
    Example:
      dpsgd verify batches
    """
    from pipelines.batches import verify as checks
    from pipelines.batches.manifest import read_manifest

    total = len(read_manifest(directory).files)
    with Bars(["files"]) as bars:
        result = checks.verify(
            directory, progress=lambda done: bars.update("files", done, total)
        )
    if as_json:
        fields = {**vars(result), "findings": list(result.findings)}
        click.echo(json.dumps(fields, indent=2))
    else:
        for finding in result.findings:
            click.echo(f"found: {finding}")
    if result.findings:
        raise InputError(
            f"Expected {directory} to be intact; findings: {len(result.findings)}. "
            "Make the batches again, or restore the files."
        )
    if not as_json:
        click.echo(f"intact: {result.num_files} files, {result.num_steps} steps")
