"""``dpsgd batches`` and ``dpsgd verify``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from accounting.cli import delta_flags
from accounting.plan import (
    SAMPLERS,
    TRUNCATED_POISSON,
    DpSgdPlan,
    steps_and_epochs,
)
from accounting.validation import InputError, check_float
from pipelines.cli.console import Bars, show
from pipelines.files.stopping import stoppable

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

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


def _quiet_beam() -> None:
    """Lets errors alone reach the terminal, each of them once.

    Beam warns of every cloud whose client is not installed, and its workers reset the
    level of the root logger: so the handler filters.  The exception of a worker is
    logged with its traceback and then raised; the command line shows what is raised.
    Threads that served an engine end with an exception when it hangs up.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    handler = logging.getLogger().handlers[0]
    handler.setLevel(logging.ERROR)
    handler.addFilter(lambda record: not record.exc_info)
    handler.addFilter(lambda record: "Traceback (most" not in record.getMessage())
    threading.excepthook = lambda _: None


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


def _truncated_batch_size(
    value: str, *, num_examples: int, batch_size: int, num_steps: int,
    epsilon: float, delta: float | None,
) -> int:  # fmt: skip
    """The cap that the user gave, or the smallest that costs no epsilon to speak of."""
    if value != "auto":
        try:
            return int(value)
        except ValueError:
            raise InputError(
                f"Expected --truncated-batch-size={value} to be `auto` or an integer."
            ) from None
    from accounting.accountant import smallest_truncated_batch_size

    return smallest_truncated_batch_size(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        num_steps=num_steps,
        epsilon=epsilon,
        delta=0.1 / num_examples if delta is None else delta,
    )


def _make_plan(num_examples: int, options: dict[str, Any]) -> DpSgdPlan:
    batch_size = options["batch_size"]
    num_steps, num_epochs = steps_and_epochs(
        num_examples,
        batch_size,
        epochs=options["epochs"],
        num_steps=options["num_steps"],
    )
    check_float("epsilon", options["epsilon"], above=0)
    given = options["truncated_batch_size"]
    if given != "auto" and options["sampler"] != TRUNCATED_POISSON:
        raise InputError(
            f"Expected --truncated-batch-size={given} with --sampler "
            f"{TRUNCATED_POISSON} alone; sampler is {options['sampler']}. Leave it out."
        )
    truncated = None
    if options["sampler"] == TRUNCATED_POISSON:
        truncated = _truncated_batch_size(
            options["truncated_batch_size"],
            num_examples=num_examples,
            batch_size=batch_size,
            num_steps=num_steps,
            epsilon=options["epsilon"],
            delta=options["delta"],
        )
    return DpSgdPlan(
        sampler=options["sampler"],
        num_examples=num_examples,
        expected_batch_size=batch_size,
        num_steps=num_steps,
        num_epochs=num_epochs,
        truncated_batch_size=truncated,
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
    type=click.Choice(SAMPLERS),
)
@click.option("--batch-size", type=int, required=True, help="Expected rows per step.")
@click.option("--epochs", type=int, help="Steps are epochs x rows / batch size.")
@click.option("--num-steps", type=int, help="Steps, instead of --epochs.")
@click.option(
    "--truncated-batch-size",
    default="auto",
    show_default=True,
    help="Cap on the rows of a step; auto is the smallest that costs no epsilon.",
)
@click.option(
    "--epsilon",
    type=float,
    default=8.0,
    show_default=True,
    help="For auto: the largest epsilon that the batches are meant for.",
)
@delta_flags.options(text="For auto: the smallest delta.  [default: 0.1 / rows]")
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    _quiet_beam()
    from pipelines.files import storage
    from pipelines.inputs.parquet_blocks import list_blocks
    from pipelines.job import poisson_batching as job
    from pipelines.job import progress
    from pipelines.job.job_folder import check_out
    from pipelines.job.sizing import estimate, make_layout, worker_bytes
    from pipelines.sampling.shuffle import num_block_passes

    beam_options = _beam_options(ctx.args)
    storage.use_options(beam_options)
    dataset = list_blocks(source)
    plan = _make_plan(dataset.num_examples, options)
    delta_flags.warn(options["delta"], plan.num_examples)
    layout = make_layout(plan, dataset, options["physical_batch_size"])
    cost = estimate(layout)
    runner = job.runner_of(beam_options)
    place = job.spill_place(
        storage.absolute(out), options["scratch"], local=runner == job.LOCAL
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
    totals = {
        progress.BOUNDARIES: num_block_passes(plan, len(dataset.blocks)),
        progress.BLOCKS: len(dataset.blocks),
        progress.STEPS: plan.num_steps,
    }
    totals = {label: total for label, total in totals.items() if total}
    with (
        stoppable(_STOPPED),
        Bars(totals) as bars,
        progress.listen(bars.advance),
    ):
        for label, total in totals.items():
            bars.set_total(label, total)
        manifest = job.write_batches(
            dataset=dataset,
            layout=layout,
            out=out,
            key_file=options["key_file"],
            memory_limit=options["memory_limit"],
            shuffle=options["shuffle"],
            scratch=options["scratch"],
            options=beam_options,
        )
    show(
        f"Batches in {out}",
        {**summary, "manifest_fingerprint": manifest.fingerprint},
        options["as_json"],
    )


@click.command()
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
