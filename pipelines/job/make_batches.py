"""Batches of a data set as settings describe them: what ``dpsgd batches`` does."""

from __future__ import annotations

import logging
import threading

from pipelines.batches.manifest import Manifest
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.job_folder import check_out
from pipelines.job.packing import Layout
from pipelines.job.sizing import make_layout


def make_batches(source: str, out: str, settings: BatchSettings) -> Manifest:
    """Makes batches in this process, resuming an unfinished same job.

    Args:
      source: Parquet: a folder, a file or a glob.
      out: An empty or new folder, or that of the same job, unfinished.
      settings: How to sample.

    Raises:
      InputError: before any work, for anything that the user can mend.
    """
    # Imported here: it loads Beam, whose warnings ``quiet_beam`` has to come before.
    from pipelines.job.poisson_batching import write_batches

    dataset, layout = open_input(source, out, settings)
    return write_batches(dataset=dataset, layout=layout, out=out)


def open_input(
    source: str, out: str, settings: BatchSettings
) -> tuple[Dataset, Layout]:
    """Returns a data set and the layout of its batches; refuses before any work.

    Args:
      source: As in ``make_batches``, as are the others.
      out: Folder of the batches.
      settings: How to sample.
    """
    dataset = list_blocks(source)
    plan = settings.plan(dataset.num_examples)
    layout = make_layout(plan, dataset, settings.physical_batch_size)
    check_out(out)
    return dataset, layout


def make_batches_quietly(source: str, out: str, settings: BatchSettings) -> None:
    """Makes batches in a process that nothing else logs to.

    Args:
      source: As in ``make_batches``, as are the others.
      out: Folder of the batches.
      settings: How to sample.
    """
    quiet_beam()
    make_batches(source, out, settings)


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
