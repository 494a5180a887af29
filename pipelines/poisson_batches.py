"""Poisson batches as one transform of your own pipeline.

``PoissonBatches`` is ``WriteBatches`` for those who do not care about its layout, key
and state: it makes them, goes on where an interrupted pipeline stopped, and ends in a
folder that ``dpsgd verify``, the trainer and the readers accept.

Formal guarantees: those of ``transforms`` and, of the folder, of ``poisson_batching``.

Public: the plan, the columns, the names of files.  Sensitive: the key and the batches.
"""

from __future__ import annotations

import apache_beam as beam

from accounting.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.validation import check_choice
from pipelines.manifest import Manifest
from pipelines.parquet_blocks import Block, Dataset
from pipelines.poisson_batching import (
    finish_job,
    is_local,
    lock_job,
    make_layout,
    open_job,
    pending_groups,
)
from pipelines.storage import StrPath, absolute
from pipelines.transforms import Secrets, WriteBatches


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(str)
class PoissonBatches(beam.PTransform):
    """Samples blocks and writes the batches of a whole training run.

    Input: a PCollection of ``Block``, all of ``dataset.blocks``.  Output: the names of
    the files written.  Once the pipeline has ended, ``finish`` writes the manifest.

    Args:
      plan: How batches are sampled; ``poisson`` or ``truncated-poisson``.
      dataset: From ``list_blocks``.
      out: An empty or new folder, or that of the same unfinished job, at the same path
        on every worker.
      key_file: The sampling key, mode 0600, at the same path on every worker; made if
        missing.  By default in ``out``/private.
      physical_batch_size: Rows of every record; by default a step is one record, or
        several if it is large.

    Raises:
      InputError: another sampler, or a bad size.

    Example:
      >>> batches = PoissonBatches(plan, dataset, "batches")  # doctest: +SKIP
      >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:  # doctest: +SKIP
      ...     _ = pipeline | beam.Create(dataset.blocks) | batches
      >>> manifest = batches.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        plan: DpSgdPlan,
        dataset: Dataset,
        out: StrPath,
        *,
        key_file: StrPath | None = None,
        physical_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("sampler", plan.sampler, (POISSON, TRUNCATED_POISSON))
        self._layout = make_layout(plan, dataset, physical_batch_size)
        self._dataset = dataset
        self._out = absolute(out)
        self._key_file = None if key_file is None else absolute(key_file)

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Opens the folder and wires what is still to be written.

        Raises:
          InputError: the folder, the key or the options of the pipeline are refused.
        """
        is_local(blocks.pipeline.options)  # refuses a runner that loses elements
        key_file, _ = self._open()
        return blocks | "WriteBatches" >> WriteBatches(
            self._layout,
            self._out,
            Secrets(key_file=key_file),
            num_blocks=len(self._dataset.blocks),
            groups=pending_groups(self._out, self._layout),
        )

    def finish(self) -> Manifest:
        """Writes the manifest, which makes a folder of batches of the files.

        Raises:
          InputError: the pipeline did not write every file.
        """
        _, batches_id = self._open()
        with lock_job(self._out) as check_lock:
            check_lock()
            return finish_job(self._out, self._layout, self._dataset, batches_id)

    def _open(self) -> tuple[str, str]:
        return open_job(self._out, self._layout, self._dataset, self._key_file)
