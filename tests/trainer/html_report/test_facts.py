"""Guarantees of the content of a privacy report."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.files.json_files import pretty_json
from tests.trainer.html_report.conftest import of_colours
from trainer.core.run.run_record import read_run
from trainer.html_report.facts import collect
from trainer.html_report.page import render
from trainer.run.privacy import run_statement


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


def test_epsilon_is_computed_from_record_and_manifest(make_run: Any) -> None:
    run = make_run()
    (run / "privacy.json").write_text('{"epsilon": 0.01, "claim": "perfect"}')
    statement = run_statement(*read_run(run), delta=None)
    assert collect(run)["privacy"]["statement"] == statement.to_json()
    assert collect(run, delta=1e-9)["privacy"]["statement"]["delta"] == 1e-9


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
