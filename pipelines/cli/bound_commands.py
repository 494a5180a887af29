"""``dpsgd bound``."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import PASSES_ON, Grouped


@click.command(cls=Grouped, context_settings=PASSES_ON)
@click.option(
    "--input",
    "source",
    type=paths.TEXT_OR_URL,
    required=True,
    help="Parquet: file, folder or quoted glob.",
)
@shared_options.user_column(
    "Column of the users' ids (whole numbers or text), which OUT does not hold.",
    required=True,
)
@shared_options.max_examples_per_user(
    "Maximum number of rows kept per user, chosen at random.", required=True
)
@shared_options.num_examples(
    "Slots: a public upper bound on the rows kept or, with --sample users, on the "
    "users.  It replaces their true number in the sampling rate.",
    required=True,
)
@shared_options.sampled(
    "What an example is: a row, or a user.  A user is one record with all rows kept; "
    "its gradient is that of their mean loss.",
    "sampled",
    default="rows",
    show_default=True,
)
@click.option("--out", type=paths.TEXT, required=True, help="New or empty folder.")
@shared_options.key_file(
    "Secret key that chooses rows: a file of mode 0600, made if missing; not the one "
    "of the batches.  [default: a temporary key, removed when the job ends]"
)
@shared_options.memory_limit(
    "Memory for the threads of this process, 256 MiB for each.",
    default="2GiB",
    show_default=True,
)
@shared_options.threads
@shared_options.runner
@shared_options.as_json
@click.pass_context
def bound(
    ctx: click.Context,
    source: str,
    out: str,
    runner: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Keeps at most k rows of each user, as user-level privacy requires.

    A secret key chooses the rows of each user at random, whatever their order or file.
    OUT holds the kept rows in their order, without the column of ids.  Its metadata
    says that users are bounded, for batches, runs and privacy statements.  The numbers
    of users and of rows are not published.

    `dpsgd prepare --schema` bounds users itself, of CSV and TSV, too.  Of a bounded
    table it makes numbers, split by hash or time, and keeps the metadata.

    To resume a stopped job, run the same command again.

    \b
    Example:
      dpsgd bound --input data/train --user-column user --max-examples-per-user 5 \\
          --num-examples 1000000 --out bounded
      dpsgd batches --input bounded --out batches --batch-size 1024 --epochs 1
    """
    from pipelines.cli import bound_work

    bound_work.bound(source, out, runner, ctx.args, options, as_json=as_json)
