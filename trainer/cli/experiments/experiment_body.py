"""The work of ``dpsgd compare``, ``simulate``, ``bias``, ``variance`` and ``shift``.

Public: what is printed, except by ``bias``.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from pipelines.files.folders import usable_folder
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.locks import LOCK_NAME, locked
from pipelines.files.output_folder import make_parents, remove_empty
from pipelines.files.storage import write_atomically
from trainer.cli.commands import train_request
from trainer.experiments import compare as comparing
from trainer.experiments import shift as shifting
from trainer.experiments import shift_report, variance_report
from trainer.experiments import simulate as simulating
from trainer.experiments import variance as varying
from trainer.experiments.bias import measure_bias
from trainer.experiments.comparison import runs as compare_runs
from trainer.settings.bias_settings import BiasSettings
from trainer.settings.comparison_settings import ComparisonSettings, SimulationSettings
from trainer.settings.iterate_settings import ShiftSettings, VarianceSettings
from trainer.settings.train_settings import AUTO_LOSS, TrainSettings

#: Makes batches, with progress bars, in a separate process: this one needs no Beam.
_MAKE_BATCHES = "pipelines.cli.batch_commands:make_batches"


def compare(settings: ComparisonSettings, *, as_json: bool) -> None:
    """Compares, and prints the table.  Errors are those of the experiment.

    Args:
      settings: Settings of the experiment.
      as_json: Whether to print only JSON.
    """
    with _alone(settings.out):
        report = comparing.compare(settings, _say, _MAKE_BATCHES)
        report.write(settings.out)
    _print(report.to_json(), report.show, settings.out / "comparison.md", as_json)


def simulate(settings: SimulationSettings, *, as_json: bool) -> None:
    """Simulates, and prints the prediction; see `compare`."""
    with _alone(settings.out):
        for folder in settings.out.glob("*/runs"):
            _take_over(folder.parent)
        report = simulating.simulate(settings, _say, _MAKE_BATCHES)
        fields = report.write(settings.out)
    _print(fields, report.show, settings.out / "simulation.md", as_json)


def bias(settings: BiasSettings, *, as_json: bool) -> None:
    """Measures the bias of clipping, and prints the table; see `compare`.

    Not private.
    """
    with _alone(settings.out):
        report = measure_bias(settings, _say)
        fields = report.write(settings.out)
    _print(fields, report.show, settings.out / "non_private_bias.md", as_json)


def variance(settings: VarianceSettings, *, as_json: bool) -> None:
    """Compares the spread of iterates and runs, and prints the table; see `compare`."""
    with _alone(settings.out):
        found = varying.variance(settings, _say, _MAKE_BATCHES)
        fields = variance_report.write(found)
    _print(
        fields,
        lambda: variance_report.show(found),
        settings.out / "variance.md",
        as_json,
    )


def shift(settings: ShiftSettings, *, as_json: bool) -> None:
    """Trains on a stream that shifts, and prints the averages; see `compare`."""
    with _alone(settings.out):
        found = shifting.shift(settings, _say, _MAKE_BATCHES)
        fields = shift_report.write(found)
    _print(fields, lambda: shift_report.show(found), settings.out / "shift.md", as_json)


@contextlib.contextmanager
def _alone(out: pathlib.Path) -> Iterator[None]:
    """Keeps other processes out of the folder of an experiment.

    A folder that was made for the lock alone is removed again.
    """
    made = list[pathlib.Path]()
    with contextlib.ExitStack() as held:
        held.callback(remove_empty, made)
        with usable_folder(out, "--out"):
            make_parents(out / LOCK_NAME, made)
            held.enter_context(locked(out, out))
        yield


def _say(line: str) -> None:
    click.echo(line, err=True)


def _print(
    fields: Any, show: Callable[[], None], path: pathlib.Path, as_json: bool
) -> None:
    """Prints results as JSON, or as a table and the path of the page."""
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    show()
    click.echo(f"table and plot in {path}")


def _take_over(out: pathlib.Path) -> None:
    """Writes the settings of runs for which older releases wrote flags."""
    for path in (out / "runs").glob("*.flags.json"):
        run = path.with_name(path.name.removesuffix(".flags.json"))
        new = compare_runs.settings_path(run)
        if not new.exists():
            request = train_request(read_json(path))
            asked = compare_runs.describe(request)
            if request.settings.loss == AUTO_LOSS:  # older runs had labels 0 and 1
                asked["settings"]["loss"] = TrainSettings.loss
            write_atomically(new, pretty_json(asked))
