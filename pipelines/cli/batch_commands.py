"""``dpsgd batches`` and ``dpsgd verify``."""

from __future__ import annotations

import json
from typing import Any

import click

from accounting.cli import paths, registered, shared_options
from accounting.cli.grouped import PASSES_ON, Grouped
from accounting.core.plan import AUTO_BANDS, TRUNCATED_POISSON
from accounting.core.validation import InputError
from pipelines.files.progress_bars import Bars
from pipelines.files.stopping import stoppable
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.quiet_beam import quiet_beam

#: Options that ``poisson_batching.write_batches`` takes.
_OF_THE_JOB = ("key_file", "memory_limit", "shuffle", "scratch")


def _settings(options: dict[str, Any]) -> BatchSettings:
    names = (
        "sampler", "num_steps", "truncated_batch_size", "delta", "physical_batch_size",
    )  # fmt: skip
    bands, epsilon = options["bands"], options["epsilon"]
    if bands == AUTO_BANDS and epsilon is None:
        raise InputError(
            "Expected --epsilon beside --bands auto: which number of bands is best "
            "depends on the epsilon that you will train with. Give it, or --bands 1."
        )
    return BatchSettings(
        expected_batch_size=options["batch_size"],
        num_epochs=options["epochs"],
        bands=None if bands == AUTO_BANDS else bands,
        epsilon=BatchSettings.epsilon if epsilon is None else epsilon,
        **{name: options[name] for name in names},
    )


@click.command(cls=Grouped, context_settings=PASSES_ON)
@click.option(
    "--input",
    "source",
    type=paths.TEXT_OR_URL,
    required=True,
    help="Parquet: a folder (all visible files in it, at any depth), a file, or a "
    "quoted glob; also in a store, such as s3://.  --dry-run lists the files.",
)
@click.option(
    "--out",
    type=paths.TEXT_OR_URL,
    required=True,
    help="New folder, or that of a stopped job.",
)
@registered.sampler(
    "How examples are assigned to steps.", default=TRUNCATED_POISSON, show_default=True
)
@shared_options.batch_size("Expected rows per step.", required=True)
@shared_options.epochs("Number of steps: epochs x rows / batch size.")
@shared_options.num_steps("Number of steps, instead of --epochs.")
@shared_options.truncated_batch_size(
    "Cap on the rows of a step; auto: the smallest cap that does not raise epsilon."
)
@shared_options.bands_or_auto(
    "Groups of the rows, whose steps take turns, for noise of so many bands; 1: "
    "independent noise.  auto: by the rule, for --epsilon."
)
@shared_options.epsilon(
    "For auto: the largest epsilon you will train with.  "
    f"[default for the cap: {BatchSettings.epsilon:g}]"
)
@shared_options.delta("For auto: the smallest delta.  [default: 0.1 / rows]")
@click.option("--physical-batch-size", type=int, help="Rows per record of a file.")
@shared_options.key_file(
    "Secret sampling key, used for this data set alone: a file of mode 0600, made if "
    "missing; a file in a store; or secretmanager://projects/P/secrets/S/versions/V."
    "  [default: OUT/private/sampling.key, if OUT is on this machine]",
    type=paths.TEXT_OR_URL,
)
@shared_options.memory_limit(
    "Memory of this process, on the local runner and while it computes shuffles.",
    default="4GiB",
    show_default=True,
)
@click.option(
    "--shuffle",
    type=click.Choice(["auto", "files", "engine"]),
    default="auto",
    show_default=True,
    help="Where rows wait between map and reduce: in files, which every worker must "
    "reach, or in the engine.  auto: in files, except on Dataflow.",
)
@click.option(
    "--scratch",
    type=paths.TEXT_OR_URL,
    help="Folder for the files of --shuffle.  [default: in OUT; a temporary folder "
    "without --runner if OUT is in a store]",
)
@click.option(
    "--dry-run", is_flag=True, help="Print input, layout and cost; write nothing."
)
@shared_options.as_json
@click.pass_context
def batches(ctx: click.Context, source: str, out: str, **options: Any) -> None:
    """Samples and writes the batches of a whole training run, with Apache Beam.

    A Poisson sampler includes every example in every step independently, with
    probability batch size / rows; a truncated step keeps a random subset.  The output
    is a folder of TFRecords and a manifest for trainer and accountant.  Each record is
    a batch of fixed size, in which weight 0 marks padding.  To resume a stopped job,
    run the same command again.

    All other options, such as --runner=FlinkRunner, go to Beam.  Without --runner the
    job runs in this process.

    \b
    Example:
      dpsgd batches --input data/train --out batches --batch-size 1024 --epochs 1
    """
    quiet_beam()
    from pipelines.cli import batch_job

    batch_job.run(
        source, out, _settings(options), ctx.args,
        best_bands=options["bands"] == AUTO_BANDS,
        dry_run=options["dry_run"],
        as_json=options["as_json"],
        **{name: options[name] for name in _OF_THE_JOB},
    )  # fmt: skip


@click.command(cls=Grouped)
@click.argument("directory", type=paths.TEXT_OR_URL)
@click.option(
    "--resample",
    is_flag=True,
    help="Also make every record again, by a short reference sampler without Beam, and "
    "compare.  Writes DIRECTORY/certificate.json if all are equal.",
)
@click.option(
    "--input",
    "source",
    type=paths.TEXT_OR_URL,
    help="For --resample: --input of `dpsgd batches`.",
)
@shared_options.key_file(
    "For --resample: the key of the batches.  [default: that in DIRECTORY/private]",
    type=paths.TEXT_OR_URL,
)
@shared_options.memory_limit(
    "For --resample.  [default: 1.4GiB, or 4GiB for large row groups; at most half of "
    "this machine's]"
)
@shared_options.as_json
def verify(
    directory: str,
    resample: bool,
    source: str | None,
    key_file: str | None,
    memory_limit: int | None,
    as_json: bool,
) -> None:
    """Checks every byte of batches or of prepared data against checksums.

    DIRECTORY is a folder that `dpsgd batches` or `dpsgd prepare` wrote.  Checksums say
    that files are as they were written; --resample says that they are what plan, key
    and input determine, whatever wrote them.  Statements of runs then rely on the batch
    job no more.

    \b
    Examples:
      dpsgd verify batches
      dpsgd verify data
      dpsgd verify --resample batches --input data/train
    """
    from pipelines.cli import verification

    asked = {"input": source, "key-file": key_file, "memory-limit": memory_limit}
    with stoppable(), Bars(["files", "steps"]) as bars:
        check = verification.certify if resample else verification.verify
        result = check(directory, asked, bars)
    if as_json:
        fields = {**vars(result), "findings": list(result.findings)}
        click.echo(json.dumps(fields, indent=2))
    else:
        for finding in result.findings:
            click.echo(f"found: {finding}")
    if result.findings:
        raise InputError(
            f"Expected {directory} to be intact; findings: {len(result.findings)}. "
            "Make it again, or restore the files."
        )
    if not as_json:
        click.echo(f"intact: {verification.counted(result)}")
