"""Guarantees of the content of a privacy report."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.files.json_files import pretty_json
from tests.trainer.html_report.conftest import of_colours
from trainer.core.run.run_record import read_run
from trainer.html_report.facts import collect
from trainer.html_report.page import render
from trainer.run.privacy import run_statement

STATEMENT = {
    "version", "claim", "is_guarantee", "epsilon", "epsilon_lower_bound", "delta",
    "weakness", "bound", "theorem", "lower_bound_theorem", "neighboring_relation",
    "neighboring_relation_text", "privacy_unit", "mechanism", "sampling",
    "plan_fingerprint", "of_runs", "runs",
    "sampling_probability", "noise_multiplier", "l2_norm_clip",
    "accountant", "reference_accountant", "discretization", "pessimism",
    "not_covered[]", "batches_certified", "relies_on[]",
    "attacks.membership_advantage_at_most", "attacks.mu",
    "attacks.tests[].false_positive_rate", "attacks.tests[].true_positive_rate_at_most",
    "plan.version", "plan.sampler", "plan.num_examples", "plan.expected_batch_size",
    "plan.num_steps", "plan.num_epochs", "plan.truncated_batch_size",
}  # fmt: skip
#: Everything that a report takes.  A new line here is a decision on privacy.
TAKEN = {
    "format", "version", "title", "together", "target.name", "target.classes[]",
    "unit.of_users", "unit.rows_per_user", "unit.user_is_example",
    "run.name", "run.method", "run.num_steps_executed",
    "privacy.private", "privacy.reason", "privacy.tests[].false_alarms",
    "privacy.tests[].recognised_at_most",
    *(f"privacy.statement.{name}" for name in STATEMENT),
    "plan.sampler", "plan.num_examples", "plan.expected_batch_size", "plan.num_steps",
    "plan.num_epochs", "plan.truncated_batch_size", "plan.sampling_probability",
    "plan.once_per_epoch", "plan.fingerprint",
    "batches.dataset", "batches.columns[].name", "batches.columns[].dtype",
    "batches.columns[].shape[]", "batches.physical_batch_size", "batches.num_files",
    "batches.batches_id", "batches.manifest_fingerprint",
    "training.noise_multiplier", "training.l2_norm_clip", "training.clip_quantile",
    "training.expected_batch_size", "training.target_delta",
    # Whole, as they are in the run record, which is public.
    "training.optimizer.name", "training.optimizer.learning_rate",
    "training.model.name", "software.numpy",
    "evaluation.num_examples", "evaluation.by_fit", "evaluation.step",
    "evaluation.last_clip",
    "evaluation.curve.step[]",
    *(f"evaluation.metrics.{name}" for name in ("auc", "log_loss", "accuracy")),
    *(f"evaluation.curve.metrics.{n}[]" for n in ("auc", "log_loss", "accuracy")),
    *(f"evaluation.averages[].metrics.{n}" for n in ("auc", "log_loss", "accuracy")),
    *(f"evaluation.guessing.{name}" for name in ("auc", "log_loss", "accuracy")),
    "evaluation.warnings[]",
    "evaluation.averages[].name", "evaluation.averages[].meaning",
    "evaluation.private", "evaluation.intervals",
    "evaluation.uncertainty.level", "evaluation.uncertainty.mean_width",
    "audit.notes[]", "audit.meaning", "audit.cannot_see[]",
    "audit.trials", "audit.confidence", "audit.verdict", "audit.violated",
    "audit.claim.epsilon", "audit.claim.delta", "audit.claim.noise_multiplier",
    "audit.findings[].confidence", "audit.findings[].epsilon_lower_bound",
    "commands[].purpose", "commands[].command",
    "files.run_record.json", "files.manifest.json", "files.metrics.json",
    "files.curve.json",
}  # fmt: skip


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yields the path of every leaf."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from paths(each, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list):
        for each in value:
            yield from paths(each, f"{prefix}[]")
    else:
        yield prefix


def edit(path: pathlib.Path, **changes: Any) -> None:
    path.write_bytes(pretty_json({**json.loads(path.read_bytes()), **changes}))


def plant(run: pathlib.Path, secret: float) -> None:
    """Writes a number into every place that a report must not use."""
    for name in ("training_losses.json", "realised_batch_sizes.json", "sampling.key"):
        (run / "private" / name).write_text(f'{{"loss": [{secret}]}}')
    metrics = json.loads((run / "metrics.json").read_bytes())
    metrics["aggregates"]["ema"]["training_loss"] = secret
    found = {"level": 0.9, "mean_width": 0.1, "widths": [secret]}
    more = {"uncertainty": found, "training_losses": {"by_step": [secret]}}
    edit(run / "metrics.json", **{**metrics, **more})
    points = json.loads((run / "curve.json").read_bytes())["points"]
    edit(run / "curve.json", points=[{**p, "batch_size": secret} for p in points])


def test_nothing_sensitive_is_taken(make_run: Any, audit_of: Any) -> None:
    run, secret = make_run(dataset=of_colours()), 31415.9265
    plant(run, secret)
    audit = audit_of(scores=[secret])
    edit(audit, keys=[secret])
    found = collect(run, audit=audit)
    assert set(paths(found)) == TAKEN
    for text in (json.dumps(found), render(found)):
        assert str(secret) not in text


PRIVATE = {
    "evaluation": {
        "claim": "These metrics are private.",
        "epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 3.8, "weights": "last",
        "largest_loss": 4.0, "larger_losses": 0.01,
    },
    "intervals": {"auc": [0.79, 0.83]},
    "calibration": [{"from": 0.1, "to": 0.2, "rows": 70, "ones": 0.15, "stddev": 0.1}],
}  # fmt: skip


def test_a_private_evaluation_is_shown_with_its_claim(make_run: Any) -> None:
    run = make_run()
    assert "the evaluation set, and everything" in render(collect(run))
    edit(run / "metrics.json", **PRIVATE)
    found = render(collect(run))
    for words in ("These metrics are private.", "0.7900 to 0.8300", "0.1 to 0.2"):
        assert words in found
    assert "the evaluation set, and everything" not in found


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("metrics.json", {"auc": "high"}),
        ("metrics.json", {"auc": True}),
        ("metrics.json", {"num_examples": "many"}),
        ("metrics.json", {"aggregates": {"ema": {"auc": "high"}}}),
        ("metrics.json", {"aggregates": {"ema": 1}}),
        ("metrics.json", {"aggregates": None}),
        ("curve.json", {"points": None}),
        ("curve.json", {"points": [7]}),
        ("curve.json", {"points": [{"step": 0}]}),
        ("curve.json", {"points": [{"step": 0, "auc": "high"}]}),
    ],
)  # fmt: skip
def test_edited_results_are_refused_in_one_line(
    make_run: Any, name: str, changes: dict[str, Any]
) -> None:
    run = make_run()
    edit(run / name, **changes)
    with pytest.raises(InputError, match=f"{name} to be as the run wrote it") as error:
        render(collect(run))
    assert "\n" not in str(error.value)
    for content in (b"[]", b"7", b"{", b"{}", b""):
        (run / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            render(collect(run))


def test_a_damaged_record_is_refused(make_run: Any) -> None:
    run = make_run()
    edit(run / "run_record.json", noise_multiplier=9.0)
    with pytest.raises(InputError, match="have changed since"):
        collect(run)


def test_epsilon_is_computed_from_record_and_manifest(make_run: Any) -> None:
    run = make_run()
    (run / "privacy.json").write_text('{"epsilon": 0.01, "claim": "perfect"}')
    statement = run_statement(*read_run(run), delta=None)
    assert collect(run)["privacy"]["statement"] == statement.to_json()
    assert collect(run, delta=1e-9)["privacy"]["statement"]["delta"] == 1e-9


@pytest.mark.parametrize("name", ["metrics.json", "curve.json"])
def test_curves_and_metrics_are_of_held_out_examples(make_run: Any, name: str) -> None:
    run = make_run()
    edit(run / name, examples="training")
    with pytest.raises(InputError, match=r"examples are held-out.*not private"):
        collect(run)


@pytest.mark.parametrize(
    "changes", [{"noise_multiplier": 1.1}, {"plan": 0}, {"max_examples_per_user": 3}]
)
def test_an_audit_of_another_run_is_refused(
    make_run: Any, audit_of: Any, changes: dict[str, Any]
) -> None:
    run = make_run()
    with pytest.raises(InputError, match="to be an audit"):
        collect(run, audit=audit_of(**changes))


def test_an_audit_of_one_run_is_not_of_the_best_of_several(
    make_run: Any, audit_of: Any
) -> None:
    run = make_run(selection={"num_runs": 4, "shape": 1.0})
    with pytest.raises(InputError, match="or of one of several runs"):
        collect(run, audit=audit_of())


def test_a_run_sold_under_the_claim_of_another_sampler_is_refused(
    make_run: Any, audit_of: Any
) -> None:
    run, audit = make_run(), audit_of()
    claim = json.loads(audit.read_bytes())["claim"]
    edit(audit, claim={**claim, "plan": {**claim["plan"], "sampler": "poisson"}})
    with pytest.raises(InputError, match="this run's own claim"):
        collect(run, audit=audit)


def test_equal_files_have_equal_reports(make_run: Any, tmp_path: pathlib.Path) -> None:
    run = make_run()
    copy = shutil.copytree(run, tmp_path / "elsewhere" / "run")
    assert render(collect(run)) == render(collect(copy))


def test_an_unfinished_run_is_refused(make_run: Any) -> None:
    run = make_run(complete=False, num_steps_executed=3)
    with pytest.raises(InputError, match="stopped after step 3"):
        collect(run)


@pytest.mark.parametrize("changes", [{"target_delta": None}, {}])
def test_a_run_on_other_batches_is_refused(
    make_run: Any, changes: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="The run used other batches"):
        collect(make_run(manifest_fingerprint="0" * 64, **changes))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"method": "non-private", "noise_multiplier": None, "l2_norm_clip": None,
             "target_delta": None},
            "Not private",
        ),
        ({"target_delta": None}, "No epsilon is stated"),
        ({"noise_multiplier": 0.0}, "No guarantee is claimed"),
        ({"noise_multiplier": 0.3}, "Differentially private, but weakly"),
        ({"target_delta": 0.02}, "Differentially private, but weakly"),
        ({}, "Differentially private</p>"),
    ],
)  # fmt: skip
def test_the_page_says_what_a_run_is_worth(
    make_run: Any, record: dict[str, Any], says: str
) -> None:
    text = render(collect(make_run(**record)))
    assert says in text
    assert ('class="verdict good"' in text) == (not record)
