"""The command line of the engines on this machine."""

from __future__ import annotations

import sys

import click

from accounting.validation import InputError
from deploy.engines import parts


@click.group()
def cli() -> None:
    """Real Flink and Spark on this machine, to test and to try the batch job on."""


@cli.command()
@click.option("--clusters", is_flag=True, help="Also the jars of clusters, 500 MB.")
def build(clusters: bool) -> None:
    """Fetch and build what engines are made of, unless it is there."""
    parts.build_job_servers()
    if clusters:
        parts.fetch_clusters()


def main() -> None:
    """Runs the command line; an error that the user can mend is one line."""
    try:
        sys.exit(cli(standalone_mode=False))
    except InputError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("error: Stopped.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
