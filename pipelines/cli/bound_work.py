"""The work of ``dpsgd bound``."""

from __future__ import annotations

import time
from typing import Any

from pipelines.cli import engine
from pipelines.cli.console import show
from pipelines.core.users.bounded import USERS
from pipelines.files.progress_bars import Bars
from pipelines.files.stopping import RESUMES, stoppable
from pipelines.inputs.input_files import check_outside
from pipelines.users.bound import STEPS
from pipelines.users.bound import bound as bound_users
from pipelines.users.bound_job import BoundSettings


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
      options: The other flags, by name.
      as_json: Whether the summary is JSON.

    Raises:
      InputError: flags contradict each other, or the table cannot be bounded.
    """
    names = ("user_column", "max_examples_per_user", "num_examples", "sampled")
    settings = BoundSettings(**{name: options.pop(name) for name in names})
    check_outside(source, out, "part-00000.parquet")
    engine.check("bound", runner, others, options["threads"])
    began = time.perf_counter()
    with stoppable(RESUMES), Bars(STEPS) as bars:
        bound_users(
            source,
            out,
            settings,
            key_file=options["key_file"],
            memory_limit=options["memory_limit"],
            runtime=engine.runtime(runner, others, options["threads"], bars),
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
