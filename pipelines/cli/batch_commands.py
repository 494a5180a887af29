"""``dpsgd batches`` and ``dpsgd verify``."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from accounting.cli.command import PassedOn, names_of
from accounting.cli.options import (
    AllowLargeDelta,
    Bands,
    Cap,
    Json,
    Sampler,
    Size,
    check_delta,
)
from accounting.core.plan import AUTO_BANDS, CYCLIC, TRUNCATED_POISSON
from accounting.core.settings import PRIVACY, RARE, REQUIRED, OfPrivacy
from accounting.core.validation import InputError
from pipelines.files.processes import stoppable
from pipelines.files.progress_bars import Bars
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.runtime import quiet_beam


def batches(
    *others: PassedOn,
    source: Annotated[str, Parameter(name="--input", group=REQUIRED)],
    out: Annotated[str, Parameter(group=REQUIRED)],
    batch_size: Annotated[int, Parameter(group=REQUIRED)],
    sampler: Sampler = TRUNCATED_POISSON,
    epochs: int | None = None,
    num_steps: int | None = None,
    truncated_batch_size: Cap = "auto",
    bands: Bands = None,
    epsilon: Annotated[float | None, OfPrivacy] = None,
    delta: Annotated[float | None, OfPrivacy] = None,
    allow_large_delta: AllowLargeDelta = False,
    physical_batch_size: int | None = None,
    key_file: Annotated[str | None, OfPrivacy] = None,
    memory_limit: Size = 4 << 30,
    scratch: Annotated[str | None, RARE] = None,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Samples and writes the batches of a whole training run, with Apache Beam.

    A Poisson sampler includes every example in every step independently, with
    probability batch size / rows; a truncated step keeps a random subset.  Each record
    of the TFRecords is a batch of fixed size, in which weight 0 marks padding.  To
    resume a stopped job, give the same command again.

    All other options, such as --runner=FlinkRunner, go to Beam.  Without --runner the
    job runs in this process.

    For example:
      dpsgd batches --input data/train --out batches --batch-size 1024 --epochs 1
      dpsgd batches --input s3://data/train --out s3://data/batches \\
          --batch-size 1024 --epochs 1 --key-file sampling.key --runner FlinkRunner

    Args:
      others: Options of Beam.
      source: Parquet: a folder (all visible files in it, at any depth), a file, or a
        quoted glob; also in a store, such as s3://.  --dry-run lists the files.
      out: New folder, or that of a stopped job.
      sampler: How examples are assigned to steps.
      batch_size: Expected rows per step.
      epochs: Number of steps: epochs x rows / batch size.
      num_steps: Number of steps, instead of --epochs.
      truncated_batch_size: Cap on the rows of a step; auto: the smallest cap that does
        not raise epsilon.
      bands: Banded noise of so many groups of rows, whose steps take turns.  1:
        independent noise, which lazy noise, BAM, DP-SAT and ModelMix need.  auto: by
        the rule, for --epsilon.  [default: auto with --epsilon, else 1]
      epsilon: The largest epsilon you will train with, for the bands and the cap.
        [default for the cap: 8]
      delta: For the cap: the smallest delta.  [default: 0.1 / rows]
      physical_batch_size: Rows per record of a file.
      key_file: Secret sampling key, used for this data set alone: a file of mode 0600,
        made if missing; a file in a store; or
        secretmanager://projects/P/secrets/S/versions/V.  [default:
        OUT/private/sampling.key, if OUT is on this machine]
      memory_limit: Memory of this process, on the local runner and while it computes
        shuffles.  [default: 4GiB]
      scratch: Folder for rows between map and reduce, which every worker must reach.
        [default: in OUT; a temporary folder without --runner if OUT is in a store]
      dry_run: Print input, layout and cost; write nothing.
    """
    check_delta(delta, allow_large_delta)
    if bands == AUTO_BANDS and epsilon is None:
        raise InputError(
            "Expected --epsilon beside --bands auto: which number of bands is best "
            "depends on the epsilon that you will train with. Give it, or --bands 1."
        )
    by_default = bands is None and epsilon is not None and sampler in CYCLIC
    settings = BatchSettings(
        sampler=sampler,
        expected_batch_size=batch_size,
        num_epochs=epochs,
        num_steps=num_steps,
        truncated_batch_size=None
        if truncated_batch_size == "auto"
        else truncated_batch_size,
        bands=None if isinstance(bands, str) else bands,
        epsilon=BatchSettings.epsilon if epsilon is None else epsilon,
        delta=delta,
        physical_batch_size=physical_batch_size,
    )
    quiet_beam()
    from pipelines.cli import batch_body

    batch_body.run(
        source,
        out,
        settings,
        [*others],
        names=names_of(batches),
        best_bands=by_default or bands == AUTO_BANDS,
        dry_run=dry_run,
        as_json=as_json,
        key_file=key_file,
        memory_limit=memory_limit,
        scratch=scratch,
    )


def verify(
    directory: str,
    /,
    *,
    resample: bool = False,
    source: Annotated[str | None, Parameter(name="--input")] = None,
    key_file: Annotated[str | None, Parameter(group=PRIVACY)] = None,
    memory_limit: Size | None = None,
    as_json: Json = False,
) -> None:
    """Checks every byte of batches against checksums.

    Checksums say that files are as they were written; --resample says that they are
    what plan, key and input determine, whatever wrote them.  Statements of runs then
    rely on the batch job no more.

    For example:
      dpsgd verify batches
      dpsgd verify --resample batches --input data/train

    Args:
      directory: Folder that `dpsgd batches` wrote.
      resample: Also make every record again, by a short reference sampler without Beam,
        and compare.  Writes DIRECTORY/certificate.json if all are equal.
      source: For --resample: --input of `dpsgd batches`.
      key_file: For --resample: the key of the batches.  [default: that in
        DIRECTORY/private]
      memory_limit: For --resample.  [default: 1.4GiB, or 4GiB for large row groups; at
        most half of this machine's]
    """
    from pipelines.batches.folder import read_manifest
    from pipelines.batches.verify import verify as check
    from pipelines.certify import certify

    with stoppable(), Bars({"files": None, "steps": None}) as bars:
        if resample:
            if source is None:
                raise InputError(
                    "Expected --input with --resample: that of `dpsgd batches`."
                )
            result = certify(
                directory,
                source,
                key_file,
                memory_limit=memory_limit,
                progress=bars.update,
                say=bars.say,
            )
        else:
            others = (("input", source), ("key-file", key_file))
            for name, value in (*others, ("memory-limit", memory_limit)):
                if value is not None:
                    raise InputError(f"Expected --resample with --{name} {value}.")
            total = len(read_manifest(directory).files)
            result = check(
                directory, progress=lambda done: bars.update("files", done, total)
            )
    if as_json:
        fields = {**vars(result), "findings": list(result.findings)}
        print(json.dumps(fields, indent=2))
    else:
        for finding in result.findings:
            print(f"found: {finding}")
    if result.findings:
        raise InputError(
            f"Expected {directory} to be intact; findings: {len(result.findings)}. "
            "Make it again, or restore the files."
        )
    if not as_json:
        counted = f"{result.num_files:,} files, {result.num_steps:,} steps"
        print(f"intact: {counted}{'; certified' if result.certified else ''}")
