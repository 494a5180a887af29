"""``--runner``, and the options of Beam beside it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import click

from accounting.core.validation import InputError, did_you_mean
from pipelines.files.progress_bars import Bars
from pipelines.job.quiet_beam import quiet_beam
from pipelines.job.runtime import Runtime

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


def check(
    command: str, runner: str | None, others: list[str], num_threads: int | None
) -> None:
    """Refuses flags that contradict each other.

    Args:
      command: Name of the command.
      runner: Name of a Beam runner; None for this process.
      others: Options that the command does not know.
      num_threads: Number of threads of this process, if given.

    Raises:
      InputError: Beam's options without a runner, or threads beside one.
    """
    if runner is None and others:
        raise InputError(
            f"Expected no {others[0]!r}: it is no option of dpsgd {command}, and those "
            f"of Beam go with --runner. See `dpsgd {command} --help`."
            f"{similar_option(others[0])}"
        )
    if runner is not None and num_threads is not None:
        raise InputError("Expected no --threads beside --runner. Leave it out.")


def similar_option(name: str) -> str:
    """Returns a question for an option of the running command; empty if none is near.

    Args:
      name: Option as typed, perhaps with an equals sign and a value.
    """
    context = click.get_current_context(silent=True)
    options = context.command.params if context else []
    return did_you_mean(name.partition("=")[0], (each.opts[0] for each in options))


def options_of(runner: str, others: list[str]) -> PipelineOptions:
    """Returns Beam's options, and keeps Beam's log off the terminal.

    Args:
      runner: Name of a Beam runner.
      others: Further options of Beam.

    Raises:
      InputError: Beam does not know an option, or the runner may lose elements.
    """
    quiet_beam()
    from pipelines.cli.batch_job import beam_options
    from pipelines.job.poisson_batching import runner_of

    found = beam_options([f"--runner={runner}", *others])
    runner_of(found)  # refuses runners that may lose elements
    return found


def runtime(
    runner: str | None, others: list[str], num_threads: int | None, bars: Bars
) -> Runtime:
    """Returns where tasks run, after ``check``.

    Args:
      runner: Name of a Beam runner; None for this process.
      others: Further options of Beam.
      num_threads: Number of threads of this process, if given.
      bars: Bars of the progress, one for each step.

    Raises:
      InputError: as ``options_of``.
    """
    run_tasks = None
    if runner is not None:
        options = options_of(runner, others)
        from pipelines.job.engine_tasks import run_on_engine

        run_tasks = functools.partial(run_on_engine, options)
    return Runtime(
        run_tasks=run_tasks, num_threads=num_threads, on_progress=bars.update
    )
