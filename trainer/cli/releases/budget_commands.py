"""``dpsgd budget``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from accounting.cli import shared_options
from accounting.cli.grouped import Grouped
from accounting.core.validation import InputError
from pipelines.cli.console import wrapped
from trainer.cli import run_flags


@click.command(name="budget", cls=Grouped)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--runs", type=int, metavar="N", help="Reserve so many runs; omit it to show FILE."
)
@run_flags.batches(
    required=False,
    help="With --runs: batches of one of the runs.  Those of the others have the same "
    "flags, and keys of their own.",
)
@shared_options.epsilon("With --runs: of all runs together.")
@shared_options.delta("With --runs: of all runs together.")
@shared_options.as_json
def budget_command(file: Path, as_json: bool, **flags: Any) -> None:
    """Reserve several runs under one epsilon, or show what is left.

    All runs have one plan and one noise, fixed before the first.  So whatever is seen
    of earlier runs may decide about later ones: model, learning rate, clip, or whether
    to make them at all.  Runs that are not made cost as much.

    \b
    Example, ten runs to choose the best of:
      dpsgd budget table.budget --batches batches-1 --runs 10 \\
          --epsilon 3 --delta 1e-7
      dpsgd train --batches batches-1 --eval data/test --out run-1 \\
          --budget table.budget
      dpsgd budget table.budget
    """
    from trainer.run import budget  # after --help: the accountant

    if flags["runs"] is None:
        _check_none(flags)
        found = budget.read(file)
    else:
        found = _reserved(flags)
        budget.create(file, found)
    if as_json:
        click.echo(json.dumps(found.said(), indent=2))
    else:
        click.echo(wrapped(found.to_text()))


def _check_none(flags: dict[str, Any]) -> None:
    for name in ("batches", "epsilon", "delta"):
        if flags[name] is not None:
            raise InputError(
                f"Expected --runs beside --{name}, to reserve a budget. Add --runs, or "
                f"omit --{name}."
            )


def _reserved(flags: dict[str, Any]) -> Any:
    from pipelines.batches.folder import read_checksums, read_manifest
    from pipelines.inputs.source_table import SourceTable
    from trainer.run import budget

    for name in ("batches", "epsilon", "delta"):
        if flags[name] is None:
            raise InputError(f"Expected --{name} beside --runs. Give both.")
    manifest = read_manifest(flags["batches"])
    shared_options.warn(flags["delta"], manifest.plan.num_examples)
    return budget.Budget.reserve(
        manifest,
        SourceTable.from_json(read_checksums(flags["batches"]).table),
        num_runs=flags["runs"],
        epsilon=flags["epsilon"],
        delta=flags["delta"],
    )
