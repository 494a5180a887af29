"""The commands that verify a report.

Formal guarantees:
  - The command that needs no run states the epsilon of the report: it contains
    everything that epsilon depends on, unrounded.
"""

from __future__ import annotations

import shlex

from accounting import deltas
from accounting.plan import DpSgdPlan, steps_and_epochs
from accounting.statement import PrivacyStatement
from trainer.run import privacy
from trainer.run.run_record import MANIFEST_NAME, RECORD_NAME, RunRecord
from trainer.settings import methods


def to_verify(
    name: str,
    record: RunRecord,
    plan: DpSgdPlan,
    statement: PrivacyStatement | None,
) -> list[dict[str, str]]:
    """Returns dicts of "purpose" and "command"; see `read_audit`.

    Args:
      name: Name of the run's folder.
      statement: Statement of the report; None for none.
    """
    run = shlex.quote(name)
    found = []
    if statement is not None:
        found += [
            (
                "Anyone, from the numbers on this page alone: compute epsilon again.",
                _account(record, plan, statement),
            ),
            (
                "With the run's folder and its noise key: check that record and "
                "manifest are as they were written, and state the epsilon of what was "
                "executed.",
                f"dpsgd account {run}{_delta(record, statement)}",
            ),
        ]
        attacked = methods.get(record.method).has_dp_sgd_accounting
        if statement.is_guarantee and attacked and record.complete:
            found.append(
                (
                    "Attack the mechanism itself, and bound its epsilon from below.",
                    f"dpsgd audit {run}{_delta(record, statement)}",
                )
            )
    found.append(
        (
            "Compare the files of the run with the fingerprints on this page.",
            f"sha256sum {run}/{RECORD_NAME} {run}/{MANIFEST_NAME}",
        )
    )
    return [{"purpose": text, "command": command} for text, command in found]


def _account(record: RunRecord, plan: DpSgdPlan, statement: PrivacyStatement) -> str:
    flags = {
        "sampler": plan.sampler,
        "num-examples": plan.num_examples,
        "batch-size": plan.expected_batch_size,
        **_length(plan),
        "noise-multiplier": statement.noise_multiplier,
        "delta": statement.delta,
    }
    if plan.truncated_batch_size is not None:
        flags["truncated-batch-size"] = plan.truncated_batch_size
    if privacy.theorem_of_run(record) is not None:
        flags["l2-norm-clip"] = record.l2_norm_clip
        for setting, value in record.method_settings.items():
            flags[setting.replace("_", "-")] = value
    words = [f"--{name} {value}" for name, value in flags.items()]
    return " ".join(["dpsgd account", *words]) + _allowance(statement)


def _delta(record: RunRecord, statement: PrivacyStatement) -> str:
    """Returns the flags for a delta other than the run's."""
    if statement.delta == record.target_delta:
        return _allowance(statement)
    return f" --delta {statement.delta}{_allowance(statement)}"


def _allowance(statement: PrivacyStatement) -> str:
    large = statement.delta >= deltas.LARGEST_DELTA
    return " --allow-large-delta" if large else ""


def _length(plan: DpSgdPlan) -> dict[str, int]:
    """Returns the flag that gives a plan the steps of ``plan``."""
    whole = steps_and_epochs(
        plan.num_examples,
        plan.expected_batch_size,
        epochs=plan.num_epochs,
        num_steps=None,
    )
    if whole == (plan.num_steps, plan.num_epochs):
        return {"epochs": plan.num_epochs}
    return {"num-steps": plan.num_steps}
