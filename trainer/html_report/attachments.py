"""Audits, budgets and fits that a report includes.

Formal guarantees:
  - Only the fields that are named here are used.
  - An audit is accepted only if it is of the plan, the noise, the privacy unit and the
    sampler's own claim of the run; a budget only if the run was charged in it; fits
    only if one of them made the run.

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

_AUDIT = (
    "notes", "meaning", "cannot_see", "trials", "confidence", "verdict", "violated",
)  # fmt: skip
_CLAIM = ("epsilon", "delta", "noise_multiplier")
_FINDING = ("confidence", "epsilon_lower_bound")


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
    audited_claim = (audited, sampler, claim["noise_multiplier"], count)
    this_claim = (plan, plan.sampler, record.noise_multiplier, rows)
    if record.selection or audited_claim != this_claim:
        raise InputError(
            f"Expected {path} to be an audit of this run's own claim; it is of another "
            f"plan, noise, sampler or privacy unit, or of one of several runs. {remedy}"
        )
    return found


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
