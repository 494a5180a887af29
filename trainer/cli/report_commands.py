"""``dpsgd report``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import Grouped


@click.command(cls=Grouped)
@click.argument("run", type=paths.PATH)
@click.option(
    "--out",
    type=paths.PATH,
    default="report.html",
    show_default=True,
    help="The HTML file to write.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--title",
    help="Title of the page.  [default: the name of the run's folder]",
)
@click.option(
    "--together",
    default="",
    metavar="CLAIM",
    help="Claim of all that was released with the run, such as that of `dpsgd fit`.",
)
@click.option(
    "--audit",
    type=paths.FILE,
    help="Include an audit of the run: the output of `dpsgd audit RUN --json`.",
)
@shared_options.delta("By default the one the run was trained for.")
@shared_options.as_json
def report(
    run: pathlib.Path,
    out: pathlib.Path,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write one HTML page about a run, to show to others.

    The page has the privacy statement in plain words and in full, what is not covered,
    plan, batches, model, held-out metrics, and how to verify all of it.  It is made
    from the public files of RUN and needs no network, so you can mail or publish it.

    With --json the same facts go to standard output, and no page is written.

    \b
    Examples, with a title, and with an audit:
      dpsgd report run --title "Who clicks? Model of May 2026"
      dpsgd audit run --json > audit.json
      dpsgd report run --audit audit.json --out audited.html
    """
    if as_json:
        from trainer.html_report.facts import collect

        click.echo(json.dumps(collect(run, **options), indent=2))
        return
    from trainer.html_report.page import write_report

    write_report(run, out, overwrite=force, **options)
    click.echo(f"report: {out}")
