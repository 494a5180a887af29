"""Every command that a page prints works, and says what the page says."""

from __future__ import annotations

import html
import pathlib
import re
import shlex
import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

import dpsgd
from accounting.auditing import audit
from accounting.core import sampler_registry
from accounting.core.plan import SAMPLERS, DpSgdPlan
from tests.sampler_fields import needed
from tests.trainer.html_report.conftest import of_users
from trainer.html_report.facts import collect
from trainer.html_report.page import render
from trainer.settings import requests

SMALL = {"num_examples": 60, "expected_batch_size": 10, "num_steps": 7, "num_epochs": 1}


def small(sampler: str, **changes: Any) -> DpSgdPlan:
    """A plan of few steps, whose steps do not fill its epoch if they need not."""
    rules, fields = sampler_registry.rules(sampler), dict[str, Any](SMALL)
    if rules.once_per_epoch:
        fields["num_steps"] = 6
    if rules.truncates:
        fields |= {"num_steps": 2}
    fields |= needed(sampler, cap=30)
    return DpSgdPlan(sampler=sampler, **{**fields, **changes})


def users(rows: int, **more: Any) -> dict[str, Any]:
    return {"dataset": of_users(rows, num_examples=60, **more)}


FIT = {
    "first_step": 0, "class_weight": {}, "sample_weight": None,
    "non_private_training_metrics": False,
    "ended": True,
}  # fmt: skip
FITTED = {"model": {"name": "model", "fits": [FIT]}}
MIX = {
    "method": "model-mix",
    "method_settings": {"mix_width": 0.1, "linf_factor": 4},
}
LARGE = {"target_delta": 0.02}
#: Kind of run -> how `make_run` makes one.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"plan": small(name)} for name in SAMPLERS},
    "two epochs": {"plan": small("poisson", num_steps=12, num_epochs=2)},
    "a few rows of each user": {"plan": small("poisson"), **users(2)},
    "capped rows of users": {"plan": small("truncated-poisson"), **users(2)},
    # So small a cap that zero-out and add-or-remove have other epsilons.
    "one row of each user": {
        "plan": small("truncated-poisson", truncated_batch_size=12), **users(1),
    },
    "users as examples": {
        "plan": small("truncated-poisson"), **users(8, sampled="users"),
        "model": {"name": "model", "rows_per_user": 8},
    },
    "balls and bins of users": {
        "plan": small("balls-and-bins"), **users(8, sampled="users"),
    },
    "make_private": {"plan": small("poisson"), **FITTED},
    "make_private, stopped": {
        "plan": small("poisson"), **FITTED, "num_steps_executed": 3, "complete": False,
    },
    "model-mix": {"plan": small("poisson"), **MIX},
    "bam": {
        "plan": small("poisson"), "method": "bam",
        "method_settings": {"bam_radius": 0.1, "bam_variant": "sam"},
    },
    "the best of several": {
        "plan": small("poisson"), "selection": {"num_runs": 4, "shape": 1.0},
    },
    "a large delta": {"plan": small("poisson"), **LARGE},
    "no noise": {"plan": small("poisson"), "noise_multiplier": 0.0},
}  # fmt: skip


def commands_of(page: str) -> list[list[str]]:
    """The words of every command of a page, as a reader would copy them."""
    blocks = re.findall(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    return [shlex.split(html.unescape(re.sub("<[^>]+>", "", b))) for b in blocks]


def epsilon_of(page: str) -> str:
    """Epsilon in the head of a page; empty if it claims none."""
    found = re.search(r"epsilon \(ε\)</dt><dd>(?:≤ )?([\d.]+)</dd>", page)
    return found[1] if found else ""


def check_output(words: list[str], output: str, page: str) -> None:
    """Checks what a command printed against the page that named it."""
    epsilon = epsilon_of(page)
    if words[1] == "audit":
        [claimed] = re.findall(r"epsilon <= ([\d.]+) at delta", output)
        assert claimed == epsilon
        assert set(re.findall(r"<= ([\d.]+) *\n", output)) >= {epsilon}
    elif epsilon:
        assert f"is ({epsilon}, " in output.splitlines()[0]
    else:
        assert output.startswith("No guarantee is claimed")
        assert output.splitlines()[0] in html.unescape(page)


@pytest.mark.parametrize("kind", KINDS)
def test_every_printed_command_says_what_the_page_says(
    kind: str,
    make_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = dict(KINDS[kind])
    run = make_run("my run", **made)
    page = render(collect(run))
    monkeypatch.chdir(run.parent)
    commands = check_commands(page, monkeypatch)
    has_audit = ["audit" in words for words in commands]
    claims = bool(epsilon_of(page))
    # Seen to fail: of the best of several, the audit was of one run's claim.
    audited = made.get("method") != "model-mix" and not made.get("selection")
    assert any(has_audit) == (claims and made.get("complete", True) and audited)


def check_commands(page: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Executes every command of a page, and returns them all."""
    # The command is the printed one; its default number of trials is smaller, and the
    # profiles have fewer points.
    monkeypatch.setattr(requests, "TRIALS", 200)
    monkeypatch.setattr(audit, "_PROFILE_POINTS", 3)
    commands = commands_of(page)
    for words in commands[:-1]:
        assert words[0] == "dpsgd"
        done = CliRunner().invoke(dpsgd.cli, words[1:])
        assert done.exit_code == 0, done.output
        check_output(words, done.stdout, page)
    check_digests(commands[-1], page)
    return commands


def check_digests(words: list[str], page: str) -> None:
    assert words[0] == "sha256sum"
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == page.count("</th><td><code>") - 3
    for line in lines:
        digest, name = line.split(maxsplit=1)
        assert f"{pathlib.Path(name).name}</th><td><code>{digest}</code>" in page
