"""The bytes of the records of batches, for one key: every sampler in two sizes.

The answer of a job is the SHA-256 over its records in order; manifest and checksums may
change with their formats.
"""

from __future__ import annotations

import hashlib
import pathlib
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.plan import SAMPLERS, DpSgdPlan
from pipelines.files.key_sources import insecure_key
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
from tests.frozen.compare import Answers
from tests.sampler_fields import needed

NUM_ROWS = 3_000
#: Of each job: expected batch size, epochs, rows of a physical batch.
SIZES = {"small": (16, 1, None), "several records": (250, 3, 64)}


def write_table(folder: pathlib.Path) -> None:
    """Writes prepared rows in three files of two row groups each.

    Args:
      folder: An empty folder.
    """
    random = np.random.default_rng(0)
    for part in range(3):
        rows = NUM_ROWS // 3
        table = pa.table(
            {
                "label": pa.array(random.integers(0, 2, rows), pa.int8()),
                "age": pa.array(random.normal(size=rows), pa.float32()),
                "word": pa.array(random.integers(0, 99, rows), pa.int32()),
                "numbers": pa.FixedSizeListArray.from_arrays(
                    pa.array(random.normal(size=4 * rows), pa.float32()), 4
                ),
            }
        )
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=rows // 2)


def digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 over the files of records.

    Args:
      folder: Finished batches.
    """
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.tfrecord*")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _batches(folder: pathlib.Path, sampler: str, size: str) -> str:
    expected, epochs, physical = SIZES[size]
    steps = round(NUM_ROWS / expected) * epochs
    plan: dict[str, Any] = {
        "sampler": sampler,
        "num_examples": NUM_ROWS,
        "expected_batch_size": expected,
        "num_steps": steps,
        "num_epochs": epochs,
    }
    plan |= needed(sampler, cap=round(1.1 * expected), bands=4)
    key_file = folder / "sampling.key"
    key_file.write_text(insecure_key(0).hex())
    key_file.chmod(0o600)
    dataset = list_blocks(str(folder / "table"))
    layout = make_layout(DpSgdPlan(**plan), dataset, physical_batch_size=physical)
    out = folder / "batches"
    write_batches(dataset=dataset, layout=layout, out=out, key_file=key_file)
    return digest(out)


def answer(names: list[str] | None) -> Answers:
    """Makes the batches of all samplers and sizes, or of those named."""
    every = [f"{sampler}, {size}" for sampler in SAMPLERS for size in SIZES]
    found = {}
    for name in every if names is None else names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            (folder / "table").mkdir()
            write_table(folder / "table")
            sampler, size = name.split(", ")
            found[name] = _batches(folder, sampler, size)
    return found
