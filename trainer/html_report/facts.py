"""The content of a privacy report.

    RUN/run_record.json, RUN/manifest.json  what was executed, and on which batches
    RUN/certificate.json                    that the batches are certified, if they are
    RUN/metrics.json, RUN/curve.json        evaluation on held-out examples, if any

All values are named fields of these public files, or functions of such fields: equal
files have equal reports.  Epsilon is computed from record and manifest, as by ``dpsgd
account``; a command in the report states it again without the run.  The privacy unit is
the one that the batches record, and a row without a note about bounded users.  Curves
and metrics are taken only from files that say that they are of held-out examples.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import shlex
from collections.abc import Iterable
from typing import Any

from accounting.core import sampler_registry
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan, steps_and_epochs
from accounting.core.validation import LARGEST_DELTA
from accounting.profiles import RATES
from accounting.statement import PrivacyStatement
from pipelines.batches.folder import CERTIFICATE_NAME, MANIFEST_NAME, read_certificate
from pipelines.core.batches.manifest import Certificate, Manifest
from pipelines.core.users import Bounded
from trainer.core.run import run_record
from trainer.core.run.run_record import RECORD_NAME, RunRecord
from trainer.model.metrics import METRICS, in_words, metric_names
from trainer.model.rows import target_of
from trainer.report.run_files import (
    CURVE_NAME,
    METRICS_NAME,
    read_curve,
    read_finished,
    read_metrics,
    warnings,
)
from trainer.run import privacy
from trainer.settings import methods
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import MEANINGS

_AGAIN = "Anyone, from the numbers on this page alone: compute epsilon again."
_TOGETHER = "The {count} runs together are one run of as many steps or epochs."
_AS_WRITTEN = (
    "With the run's folder: check that record and manifest belong together, and state "
    "the epsilon of what was executed."
)
_ATTACK = "Attack the mechanism itself, and bound its epsilon from below."
_COMPARE = "Compare the files of the run with the fingerprints on this page."


def _to_verify(
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
        delta = _delta_flags(record, statement)
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
    if plan.bands is not None:
        flags["bands"] = plan.bands
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


def _delta_flags(record: RunRecord, statement: PrivacyStatement) -> str:
    """Returns the flags for a delta other than the run's."""
    if statement.delta == record.target_delta:
        return _allowance(statement)
    return f" --delta {statement.delta}{_allowance(statement)}"


def _allowance(statement: PrivacyStatement) -> str:
    large = statement.delta >= LARGEST_DELTA
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


def collect(
    run: pathlib.Path,
    *,
    title: str | None = None,
    together: str = "",
    delta: float | None = None,
    allow_large_delta: bool = False,
) -> dict[str, Any]:
    """Returns the content of a report, JSON-serialisable.

    Args:
      run: Folder of a finished run.
      title: Title of the page; by default it names the run's folder.
      together: Claim of all that was released with the run, as `dpsgd fit` makes it.
      delta: Delta to state epsilon at; that of the run if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.

    Raises:
      InputError: the run is not finished or was edited.
    """
    record, manifest = read_finished(run)
    plan, name = manifest.plan, run.resolve().name
    certificate = read_certificate(run)
    statement = _statement(record, manifest, delta, allow_large_delta, certificate)
    target, bounded = target_of(manifest), Bounded.of(manifest.dataset)
    protected = "rows" if bounded is None else "users"
    digests = {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest()
        for name in _READ
        if (run / name).exists()
    }
    return {
        "title": title or f"Privacy report: {name}",
        "together": together,
        "run": {each: getattr(record, each) for each in _OF_RUN},
        "target": target and {"name": target.name, "classes": [*target.classes]},
        "unit": {
            "of_users": bounded is not None,
            "rows_per_user": bounded and bounded.max_examples_per_user,
        },
        "privacy": _privacy(record, statement, protected),
        "plan": {
            **plan.to_json(),
            "sampling_probability": str(plan.sampling_probability),
            "sampling_decimal": f"{float(plan.sampling_probability):.4g}",
            "once_per_epoch": sampler_registry.rules(plan.sampler).once_per_epoch,
            "fingerprint": plan.fingerprint,
        },
        "batches": {
            "dataset": manifest.dataset.get("name"),
            "columns": [dataclasses.asdict(each) for each in manifest.columns],
            "physical_batch_size": manifest.physical_batch_size,
            "batches_id": manifest.batches_id,
            "manifest_fingerprint": manifest.fingerprint,
        },
        "training": {
            **{each: getattr(record, each) for each in _OF_TRAINING},
            "optimizer": _name_first(record.optimizer),
            "model": _name_first(record.model),
        },
        "evaluation": _evaluation(run, record),
        "commands": _to_verify(name, record, statement, digests),
        "software": record.versions,
        "files": digests,
    }


_READ = (RECORD_NAME, MANIFEST_NAME, CERTIFICATE_NAME, METRICS_NAME, CURVE_NAME)
#: Fields of the record that the page shows.
_OF_RUN = ("method", "method_settings", "num_steps_executed")
_OF_TRAINING = (
    "noise_multiplier", "l2_norm_clip", "clip_quantile", "expected_batch_size",
)  # fmt: skip


def _name_first(fields: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(fields.items(), key=lambda item: (item[0] != "name", item)))


def _statement(
    record: RunRecord,
    manifest: Manifest,
    delta: float | None,
    allow_large: bool,
    certificate: Certificate | None,
) -> PrivacyStatement | None:
    """Returns the statement; None without privacy or without a delta."""
    unstated = record.method == NON_PRIVATE or record.target_delta is None
    if delta is None and unstated:
        run_record.check_execution(record, manifest)
        return None
    found: PrivacyStatement = privacy.run_statement(
        record,
        manifest,
        delta=delta,
        # Training accepted the run's own delta.
        allow_large_delta=allow_large or delta is None,
        certificate=certificate,
    )
    return found


def _privacy(
    record: RunRecord, statement: PrivacyStatement | None, protected: str
) -> dict[str, Any]:
    private = record.method != NON_PRIVATE
    if statement is None:
        reason = privacy.NO_DELTA if private else privacy.NOT_PRIVATE
        stated: dict[str, Any] = {"reason": reason, "statement": None}
        return {"private": private, **stated, "tests": [], "weaknesses": []}
    return {
        "private": private,
        "reason": None,
        "statement": statement.to_json(),
        "tests": _tests(statement),
        "weaknesses": _weaknesses(statement, protected),
    }


def _tests(statement: PrivacyStatement) -> list[dict[str, float]]:
    if not statement.is_guarantee:
        return []
    assert statement.trade_off is not None
    most = statement.trade_off.true_positive_rate
    return [{"false_alarms": rate, "recognised_at_most": most(rate)} for rate in RATES]


def _weaknesses(statement: PrivacyStatement, protected: str) -> list[str]:
    """Returns why a guarantee protects ``protected`` little, in sentences."""
    found = [] if statement.weakness is None else [statement.weakness]
    for test in _tests(statement):
        if test["false_alarms"] == 0.01 and test["recognised_at_most"] > 0.5:
            found.append(
                f"Epsilon is large: a test that recognises most of the {protected} "
                "that were used, with false alarms for one in a hundred that were not, "
                "is not ruled out."
            )
    return found


def _evaluation(run: pathlib.Path, record: RunRecord) -> dict[str, Any] | None:
    """Returns metrics, curves and averages; None if the run was not evaluated.

    "by_fit" says whether `fit` of ``make_private`` measured them, and "step" is the
    number of steps before they were measured.
    """
    if not (run / METRICS_NAME).exists():
        return None
    metrics, curve = read_metrics(run / METRICS_NAME), run / CURVE_NAME
    names = _in_order(metric_names(metrics))
    averages, guess = metrics["aggregates"], metrics.get("guessing")
    private = metrics.get("evaluation")
    return {
        "num_examples": metrics["num_examples"],
        "by_fit": not {"guessing", "evaluation"} & set(metrics),
        "step": metrics.get("step", record.num_steps_executed),
        "last_clip": metrics.get("l2_norm_clip"),
        "metrics": {name: metrics[name] for name in names},
        "curve": read_curve(curve, names) if curve.exists() else [],
        "averages": [
            {
                "name": name,
                "meaning": MEANINGS.get(name, name),
                "metrics": {key: values.get(key) for key in names},
            }
            for name, values in averages.items()
        ],
        "guessing": guess and {key: guess.get(key) for key in names},
        "warnings": list(warnings(metrics)),
        "private": private and {name: private[name] for name in _OF_RELEASE},
        "intervals": metrics.get("intervals"),
    }


_OF_RELEASE = ("claim", "weights", "largest_loss")


def _in_order(names: list[str]) -> list[str]:
    """Returns the names of metrics in the order of ``METRICS``."""
    known = next((t for t in METRICS.values() if set(t[:2]) <= set(names)), ())
    return sorted(names, key=lambda name: (*known, name).index(name))


def title_of(metric: str) -> str:
    """Returns the name of a metric, capitalised.

    Example:
      >>> title_of("log_loss")
      'Log loss'
    """
    words = in_words(metric)
    return words[:1].upper() + words[1:]
