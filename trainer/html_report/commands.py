"""The commands that verify a report.

Formal guarantees:
  - The command that needs no run states the epsilon of the report: it contains
    everything that epsilon depends on, unrounded.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from accounting.core import deltas
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan, steps_and_epochs
from accounting.statement import PrivacyStatement
from trainer.core.run.run_record import RunRecord
from trainer.run import privacy
from trainer.settings import methods

_AGAIN = "Anyone, from the numbers on this page alone: compute epsilon again."
_TOGETHER = "The {count} runs together are one run of as many steps or epochs."
_AS_WRITTEN = (
    "With the run's folder: check that record and manifest belong together, and state "
    "the epsilon of what was executed."
)
_ATTACK = "Attack the mechanism itself, and bound its epsilon from below."
_COMPARE = "Compare the files of the run with the fingerprints on this page."


def to_verify(
    name: str,
    record: RunRecord,
    statement: PrivacyStatement | None,
    files: Iterable[str],
) -> list[dict[str, str]]:
    """Returns dicts of "purpose" and "command".

    Args:
      name: Name of the run's folder.
      record: Record of the run.
      statement: Statement of the report; None for none.
      files: Names of the files in it whose fingerprints are on the page.
    """
    run = shlex.quote(name)
    found = []
    if statement is not None and not record.selection:
        several = _TOGETHER.format(count=statement.of_runs)
        text = _AGAIN if statement.of_runs == 1 else f"{_AGAIN} {several}"
        found.append((text, _account(record, statement)))
    if statement is not None:
        delta = _delta(record, statement)
        found.append((_AS_WRITTEN, f"dpsgd account {run}{delta}"))
        is_dp_sgd = methods.get(record.method).has_dp_sgd_accounting
        attacked = is_dp_sgd and record.complete and not record.selection
        if statement.is_guarantee and attacked:
            found.append((_ATTACK, f"dpsgd audit {run}{delta}"))
    digests = " ".join(["sha256sum", *(f"{run}/{file}" for file in files)])
    found.append((_COMPARE, digests))
    return [{"purpose": text, "command": command} for text, command in found]


def _account(record: RunRecord, statement: PrivacyStatement) -> str:
    plan = statement.plan_of_all
    flags: dict[str, Any] = {
        "sampler": plan.sampler,
        "num-examples": plan.num_examples,
        "batch-size": plan.expected_batch_size,
        **_length(plan),
        "noise-multiplier": statement.noise_multiplier,
        "delta": statement.delta,
    }
    if plan.truncated_batch_size is not None:
        flags["truncated-batch-size"] = plan.truncated_batch_size
    if statement.max_examples_per_user > 1:
        flags["max-examples-per-user"] = statement.max_examples_per_user
    if statement.neighboring_relation != REPLACE_SPECIAL:
        flags["relation"] = statement.neighboring_relation
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
