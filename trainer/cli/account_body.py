"""The work of ``dpsgd account``, without TensorFlow.

Public: everything.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accounting import cross_check, profiles
from accounting.core.claim import AUTO_CLIP, plan_of_all
from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import NAMES, REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_claimed_delta
from accounting.profiles import TradeOff
from accounting.statement import PrivacyStatement
from pipelines.batches.folder import read_certificate
from trainer.core.run.run_record import read_run
from trainer.report.run_files import read_finished
from trainer.run import privacy
from trainer.settings import methods
from trainer.settings.methods import DP_SGD, complete, gradients_text

Description = tuple[dict[str, Any], str]
_NOISE = "noise_multiplier"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What to state.

    Attributes:
      delta: Of the statement; that of a run if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      cross_check: Whether to add the epsilon of other software.
      trade_off: Whether to add error rates of membership tests.
      relation: Neighbouring relation; None for zero-out.
      max_examples_per_user: k of the claim; None for 1.
    """

    delta: float | None = None
    allow_large_delta: bool = False
    cross_check: bool = False
    trade_off: bool = False
    relation: str | None = None
    max_examples_per_user: int | None = None

    @property
    def claim(self) -> dict[str, Any]:
        """The claim, by the names of arguments of the accountant."""
        count = self.max_examples_per_user
        return {
            "delta": self.delta,
            "allow_large_delta": self.allow_large_delta,
            "neighboring_relation": self.relation or REPLACE_SPECIAL,
            "max_examples_per_user": 1 if count is None else count,
        }


def of_run(run: Path, asked: Asked) -> Description:
    """Returns the statement of a run, as JSON and as text.

    Args:
      run: A folder that ``dpsgd train`` wrote.
      asked: What to state.

    Raises:
      InputError: the run is refused, or dp_accounting has no event for it.
    """
    record, manifest = read_finished(run)
    claim = asked.claim
    relation, count = claim["neighboring_relation"], claim["max_examples_per_user"]
    if asked.cross_check:
        most = max(count, privacy.count_of(manifest.dataset))
        theorem = privacy.theorem_of_run(record)
        plan = plan_of_all(manifest.plan, record.of_runs, theorem)
        cross_check.ask(plan, 1.0, relation, most, theorem)
    statement = privacy.run_statement(
        record, manifest, certificate=read_certificate(run), **claim
    )
    return _describe(statement, asked)


def of_runs(runs: Sequence[Path], asked: Asked) -> Description:
    """Returns what several runs on one table are together, as JSON and as text.

    Epsilons and deltas add, also where a run was chosen after results of earlier ones
    were seen (Dwork and Roth 2014, Theorem 3.16, and Rogers et al. 2016,
    arXiv:1605.08294), if each samples by itself: a row that was drawn once for two runs
    shows more of itself.  The total has to be fixed before the first run: adding until
    a result pleases has no epsilon that was proven beforehand.  At most N runs that
    were declared together (``of_runs``), with one plan and noise, count once.

    Args:
      runs: Folders that ``dpsgd train`` wrote.
      asked: What to state; nothing is added to the statements of several runs.

    Raises:
      InputError: a run is refused or named twice, runs share batches, the units
        differ, or the deltas add up to a large one.
    """
    if asked.cross_check or asked.trade_off:
        raise InputError(
            "Expected no --cross-check or --trade-off of several runs: they are of "
            "one. Omit them, or name one run."
        )
    if len({run.resolve() for run in runs}) < len(runs):
        raise InputError("Expected each run once. Omit the second.")
    said = {str(run): of_run(run, asked) for run in runs}
    each = {name: fields for name, (fields, _) in said.items()}
    records = [read_run(run)[0] for run in runs]
    keys = [record.key_name for record in records if record.key_name]
    ids = [record.batches_id for record in records]
    if any(len({*names}) < len(names) for names in (ids, keys)):
        raise InputError(
            "Expected batches of its own for each run: two of these share theirs, or "
            "their key, so that rows were drawn once and not twice, and epsilons do "
            "not add. Omit one of them: together with it nothing is proven."
        )
    declared = collections.Counter(
        (_proven(name, f), f["delta"], f["of_runs"], f["plan_fingerprint"], f[_NOISE])
        for name, f in each.items()
    )
    shares = [(-(-count // key[2]), key) for key, count in declared.items()]
    epsilon = sum(times * key[0] for times, key in shares)
    delta = sum(times * key[1] for times, key in shares)
    check_claimed_delta(delta, allow_large=asked.allow_large_delta)
    units = {(f["privacy_unit"], f["neighboring_relation"]) for f in each.values()}
    if len(units) > 1:
        raise InputError(
            "Expected runs of one privacy unit and relation: "
            + "; ".join(f"{unit}, {relation}" for unit, relation in sorted(units))
            + ". Account for them one by one."
        )
    [(unit, relation)] = units
    claim = (
        f"These {len(runs)} runs together are ({upper_text(epsilon)}, {delta!r})"
        f"-differentially private under the {NAMES[relation]} relation for {unit}, an "
        "upper bound, whatever was chosen from earlier ones."
    )
    fields = {"claim": claim, "epsilon": epsilon, "delta": delta, "runs": each}
    texts = [f"{name}\n{text}" for name, (_, text) in said.items()]
    return fields, "\n\n".join([claim, *texts])


def _proven(name: str, fields: dict[str, Any]) -> float:
    if not fields["is_guarantee"]:
        raise InputError(
            f"Expected a guarantee of each run; {name} has none. Omit it: together "
            "with it nothing is proven."
        )
    found: float = fields["epsilon"]
    return found


def of_plan(
    plan: DpSgdPlan,
    noise_multiplier: float,
    of_method: dict[str, Any],
    clip: float | None,
    asked: Asked,
) -> Description:
    """Returns the statement of a plan, as JSON and as text.

    Args:
      plan: The plan.
      noise_multiplier: Its noise.
      of_method: Settings of a method.
      clip: Clip norm, which they need.
      asked: What to state, with a delta.

    Raises:
      InputError: a setting is refused, or dp_accounting has no event for the plan.
    """
    method, settings = _method(of_method, clip)
    theorem = methods.theorem_of(method, settings, AUTO_CLIP if clip is None else clip)
    claim = asked.claim
    if asked.cross_check:
        relation, count = claim["neighboring_relation"], claim["max_examples_per_user"]
        cross_check.ask(plan, 1.0, relation, count, theorem)
    statement = privacy.plan_statement(
        plan,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=clip,
        gradients=gradients_text(method, settings),
        theorem=theorem,
        **claim,
    )
    return _describe(statement, asked)


def _method(given: dict[str, Any], clip: float | None) -> tuple[str, dict[str, Any]]:
    """Returns the method whose settings are given, with all settings; else DP-SGD."""
    if not given:
        return DP_SGD, {}
    first = next(iter(given))
    method = methods.owners()[first]
    settings = complete(method, given)
    if clip is None:
        raise InputError(f"{first}={given[first]} needs --l2-norm-clip. Add it.")
    return method, settings


def _describe(statement: PrivacyStatement, asked: Asked) -> Description:
    fields, text = statement.to_json(), statement.to_text().rstrip("\n")
    if asked.trade_off:
        found = _trade_off(statement)
        fields["trade_off"] = found.to_json(profiles.CURVE_RATES)
        text += f"\n{_table(found)}"
    if asked.cross_check:
        opinion = cross_check.second_opinion(
            statement.plan_of_all,
            noise_multiplier=statement.noise_multiplier,
            delta=statement.delta,
            neighboring_relation=statement.neighboring_relation,
            max_examples_per_user=statement.max_examples_per_user,
        )
        fields["cross_check"] = dataclasses.asdict(opinion)
        text += f"\n{opinion.to_text()}"
    return fields, text


def _trade_off(statement: PrivacyStatement) -> TradeOff:
    if statement.theorem is not None:
        # Only the claim itself is proven.
        return statement.trade_off or TradeOff(())
    return profiles.trade_off(
        statement.plan_of_all,
        noise_multiplier=statement.noise_multiplier,
        neighboring_relation=statement.neighboring_relation,
        max_examples_per_user=statement.max_examples_per_user,
    )


def _table(found: TradeOff) -> str:
    mu = "" if found.mu is None else f"; {upper_text(found.mu)}-GDP"
    lines = [f"  trade-off   wrong about unused -> right about used, at most{mu}"]
    for rate in profiles.CURVE_RATES:
        most = profiles.percent_up(found.true_positive_rate(rate))
        lines.append(f"    {100 * rate:9.3g} % -> {most}")
    return "\n".join(lines)
