"""``dpsgd budget``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import REQUIRED, Grouped, Option
from accounting.core.validation import InputError
from trainer.cli import run_flags

if TYPE_CHECKING:
    from trainer.run.reservation import Budget

_OF_RESERVING = ("batches", "runs", "epsilon", "delta")


@click.command(name="budget", cls=Grouped)
@click.argument("file", type=paths.FILE)
@click.option(
    "--runs", type=int, metavar="N", cls=Option, group=REQUIRED,
    help="Reserve so many runs.",
)  # fmt: skip
@run_flags.batches(
    required=False,
    cls=Option,
    group=REQUIRED,
    help="Batches of one of the runs.  Those of the others have the same flags, and "
    "keys of their own.",
)
@shared_options.epsilon(
    "Of everything together, for one row.", cls=Option, group=REQUIRED
)
@shared_options.delta("Of everything together.  Must be given.")
@click.option(
    "--close",
    is_flag=True,
    help="Instead: leave no place for anything more in FILE, for good.",
)
@shared_options.as_json
def budget_command(file: Path, as_json: bool, close: bool, **flags: Any) -> None:
    """Reserve all that is released of a table under one epsilon.

    That is: several runs of the part that trains, metrics of each by `dpsgd evaluate`
    of another part, and statistics by `dpsgd statistics` of a third one.  A row is in
    one part, so that the last two cost nothing more.

    All runs have one plan and one noise, fixed before the first.  So whatever is seen
    of earlier runs may decide about later ones: model, learning rate, clip, or whether
    to make them at all.  Runs that are not made cost as much, also when the budget is
    closed: who closes it has seen results.

    \b
    Example, ten runs to choose the best of:
      dpsgd budget table.budget --batches batches-1 --runs 10 \\
          --epsilon 3 --delta 1e-7
      dpsgd train --batches batches-1 --out run-1 --budget table.budget
      dpsgd evaluate run-1 --batches batches-1 --input data/test \\
          --budget table.budget
      dpsgd account --budget table.budget
      dpsgd budget table.budget --close
    """
    from trainer.run import budget  # after --help: the accountant

    missing = [f"--{name}" for name in _OF_RESERVING if flags[name] is None]
    if close and len(missing) < len(_OF_RESERVING):
        raise InputError("Expected --close alone: FILE says the rest. Omit the others.")
    if missing and not close:
        raise InputError(
            f"Expected {', '.join(missing)} to reserve anything. Add what is "
            "missing, or --close to end a budget."
        )
    if close:
        found = budget.close(file)
    else:
        found = _reserved(file, flags)
        budget.create(file, found)
    click.echo(json.dumps(found.said(), indent=2) if as_json else found.to_text())


def _reserved(file: Path, flags: dict[str, Any]) -> Budget:
    from pipelines.batches.folder import read_checksums, read_manifest
    from pipelines.inputs.source_table import SourceTable
    from trainer.run.reservation import Budget

    manifest = read_manifest(flags["batches"])
    table = SourceTable.from_json(read_checksums(flags["batches"]).table)
    shared_options.warn(flags["delta"], manifest.plan.num_examples)
    return Budget.reserve(
        manifest,
        table,
        num_runs=flags["runs"],
        epsilon=flags["epsilon"],
        delta=flags["delta"],
    )
