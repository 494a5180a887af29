"""A quiet terminal in a process that runs Beam: only errors, each of them once."""

from __future__ import annotations

import logging
import threading
from typing import Any


def quiet_beam() -> None:
    """Lets only errors reach the terminal, each of them once.

    Beam warns, when it is loaded, of every cloud whose client is not installed, and its
    workers reset the level of the root logger: so a handler filters, and it is in place
    before Beam is loaded.  A worker's exception is logged with its traceback and then
    raised; the command line shows the raised one.  Threads that serve an engine end
    with an exception when it disconnects.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    handler = logging.getLogger().handlers[0]
    handler.setLevel(logging.ERROR)
    handler.addFilter(lambda record: not record.exc_info)
    handler.addFilter(lambda record: "Traceback (most" not in record.getMessage())
    threading.excepthook = lambda _: None
    from apache_beam.runners.worker import sdk_worker

    # An engine's worker in this process prints the traceback of a failed or cancelled
    # bundle at any time, even after the last line of the command.
    vars(sdk_worker)["print"] = lambda *_, **__: None


def make_batches_quietly(*arguments: Any) -> None:
    """Calls ``make_batches.make_batches``, in a separate process: it silences Beam."""
    quiet_beam()
    from pipelines.job.poisson_batching import make_batches

    make_batches(*arguments)
