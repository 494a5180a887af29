"""What ``dpsgd compare`` and ``dpsgd simulate`` do.

Public: everything.
"""

from __future__ import annotations

import json
import pathlib

import click

from pipelines.batches.manifest import pretty_json, read_json, write_atomically
from trainer.cli.commands import train_request
from trainer.experiments import compare as comparing
from trainer.experiments import simulate as simulating
from trainer.experiments.comparison import runs as compare_runs
from trainer.settings.comparison_settings import ComparisonSettings, SimulationSettings
from trainer.settings.train_settings import AUTO_LOSS, TrainSettings

#: Makes batches, with bars, in a process of its own: Beam stays out of this one.
_MAKE_BATCHES = "pipelines.cli.batch_commands:make_batches"


def compare(settings: ComparisonSettings, *, as_json: bool) -> None:
    """Compares, and prints the table.

    Args:
      settings: What is compared.
      as_json: Whether to print JSON alone.

    Raises:
      InputError: as ``trainer.experiments.compare.compare``.
    """
    report = comparing.compare(settings, _say, _MAKE_BATCHES)
    report.write(settings.out)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    report.show()
    click.echo(f"table and plot in {settings.out}/comparison.md")


def simulate(settings: SimulationSettings, *, as_json: bool) -> None:
    """Simulates, and prints the prediction.

    Args:
      settings: What is simulated.
      as_json: Whether to print JSON alone.

    Raises:
      InputError: as ``trainer.experiments.simulate.simulate``.
    """
    for folder in settings.out.glob("*/runs"):
        _take_over(folder.parent)
    report = simulating.simulate(settings, _say, _MAKE_BATCHES)
    fields = report.write(settings.out)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    report.show()
    click.echo(f"table and plot in {settings.out}/simulation.md")


def _say(line: str) -> None:
    click.echo(line, err=True)


def _take_over(out: pathlib.Path) -> None:
    """Says in settings what earlier releases said in flags of `dpsgd train`.

    Args:
      out: The folder with ``runs``.
    """
    for path in (out / "runs").glob("*.flags.json"):
        run = path.with_name(path.name.removesuffix(".flags.json"))
        new = compare_runs.settings_path(run)
        if not new.exists():
            request = train_request(read_json(path))
            asked = compare_runs.describe(request)
            if request.settings.loss == AUTO_LOSS:  # which meant that of 0 and 1
                asked["settings"]["loss"] = TrainSettings.loss
            write_atomically(new, pretty_json(asked))
