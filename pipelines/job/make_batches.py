"""Batches of a data set in one call, as by ``dpsgd batches``."""

from __future__ import annotations

from pipelines.core.batches.manifest import Manifest
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.job_folder import check_out
from pipelines.job.packing import Layout
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout


def make_batches(source: str, out: str, settings: BatchSettings) -> Manifest:
    """Makes batches in this process, or resumes the same unfinished job.

    Args:
      source: Parquet: a folder, a file or a glob.
      out: Empty or new folder, or the unfinished folder of the same job.
      settings: How to sample.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    dataset, layout = open_input(source, out, settings)
    return write_batches(dataset=dataset, layout=layout, out=out)


def open_input(
    source: str, out: str, settings: BatchSettings
) -> tuple[Dataset, Layout]:
    """Returns a data set and the layout of its batches.

    Arguments as for ``make_batches``, which raises the same errors.
    """
    dataset = list_blocks(source)
    plan = settings.plan(dataset.num_examples)
    layout = make_layout(plan, dataset, settings.physical_batch_size)
    check_out(out)
    return dataset, layout
