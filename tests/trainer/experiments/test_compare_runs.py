"""Batches and runs of an experiment: what is made again, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.conftest import make_rows, write_batches, write_held_out
from tests.trainer.experiments.conftest import NUM_EXAMPLES, Work
from trainer.core.run.run_record import read_run
from trainer.experiments.comparison_runs import Runs, Trial, settings_path, silent
from trainer.settings.requests import ComparisonSettings, Experiment
from trainer.settings.train_settings import TrainSettings

BATCHES = "truncated-poisson-seed0"
SETTINGS = TrainSettings(
    noise_multiplier=0.9, l2_norm_clip=1.0, target_delta=0.001, hidden=(4,),
    embedding_dim=2, eval_every=100, metric="share_of_ones:share",
)  # fmt: skip


CODE = "def share(labels, predictions):\n    return float(labels.mean())\n"


def _trial(**changes: Any) -> Trial:
    settings = dataclasses.replace(SETTINGS, **changes)
    return Trial(name="dp-sgd", batches=BATCHES, settings=settings)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Runs, dict[str, Any], pathlib.Path]]:
    """A run with a metric of the user's, its result, and the code of the metric.

    Each test leaves the run as it was.
    """
    folder = tmp_path_factory.mktemp("finished")
    code = folder / "share_of_ones.py"
    code.write_text(CODE)
    batches = [make_rows(size, size) for size in (8, 5)]
    write_batches(folder / "out" / "batches" / BATCHES, batches)
    held_out = write_held_out(folder / "held_out", make_rows(300, seed=99))
    runs = Runs(Experiment(source="", held_out=held_out, out=folder / "out"), silent)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield runs, runs.run(_trial()), code


def test_a_finished_run_is_not_made_again(
    finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, first, _ = finished
    monkeypatch.setattr(
        "trainer.experiments.comparison_runs.train_here",
        lambda request: pytest.fail("trained again"),
    )
    assert runs.run(_trial()) == first
    record, _ = read_run(runs.request(_trial()).run)
    assert record.noise_multiplier == 0.9


def test_the_epsilon_of_a_run_is_that_of_its_record(finished: Any) -> None:
    """Seen to fail: it was what ``privacy.json`` said, which is public."""
    runs, first, _ = finished
    run = runs.request(_trial()).run
    record, stated = run / "run_record.json", run / "privacy.json"
    before = record.read_text(), stated.read_text()
    stated.write_text('{"epsilon": 0.01}')
    assert runs.run(_trial()) == first
    assert first["privacy"]["epsilon"] == json.loads(before[1])["epsilon"]
    record.write_text(before[0].replace("0.9", "9.0"))
    with pytest.raises(InputError, match="have changed since"):
        runs.run(_trial())
    record.write_text(before[0])
    stated.write_text(before[1])


def test_a_run_of_other_settings_is_refused(finished: Any) -> None:
    runs, _, _ = finished
    for changed in ({"noise_multiplier": 2.0}, {"hidden": (5,)}, {"init_seed": 1}):
        with pytest.raises(InputError, match="to have the settings given now"):
            runs.run(_trial(**changed))
    path = settings_path(runs.request(_trial()).run)
    aside = path.rename(path.with_suffix(".aside"))
    with pytest.raises(InputError, match="to hold the settings of the finished run"):
        runs.run(_trial())
    aside.rename(path)


def test_batches_of_another_plan_of_other_rows_or_of_one_key_are_refused(
    make_settings: Callable[..., ComparisonSettings],
    rows: Callable[..., np.ndarray],
    tmp_path: pathlib.Path,
    work: Work,
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
    source = write_held_out(tmp_path / "other", rows(NUM_EXAMPLES, seed=9))
    others = Runs(make_settings(source=str(source)), silent)
    with pytest.raises(InputError, match=r"rows of .*/other as it is now"):
        others.make_batches("b", batches, batches.plan(NUM_EXAMPLES))
    shutil.copytree(tmp_path / "out/batches/b", tmp_path / "out/batches/copied")
    with pytest.raises(InputError, match=r"that of b, and the epsilons .* do not add"):
        runs.make_batches("copied", batches, batches.plan(NUM_EXAMPLES))
