"""Batches and runs of an experiment: what is made again, and what is refused."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.experiments.conftest import NUM_EXAMPLES, Work
from trainer.core.run.run_record import read_run
from trainer.experiments.comparison.case import Trial
from trainer.experiments.comparison.runs import Runs, silent
from trainer.settings.comparison_settings import ComparisonSettings, Experiment
from trainer.settings.train_settings import TrainSettings

BATCHES = "truncated-poisson-seed0"
SETTINGS = TrainSettings(
    noise_multiplier=0.9, l2_norm_clip=1.0, target_delta=0.001, hidden=(4,),
    embedding_dim=2, eval_every=100,
)  # fmt: skip


def _trial(**changes: Any) -> Trial:
    settings = dataclasses.replace(SETTINGS, **changes)
    return Trial(name="dp-sgd", batches=BATCHES, settings=settings)


@pytest.fixture
def runs(tmp_path: pathlib.Path, small_batches: Any, held_out: pathlib.Path) -> Runs:
    out = tmp_path / "out"
    shutil.copytree(small_batches.path, out / "batches" / BATCHES)
    return Runs(Experiment(source="", held_out=held_out, out=out), silent)


def test_a_finished_run_is_not_made_again(
    runs: Runs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs.run(_trial())
    monkeypatch.setattr(
        "trainer.experiments.comparison.runs.train_here",
        lambda request: pytest.fail("trained again"),
    )
    assert runs.run(_trial()) == first
    record, _ = read_run(tmp_path / "out" / "runs" / _trial().name)
    assert record.noise_multiplier == 0.9


def test_a_run_of_other_settings_is_refused(runs: Runs, tmp_path: pathlib.Path) -> None:
    runs.run(_trial())
    for changed in ({"noise_multiplier": 2.0}, {"hidden": (5,)}, {"init_seed": 1}):
        with pytest.raises(InputError, match="to have the settings given now"):
            runs.run(_trial(**changed))
    path = tmp_path / "out" / "runs" / f"{_trial().name}.settings.json"
    path.unlink()
    with pytest.raises(InputError, match="to hold the settings of the finished run"):
        runs.run(_trial())


def test_a_finished_run_of_code_that_was_edited_is_refused(
    runs: Runs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "share_of_ones.py"
    code.write_text(
        "def share(labels, predictions):\n    return float(labels.mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    trial = _trial(metric="share_of_ones:share")
    first = runs.run(trial)
    code.write_text(code.read_text() + "# and more\n")
    with pytest.raises(InputError, match=r"share_of_ones\.py"):
        runs.run(trial)
    code.write_text(code.read_text().removesuffix("# and more\n"))
    assert runs.run(trial) == first


def test_batches_of_another_plan_are_refused(
    make_settings: Callable[..., ComparisonSettings], work: Work
) -> None:
    runs = Runs(make_settings(), silent)
    batches = BatchSettings(expected_batch_size=20, num_epochs=1)
    runs.make_batches("b", batches, batches.plan(NUM_EXAMPLES))
    runs.make_batches("b", batches, batches.plan(NUM_EXAMPLES))
    assert work.batches == ["b"]
    for changed in ({"expected_batch_size": 40}, {"num_epochs": 2}, {"epsilon": 60.0}):
        other = dataclasses.replace(batches, **changed)
        with pytest.raises(InputError, match="to have the requested plan"):
            runs.make_batches("b", other, other.plan(NUM_EXAMPLES))
