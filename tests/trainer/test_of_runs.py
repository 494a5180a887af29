"""Runs that are declared together: each has the noise for all, and says so."""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
import re
import shlex
from typing import Any

import pytest

from accounting.core import accountant
from accounting.core.intervals import upper_text
from accounting.core.plan import DpSgdPlan
from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import InputError
from pipelines.core.users import Bounded
from tests.command_line import invoke
from tests.trainer.conftest import make_rows, write_held_out, write_run_folder
from tests.trainer.run.whole_runs import private_settings
from trainer.core.tf_compat import keras
from trainer.html_report import page
from trainer.keras_model import make_private
from trainer.releases import evaluate
from trainer.releases.evaluate import EvaluationPrice
from trainer.run import preflight
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

RUNS, EPSILON, DELTA = 4, 9.0, 1e-3


def declared(**changes: Any) -> TrainSettings:
    target = {"noise_multiplier": None, "target_epsilon": EPSILON}
    settings = private_settings(of_runs=RUNS, target_delta=DELTA)
    return dataclasses.replace(settings, **{**target, **changes})


def of_all(plan: DpSgdPlan) -> DpSgdPlan:
    steps, epochs = plan.num_steps * RUNS, plan.num_epochs * RUNS
    return dataclasses.replace(plan, num_steps=steps, num_epochs=epochs)


@pytest.fixture
def least_noise(small_batches: Any) -> float:
    """Of each of the runs, for the target of all together."""
    asked = {"epsilon": EPSILON, "delta": DELTA}
    plan = of_all(small_batches.manifest.plan)
    return accountant.noise_multiplier(plan, **asked).guarantee


def test_noise_record_statement_page_and_metrics_are_of_all_runs(
    small_batches: Any, least_noise: float, tmp_path: pathlib.Path
) -> None:
    """Seen to fail where one of the five forgot the number of runs."""
    run, plan = tmp_path / "run", small_batches.manifest.plan
    train(
        Request(settings=declared(), batches=small_batches.path, held_out=None, run=run)
    )
    record = json.loads((run / "run_record.json").read_bytes())
    assert (record["of_runs"], record["noise_multiplier"]) == (RUNS, least_noise)
    stated = json.loads(invoke(["account", str(run), "--json"]).stdout)
    exact = accountant.epsilon(
        of_all(plan), noise_multiplier=least_noise, delta=DELTA
    ).guarantee
    assert stated["epsilon"] == exact <= EPSILON
    assert stated["of_runs"] == RUNS
    assert json.loads((run / "privacy.json").read_bytes())["claim"] == stated["claim"]

    found = page.write_report(run, tmp_path / "page.html")
    text = re.sub(r"<[^>]+>", " ", (tmp_path / "page.html").read_text())
    words = " ".join(html.unescape(text).split())
    assert f"≤ {upper_text(exact)} of at most 4 runs together" in words
    assert stated["claim"] in words
    assert "The model is one of at most 4 that are trained" in words
    [_, *flags] = shlex.split(found["commands"][0]["command"])[1:]
    again = json.loads(invoke(["account", *flags, "--json"]).stdout)
    assert again["epsilon"] == exact

    table = write_held_out(tmp_path / "table", make_rows(3_000, seed=7))
    price = evaluate.evaluate(run, small_batches.path, table)["evaluation"]
    assert price["noise_multiplier"] == 2 * gaussian_noise(exact, DELTA)
    both = f"({upper_text(exact)}, {DELTA!r})"
    assert f"metrics of at most 4 such runs together are {both}" in price["claim"]
    assert f"Their models and metrics together are {both}" in price["claim"]


def test_make_private_declares_runs(
    small_batches: Any, least_noise: float, tmp_path: pathlib.Path
) -> None:
    def made(**changes: Any) -> Any:
        numbers = keras.Input((13,), name="integers")
        score = keras.layers.Dense(1)(keras.ops.nan_to_num(numbers))
        given = {"epsilon": EPSILON, "delta": DELTA, "of_runs": RUNS, **changes}
        return make_private(
            keras.Model(numbers, score), batches=small_batches.path,
            run=tmp_path / "run", **given,
        )  # fmt: skip

    for changes, message in (
        ({"batches_used_before": True}, "each of the runs has batches of its own"),
        ({"of_runs": 0}, "of_runs=0 >= 1"),
        (
            {"method": "non-private", "epsilon": None, "delta": None},
            "it has no epsilon to share",
        ),
    ):
        with pytest.raises(InputError, match=message):
            made(**changes)
    model = made()
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit()
    stated = model.privacy_statement()
    assert (stated.of_runs, stated.noise_multiplier) == (RUNS, least_noise)


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 2.0}])
def test_a_theorem_of_one_run_is_refused_before_any_work(
    noise: Any, small_batches: Any, tmp_path: pathlib.Path
) -> None:
    target = {"target_epsilon": None, **noise} if noise else {}
    mixing = {"mix_width": 0.15, "linf_factor": 100}
    settings = declared(
        method="model-mix", method_settings=mixing, optimizer="sgd", **target
    )
    request = Request(
        settings=settings, batches=small_batches.path, held_out=None,
        run=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(InputError, match="of_runs=4 to be 1 for ModelMix"):
        preflight.check(request)
    assert not (tmp_path / "run").exists()


def test_account_counts_runs_that_were_declared_together_once(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    names = []
    for number, of_runs in enumerate((2, 2, 2, 1)):
        manifest = dataclasses.replace(
            small_batches.manifest, batches_id=f"{number:032d}"
        )
        batches = dataclasses.replace(small_batches, manifest=manifest)
        key = f"{number:032d}"
        fields = {"of_runs": of_runs, "noise_multiplier": 3.0, "key_name": key}
        names.append(str(write_run_folder(tmp_path / str(number), batches, **fields)))

    def total(*runs: str) -> tuple[float, float]:
        done = invoke(["account", *runs, "--json"], catch=False)
        found = json.loads(done.stdout)
        return found["epsilon"], found["delta"]

    (of_two, delta), (of_one, _) = total(names[0]), total(names[3])
    assert of_one < of_two
    assert total(*names[:2]) == (of_two, delta)
    assert total(*names[:3]) == (2 * of_two, 2 * delta)  # a third was not declared
    assert total(names[0], names[3]) == (of_two + of_one, 2 * delta)


def test_metrics_of_users_leave_room_for_the_bounds_of_all_runs() -> None:
    bounded = Bounded(user_column="u", max_examples_per_user=5, num_examples=9_000)
    one, each = (
        EvaluationPrice.of_one(1.0, 1e-6, of_run=2.0, bounded=bounded, of_runs=count)
        for count in (1, RUNS)
    )
    assert each.noise_multiplier == 2 * one.noise_multiplier
    assert RUNS * each.of_rows == one.of_rows
