"""``dpsgd bound``."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import shared_options
from pipelines.cli.byte_size import ByteSize


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option(
    "--input",
    "source",
    required=True,
    help="Parquet, CSV or TSV: file, folder or quoted glob.",
)
@click.option(
    "--user-column",
    required=True,
    help="Holds the users' ids: integers, text or bytes.  It is left out of OUT.",
)
@shared_options.max_examples_per_user(
    "Rows of a user that are kept at most, chosen at random.", required=True
)
@shared_options.num_examples(
    "Slots: a public number, at least the rows that are kept or, with --sample users, "
    "the users.  It enters the sampling rate in place of their number.",
    required=True,
)
@click.option(
    "--sample",
    "sampled",
    type=click.Choice(["rows", "users"]),
    default="rows",
    show_default=True,
    help="What an example is: a row; or a user, in one record with all rows that are "
    "kept, whose gradient is that of their mean loss.",
)
@click.option("--out", required=True, help="New or empty folder.")
@click.option(
    "--key-file",
    help="Chooses rows: a file of mode 0600, made if missing; not that of batches.  "
    "[default: a key of this job alone, which is removed when it ends]",
)
@click.option(
    "--memory-limit",
    type=ByteSize(),
    default="2GiB",
    show_default=True,
    help="Of this process, or of a worker.",
)
@click.option("--threads", type=int, help="Of this process.  [default: all cores]")
@click.option(
    "--runner",
    help="Engine of Apache Beam, which takes all other options; it writes the same "
    "bytes.  Its workers must see input, output and key under the same paths.  "
    "[default: this process]",
)
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
    """Keeps at most k rows of each user, so that a guarantee can be one for users.

    Which rows of a user are kept is drawn by a secret key, not by their order or where
    they are.  OUT holds the other columns of the rows that are kept, in their order,
    and says in its metadata that users are bounded: batches, runs and privacy
    statements know it.  Nothing says how many users or rows there are.

    Columns of CSV and TSV become text; `dpsgd prepare --schema` then makes numbers of
    them, split by hash or time, and keeps the note.  It also bounds users itself.

    The same command goes on where a stopped one was.

    \b
    Example:
      dpsgd bound --input data/train --user-column user --max-examples-per-user 5 \\
          --num-examples 1000000 --out bounded
      dpsgd batches --input bounded --out batches --batch-size 1024 --epochs 1
    """
    from pipelines.cli import bound_work

    bound_work.bound(source, out, runner, ctx.args, options, as_json=as_json)
