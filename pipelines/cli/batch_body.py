"""The work of ``dpsgd batches``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from accounting.cli.options import warn
from pipelines.cli.console import beam_options, show
from pipelines.core.batches.manifest import Manifest
from pipelines.files.processes import RESUMES, stoppable
from pipelines.files.progress_bars import Bars
from pipelines.files.storage import absolute
from pipelines.inputs.parquet_blocks import Dataset, list_blocks, seems_user_column
from pipelines.job import poisson_batching, runtime
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.job_folder import check_out
from pipelines.job.packing import Layout
from pipelines.job.sizing import expected_cost, make_layout, worker_bytes


def _users_note(dataset: Dataset) -> str:
    """Returns a note if a column may name users, whose rows nobody bounded, else ""."""
    name = None if dataset.bounded else seems_user_column(dataset.columns)
    if name is None:
        return ""
    return (
        f"note: column {name} seems to name users; these batches protect single rows. "
        "To protect all rows of a user, prepare the table again with `--user "
        f"{shlex.quote(name)} --max-examples-per-user 5 --num-examples "
        f"{dataset.num_examples}`."
    )


def _summary(layout: Layout) -> dict[str, Any]:
    plan = layout.plan
    return {
        "sampler": plan.sampler,
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "truncated_batch_size": plan.truncated_batch_size,
        **({} if plan.bands is None else {"bands": plan.bands}),
        "physical_batch_size": layout.physical_batch_size,
        "files": layout.num_groups,
        **expected_cost(layout),
    }


def run(
    source: str,
    out: str,
    settings: BatchSettings,
    arguments: list[str],
    *,
    dry_run: bool,
    as_json: bool,
    names: Sequence[str] = (),
    best_bands: bool = False,
    **job: Any,
) -> None:
    """Makes batches, or prints what would be made.

    Args:
      source: Parquet: a folder, a file or a glob.
      out: Empty or new folder, or the unfinished folder of the same job.
      settings: How to sample.
      arguments: Beam's options.
      dry_run: Whether to write nothing.
      as_json: Whether to print JSON instead of a table.
      names: The options of the command.
      best_bands: Whether the number of bands is that of the rule.
      **job: ``key_file``, ``memory_limit`` and ``scratch``; see
        ``poisson_batching.write_batches``.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    options = beam_options(arguments, names)
    runner = poisson_batching.runner_of(options)
    dataset = list_blocks(source)
    if best_bands:
        settings = _with_best_bands(settings, dataset)
    plan = settings.plan(dataset.num_examples)
    warn(settings.delta, plan.num_examples)
    layout = make_layout(plan, dataset, settings.physical_batch_size)
    local = runner == poisson_batching.LOCAL
    poisson_batching.spill_place(absolute(out), job["scratch"], local)  # may refuse it
    summary = _summary(layout)
    if not dataset.bounded:  # it depends on the sizes of blocks
        needed = worker_bytes(layout, dataset, is_shared=not local)
        summary["bytes_per_worker"] = needed
    if note := _users_note(dataset):
        print(note, file=sys.stderr)
    if dry_run:
        found = {"input_files": [*dataset.files], **summary}
        show("Would write", found, as_json)
        return
    check_out(out)
    manifest = write(dataset, layout, out, **job, options=options)
    found = {**summary, "manifest_fingerprint": manifest.fingerprint}
    show(f"Batches in {out}", found, as_json)


def _with_best_bands(settings: BatchSettings, dataset: Dataset) -> BatchSettings:
    """Returns settings with the number of bands by the rule, which it says."""
    bounded = dataset.bounded
    if bounded is not None and bounded.max_examples_per_user > 1:
        print("bands: 1, since rows of a user are in several groups", file=sys.stderr)
        return dataclasses.replace(settings, bands=1)
    settings, found = settings.with_best_bands(
        dataset.num_examples, epsilon=settings.epsilon
    )
    print(f"bands: {found.in_words}", file=sys.stderr)
    return settings


def write(dataset: Dataset, layout: Layout, out: str, **others: Any) -> Manifest:
    """Makes batches with progress bars, and returns their manifest.

    Args:
      dataset: From ``list_blocks``.
      layout: From ``make_layout``.
      out: Empty or new folder, or that of the same unfinished job.
      **others: Further arguments of ``write_batches``.
    """
    totals = {
        runtime.STARTS: 2 * len(dataset.blocks) * layout.plan.num_shuffles,
        # Of bounded users it grows with their number.
        runtime.BLOCKS: 0 if dataset.bounded else len(dataset.blocks),
        runtime.STEPS: layout.plan.num_steps,
    }
    totals = {label: total for label, total in totals.items() if total}

    def tell(label: str, amount: int) -> None:
        if label in totals:
            bars.advance(label, amount)

    with stoppable(RESUMES), Bars(totals) as bars, runtime.listen(tell):
        return poisson_batching.write_batches(
            dataset=dataset, layout=layout, out=out, **others
        )
