"""Poisson batches as one transform of a user's pipeline.

``PoissonBatches`` is a ``WriteBatches`` that makes layout, key and state itself and
resumes an interrupted pipeline.

Formal guarantees: those of ``transforms`` and, for the folder, of ``job_folder``.

Public: the plan, the columns, the names of files.  Sensitive: the key and the batches.
"""

from __future__ import annotations

import apache_beam as beam

from accounting.core.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.core.validation import InputError, check_choice
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.core.batches.manifest import Manifest
from pipelines.files.storage import StrPath, absolute, join
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.job_folder import (
    SPILL_NAME,
    finish_job,
    lock_job,
    open_job,
    pending_groups,
)
from pipelines.job.poisson_batching import (
    AUTO,
    ENGINE,
    choose_shuffle,
    runner_of,
    shared_spill,
)
from pipelines.job.sizing import make_layout
from pipelines.job.spill import choose_fan_in
from pipelines.job.steps.map_step import Secrets
from pipelines.job.transforms import WriteBatches, check_begin


@beam.typehints.with_output_types(str)
class PoissonBatches(beam.PTransform):
    """Samples rows and writes the batches of a whole training run.

    Applied to a pipeline.  Output: the names of the files written.  Once the pipeline
    has ended, ``finish`` writes the manifest.

    Args:
      plan: How batches are sampled; ``poisson`` or ``truncated-poisson``.
      dataset: From ``list_blocks``.
      out: Empty or new folder, or that of the same unfinished job, at the same path on
        every worker.
      key_file: File of the sampling key, mode 0600, at the same path on every worker;
        made if missing.  By default in ``out``/private.
      physical_batch_size: Number of rows per record; by default a step is one record,
        or several if it is large.
      shuffle: "files": rows wait in ``out``/private, which every worker must reach;
        "engine": they travel through the engine; "auto": "engine" on Dataflow, else
        "files".

    Raises:
      InputError: another sampler, a size out of range, or ``dataset`` of another type.

    Example:
      >>> batches = PoissonBatches(plan, dataset, "batches")  # doctest: +SKIP
      >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:  # doctest: +SKIP
      ...     _ = pipeline | batches
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
        shuffle: str = AUTO,
    ) -> None:
        super().__init__()
        check_choice("sampler", plan.sampler, (POISSON, TRUNCATED_POISSON))
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"Expected the data set, not {type(dataset).__name__}. Write "
                "`dataset = list_blocks(folder)`, then PoissonBatches(plan, dataset, "
                "...)."
            )
        self._layout = make_layout(plan, dataset, physical_batch_size)
        self._dataset = dataset
        self._shuffle = shuffle
        self._out = absolute(out)
        self._key_file = None if key_file is None else absolute(key_file)

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Opens the folder and wires the groups that are not written yet.

        Raises:
          InputError: there is a step before, or the folder, the key or the options of
            the pipeline are refused.
        """
        check_begin(begin)
        runner_of(begin.pipeline.options)  # refuses runners that may lose elements
        runner = type(begin.pipeline.runner).__name__
        shuffle = choose_shuffle(self._shuffle, runner)
        key_file, _ = self._open()
        folder = join(self._out, PRIVATE_NAME, SPILL_NAME)
        fan_in = choose_fan_in(self._layout, self._dataset)
        return begin | "WriteBatches" >> WriteBatches(
            self._layout,
            self._out,
            Secrets(key_file=key_file),
            dataset=self._dataset,
            groups=pending_groups(self._out, self._layout),
            spill=None if shuffle == ENGINE else shared_spill(folder, fan_in),
        )

    def finish(self) -> Manifest:
        """Writes the manifest, once the pipeline has ended.

        Raises:
          InputError: the pipeline did not write every file.
        """
        _, batches_id = self._open()
        with lock_job(self._out):
            return finish_job(self._out, self._layout, self._dataset, batches_id)

    def _open(self) -> tuple[str, str]:
        return open_job(self._out, self._layout, self._dataset, self._key_file)
