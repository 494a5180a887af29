"""The work of a command that carries out an experiment of many runs.

Public: what is printed, except by ``bias``.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import click

from pipelines.files.folders import usable_folder
from pipelines.files.locks import LOCK_NAME, locked
from pipelines.files.output_folder import make_parents, remove_empty
from trainer.report.report import Report


class _HasFolder(Protocol):
    @property
    def out(self) -> pathlib.Path: ...


_Settings = TypeVar("_Settings", bound=_HasFolder)


def run(
    experiment: Callable[[_Settings, Callable[[str], None]], Report],
    settings: _Settings,
    *,
    as_json: bool,
) -> None:
    """Carries out an experiment, and prints its report.  Errors are the experiment's.

    Args:
      experiment: Takes settings, and a function for lines of progress.
      settings: Settings of the experiment.
      as_json: Whether to print only JSON.
    """
    with _alone(settings.out):
        report = experiment(settings, _say)
        fields = report.write(settings.out)
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    report.show()
    click.echo(f"report in {settings.out / report.stem}.md")


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
