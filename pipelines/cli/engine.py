"""``--runner``, and the options of Beam beside it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from accounting.cli import misspelt
from accounting.validation import InputError
from pipelines.job.quiet_beam import quiet_beam

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
            f"{misspelt.meant(others[0])}"
        )
    if runner is not None and num_threads is not None:
        raise InputError("Expected no --threads beside --runner. Leave it out.")


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


def task_runner(options: PipelineOptions | None) -> Any:
    """Returns a function that runs tasks on an engine; None without options."""
    if options is None:
        return None
    from pipelines.job.engine_tasks import run_on_engine

    return functools.partial(run_on_engine, options)
