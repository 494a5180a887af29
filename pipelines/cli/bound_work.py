"""The work of ``dpsgd bound``."""

from __future__ import annotations

import functools
import time
from typing import Any

from accounting.cli import misspelt
from accounting.validation import InputError
from pipelines.cli.console import show
from pipelines.files.progress_bars import Bars
from pipelines.files.stopping import stoppable
from pipelines.inputs.bounded import USERS
from pipelines.job.quiet_beam import quiet_beam
from pipelines.users.bound import bound as bound_users
from pipelines.users.bound_job import BoundSettings
from pipelines.users.bound_steps import STEPS

#: Printed after a stop by a signal.
STOPPED = (
    "Stopped by a signal. Give the same command again: it goes on where it stopped."
)


def bound(
    source: str,
    out: str,
    runner: str | None,
    others: list[str],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Bounds users and prints a summary, which holds no counts of the input.

    Args:
      source: File, folder or glob.
      out: New or empty folder.
      runner: Name of a Beam runner; None for this process.
      others: Options that the command does not know, for Beam.
      options: The other flags.
      as_json: Whether the summary is JSON.

    Raises:
      InputError: flags contradict each other, or the table cannot be bounded.
    """
    names = ("user_column", "max_examples_per_user", "num_examples", "sampled")
    settings = BoundSettings(**{name: options.pop(name) for name in names})
    if runner is not None and options["threads"] is not None:
        raise InputError("Expected no --threads beside --runner. Leave it out.")
    if runner is None and others:
        raise InputError(
            f"Expected no {others[0]!r}: it is no option of dpsgd bound, and those of "
            "Beam go with --runner. See `dpsgd bound --help`."
            f"{misspelt.meant(others[0])}"
        )
    began = time.perf_counter()
    with stoppable(STOPPED), Bars(STEPS) as bars:
        bound_users(
            source,
            out,
            settings,
            key_file=options["key_file"],
            memory_limit=options["memory_limit"],
            num_threads=options["threads"],
            run_tasks=engine(runner, others),
            on_progress=bars.update,
        )
    shown = {
        "out": out,
        "unit_of_privacy": "user",
        "an_example_is": "a user" if settings.sampled == USERS else "a row",
        "max_examples_per_user": settings.max_examples_per_user,
        "num_examples": settings.num_examples,
        "column_left_out": settings.user_column,
        "seconds": round(time.perf_counter() - began, 2),
    }
    show("Bounded users", shown, as_json)


def engine(runner: str | None, others: list[str]) -> Any:
    """Returns a function that runs tasks on an engine; None for this process.

    Args:
      runner: Name of a Beam runner; None for this process.
      others: Beam's options.

    Raises:
      InputError: Beam does not know an option, or the engine may lose elements.
    """
    if runner is None:
        return None
    quiet_beam()
    from pipelines.cli.batch_job import beam_options
    from pipelines.job.engine_tasks import run_on_engine
    from pipelines.job.poisson_batching import runner_of

    found = beam_options([f"--runner={runner}", *others])
    runner_of(found)  # refuses engines that may lose elements
    return functools.partial(run_on_engine, found)
