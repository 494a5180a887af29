"""Errors alone on the terminal, each of them once, in a process that runs Beam.

Beam is loaded when the handler is in place: what it says while it is loaded is quieted
too.
"""

from __future__ import annotations

import logging
import threading
from typing import Any


def quiet_beam() -> None:
    """Lets errors alone reach the terminal, each of them once.

    Beam warns of every cloud whose client is not installed, and its workers reset the
    level of the root logger: so the handler filters.  The exception of a worker is
    logged with its traceback and then raised; the command line shows what is raised.
    Threads that served an engine end with an exception when it hangs up.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    handler = logging.getLogger().handlers[0]
    handler.setLevel(logging.ERROR)
    handler.addFilter(lambda record: not record.exc_info)
    handler.addFilter(lambda record: "Traceback (most" not in record.getMessage())
    threading.excepthook = lambda _: None
    from apache_beam.runners.worker import sdk_worker

    # An engine's worker in this process prints the traceback of a bundle that failed or
    # was cancelled, at its own time: also below the line with which the command ends.
    vars(sdk_worker)["print"] = lambda *_, **__: None


def make_batches_quietly(*arguments: Any) -> None:
    """Calls ``make_batches.make_batches`` in a process that nothing else logs to."""
    quiet_beam()
    from pipelines.job.make_batches import make_batches

    make_batches(*arguments)
