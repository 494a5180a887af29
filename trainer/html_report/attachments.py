"""The audit that a report includes.

Formal guarantees:
  - Only the fields that are named here are used.
  - An audit is accepted only if it is of the plan, the noise, the privacy unit and the
    sampler's own claim of the run.

Public: everything.
"""

from __future__ import annotations

import pathlib
from typing import Any

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from pipelines.files.json_files import read_json
from trainer.core.run.run_record import RunRecord
from trainer.run import privacy

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
