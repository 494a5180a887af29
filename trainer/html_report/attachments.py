"""Audits, comparisons, budgets and fits that a report includes.

Formal guarantees:
  - Only the fields that are named here are used.
  - An audit is accepted only if it is of the plan, the noise, the privacy unit and the
    sampler's own claim of the run; a comparison only if it has runs of the same
    sampler, batch size, method, learning rate, clip norm and noise; a budget only if
    the run was charged in it; fits only if one of them made the run.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from pipelines.files.json_files import read_json
from trainer.core.run.run_record import RunRecord, read_run_id
from trainer.run import budget, privacy, released
from trainer.settings.audit_settings import TRAINER

COMPARISON_NAME = "comparison.json"
_AUDIT = (
    "level", "notes", "meaning", "cannot_see", "trials", "confidence", "verdict",
    "violated",
)  # fmt: skip
_CLAIM = ("epsilon", "delta", "noise_multiplier")
_FINDING = ("confidence", "epsilon_lower_bound")
_OUTCOME = (
    "sampler", "expected_batch_size", "num_epochs", "method", "learning_rate",
    "l2_norm_clip", "weights", "target_epsilon", "guarantee", "noise_multiplier",
    "epsilon", "epsilon_lower_bound", "metric", "mean", "stddev", "num_seeds",
)  # fmt: skip


def read_audit(
    path: pathlib.Path, record: RunRecord, manifest: Manifest
) -> dict[str, Any]:
    """Returns the shown fields of an audit.

    Args:
      path: File with the output of ``dpsgd audit RUN --json``.
      record: Record of the run.
      manifest: Manifest of its batches.

    Raises:
      InputError: not an audit, or one of another run or of another sampler's claim.
    """
    remedy = f"Make it with `dpsgd audit RUN --json > {path}`."
    fields = read_json(path, remedy=remedy)
    try:
        claim = fields["claim"]
        audited = DpSgdPlan.from_json(fields["audited"])
        found = {
            **{name: fields[name] for name in _AUDIT},
            "claim": {name: claim[name] for name in _CLAIM},
            "findings": [
                {name: each[name] for name in _FINDING} for each in fields["findings"]
            ],
        }
        sampler, count = claim["plan"]["sampler"], claim["max_examples_per_user"]
    except (KeyError, TypeError, InputError):
        raise InputError(f"Expected {path} to be an audit. {remedy}") from None
    plan, rows = manifest.plan, privacy.count_of(manifest.dataset)
    # Small runs of the trainer level may bound users to fewer rows.
    count = rows if found["level"] == TRAINER else count
    audited_claim = (audited, sampler, claim["noise_multiplier"], count)
    this_claim = (plan, plan.sampler, record.noise_multiplier, rows)
    if record.selection or audited_claim != this_claim:
        raise InputError(
            f"Expected {path} to be an audit of this run's own claim; it is of another "
            f"plan, noise, sampler or privacy unit, or of one of several runs. {remedy}"
        )
    return found


def read_comparison(
    path: pathlib.Path, record: RunRecord, plan: DpSgdPlan
) -> list[dict[str, Any]]:
    """Returns the lines of a comparison; ``is_this`` marks those of the run's settings.

    ``path`` may be the folder of ``comparison.json``.

    Args:
      path: A comparison.
      record: Record of the run.
      plan: Plan of the run.

    Raises:
      InputError: not a comparison, or one without the run's settings.
    """
    path = path / COMPARISON_NAME if path.is_dir() else path
    remedy = "Name a folder that `dpsgd compare` wrote."
    fields = read_json(path, remedy=remedy)
    this = {
        "sampler": plan.sampler,
        "expected_batch_size": plan.expected_batch_size,
        "method": record.method,
        "learning_rate": record.optimizer.get("learning_rate"),
        "l2_norm_clip": record.l2_norm_clip,
        "noise_multiplier": record.noise_multiplier,
    }
    try:
        lines = [{name: each[name] for name in _OUTCOME} for each in fields]
    except (KeyError, TypeError):
        raise InputError(f"Expected {path} to be a comparison. {remedy}") from None
    for line in lines:
        line["is_this"] = all(line[name] == value for name, value in this.items())
    for line, each in zip(lines, fields, strict=True):
        if each.get("sampled"):
            line["sampler"] += f", {each['sampled']}, k={each['max_examples_per_user']}"
    if not any(line["is_this"] for line in lines):
        raise InputError(
            f"Expected {path} to have runs like this one: {record.method} on "
            f"{plan.sampler} batches, noise_multiplier={record.noise_multiplier}. Name "
            "the comparison that the run is of, or omit it."
        )
    return lines


def read_budget(path: pathlib.Path, run: pathlib.Path) -> dict[str, Any]:
    """Returns the claim and the slots of a budget.

    Args:
      path: File of the budget.
      run: Folder of the run.

    Raises:
      InputError: no budget, or one in which the run was not charged.
    """
    found = budget.read(path)
    run_id = read_run_id(run)
    if not run_id or not found.has_run(run_id):
        raise InputError(
            f"Expected the run to be charged in {path}; it was trained without it. "
            "Name the --budget that it was trained with, or omit it."
        )
    slots = [
        {**dataclasses.asdict(each), "used": len(each.used)} for each in found.slots
    ]
    return {"claim": found.claim, "slots": slots}


def read_fits(folder: pathlib.Path, run: pathlib.Path) -> dict[str, Any] | None:
    """Returns what was released of the table of a fit; None if it is that fit alone.

    Args:
      folder: Folder of the table.
      run: Folder of the run, in that of the fit or of its search.

    Raises:
      InputError: no fit of that table made the run.
    """
    of_run, of_search = run.resolve().parents[:2]
    out = of_run if (of_run / released.ID_NAME).exists() else of_search
    found = released.Table.of_fit(folder, out).releases()
    return released.together(found) if len(found) > 1 else None
