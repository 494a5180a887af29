"""What ``dpsgd account`` does, without TensorFlow.

Public: everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accounting.cross_check import check
from accounting.neighboring_relation import REPLACE_SPECIAL
from accounting.statement import PrivacyStatement
from accounting.validation import InputError
from trainer.cli import method_flags, plan_flags
from trainer.run import privacy
from trainer.settings import methods
from trainer.settings.method_settings import DP_SGD, complete, gradients_text

Said = tuple[dict[str, Any], str]


def of_run(run: Path, flags: dict[str, Any], *, cross_check: bool) -> Said:
    """Returns the statement of a run, as JSON and for people.

    Args:
      run: A folder that ``dpsgd train`` wrote.
      flags: Of the command.
      cross_check: Whether to add the epsilon by dp_accounting.

    Raises:
      InputError: the run is refused, or dp_accounting has no event for it.
    """
    record, manifest = plan_flags.read_run(run, flags)
    if cross_check:
        check.check_plan(manifest.plan, privacy.theorem_of_run(record))
    statement = privacy.run_statement(
        record,
        manifest,
        delta=flags["delta"],
        allow_large_delta=flags["allow_large_delta"],
    )
    return _said(statement, cross_check)


def of_plan(flags: dict[str, Any], *, cross_check: bool) -> Said:
    """Returns the statement of a plan, as JSON and for people.

    Args:
      flags: Of the command.
      cross_check: Whether to add the epsilon by dp_accounting.

    Raises:
      InputError: flags are missing or describe no plan, or dp_accounting has no event
        for it.
    """
    needed = ("sampler", "num_examples", "batch_size", "noise_multiplier", "delta")
    plan_flags.check_complete(flags, needed, command="account")
    method, settings = _method(flags)
    plan = plan_flags.plan(flags)
    theorem = methods.theorem_of(method, settings, flags["l2_norm_clip"])
    relation = flags["relation"] or REPLACE_SPECIAL
    count = flags["max_examples_per_user"]
    count = 1 if count is None else count
    if cross_check:
        check.check_plan(plan, theorem, relation, count)
    statement = privacy.plan_statement(
        plan,
        noise_multiplier=flags["noise_multiplier"],
        l2_norm_clip=flags["l2_norm_clip"],
        delta=flags["delta"],
        gradients=gradients_text(method, settings),
        theorem=theorem,
        allow_large_delta=flags["allow_large_delta"],
        neighboring_relation=relation,
        max_examples_per_user=count,
    )
    return _said(statement, cross_check)


def _method(flags: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the method whose settings are given, complete; else DP-SGD."""
    given = method_flags.given(flags)
    if not given:
        return DP_SGD, {}
    first = next(iter(given))
    method = methods.owners()[first]
    settings = complete(method, given)
    if flags["l2_norm_clip"] is None:
        raise InputError(f"Expected --l2-norm-clip beside {first}={given[first]}.")
    return method, settings


def _said(statement: PrivacyStatement, cross_check: bool) -> Said:
    fields, text = statement.to_json(), statement.to_text().rstrip("\n")
    if cross_check:
        found = check.cross_check(
            statement.plan,
            noise_multiplier=statement.noise_multiplier,
            delta=statement.delta,
            ours=statement.epsilon,
            neighboring_relation=statement.neighboring_relation,
            max_examples_per_user=statement.max_examples_per_user,
        )
        fields["cross_check"] = found.to_json()
        text += f"\n{found.to_text()}"
    return fields, text
