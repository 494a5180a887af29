"""What ``dpsgd bias`` does.  What it prints is not private."""

from __future__ import annotations

import json

import click

from trainer.experiments.bias import measure_bias
from trainer.settings.bias_settings import BiasSettings


def bias(settings: BiasSettings, *, as_json: bool) -> None:
    """Measures, and prints the table.

    Args:
      settings: What is measured.
      as_json: Whether to print JSON alone.

    Raises:
      InputError: as ``trainer.experiments.bias.measure_bias``.
    """
    report = measure_bias(settings, lambda line: click.echo(line, err=True))
    fields = report.write(settings.out)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    report.show()
    click.echo(f"table and figure in {settings.out}/non_private_bias.md")
