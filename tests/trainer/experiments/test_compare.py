"""Comparisons: what they report, what they make again, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from accounting import accountant
from accounting.validation import InputError
from pipelines.batches.manifest import read_manifest
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.conftest import write_held_out
from trainer.cli import experiment_body
from trainer.cli.compare_commands import compare
from trainer.experiments import compare as library
from trainer.experiments import compare_report
from trainer.experiments.compare import (
    Comparison,
    Outcome,
    Trial,
    settings_path,
    silent,
    summarise,
)
from trainer.run.run_record import read_run
from trainer.settings.comparison_settings import ComparisonSettings, Experiment
from trainer.settings.train_settings import TrainSettings

ROOT = pathlib.Path(__file__).parents[3]
SMALL = ["--hidden=4", "--embedding-dim=2", "--eval-every=100"]
SETTINGS = TrainSettings(
    noise_multiplier=0.9, l2_norm_clip=1.0, target_delta=0.001, hidden=(4,),
    embedding_dim=2, eval_every=100,
)  # fmt: skip
#: As a comparison of an earlier release said it.
FLAGS = ("--noise-multiplier=0.9", "--l2-norm-clip=1.0", "--delta=0.001", *SMALL)


def _trial(**changes: Any) -> Trial:
    names = {field.name for field in dataclasses.fields(Trial)}
    given = {name: changes.pop(name) for name in names & set(changes)}
    settings = dataclasses.replace(SETTINGS, **changes)
    fields = {"sampler": "truncated-poisson", "epsilon": 3.0, "seed": 0}
    return Trial(**{**fields, "settings": settings, **given})


def _result(auc: float, *, ema: float | None = None, **privacy: Any) -> dict[str, Any]:
    aggregates = {} if ema is None else {"ema": {"auc": ema, "log_loss": None}}
    return {
        "metrics": {"auc": auc, "log_loss": 0.5, "aggregates": aggregates},
        "privacy": {
            "noise_multiplier": 0.9,
            "epsilon": 2.5,
            "epsilon_lower_bound": 2.0,
            **privacy,
        },
    }


def test_summarise_reports_every_group_with_mean_and_standard_deviation() -> None:
    results = [
        (_trial(seed=0), _result(0.7, ema=0.5)),
        (_trial(seed=1), _result(0.8, ema=0.7, epsilon=2.75)),
        (
            _trial(settings=TrainSettings(method="non-private"), epsilon=None),
            _result(0.9),
        ),
    ]
    last, ema, plain = summarise(results, metric="auc")
    assert (last.weights, ema.weights, plain.weights) == ("last", "ema", "last")
    assert last.mean == pytest.approx(0.75)
    assert last.stddev == pytest.approx(np.sqrt(0.005))
    assert last.num_seeds == 2
    assert last.epsilon == 2.75  # the weakest of the statements
    assert ema.mean == pytest.approx(0.6)
    assert (plain.epsilon, plain.noise_multiplier, plain.stddev) == (None, None, None)


def test_one_seed_without_a_guarantee_leaves_none_for_the_group() -> None:
    results = [(_trial(), _result(0.7, epsilon=None)), (_trial(), _result(0.7))]
    assert summarise(results, metric="auc")[0].epsilon is None


def test_an_unknown_metric_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(InputError, match=r"metric='f1'.*auc, log_loss"):
        summarise([(_trial(), _result(0.7))], metric="f1")


def test_printed_bounds_are_rounded_to_the_safe_side() -> None:
    outcome = summarise(
        [(_trial(), _result(0.7, epsilon=2.501, epsilon_lower_bound=1.999))],
        metric="auc",
    )
    text = compare_report.markdown(outcome, title="t", picture="p.png")
    assert "| 2.51 | 1.99 |" in text


@pytest.fixture
def comparison(
    tmp_path: pathlib.Path, small_batches: Any, held_out: pathlib.Path
) -> Comparison:
    out = tmp_path / "out"
    shutil.copytree(small_batches.path, out / "batches" / "truncated-poisson-seed0")
    return Comparison(Experiment(source="", held_out=held_out, out=out), silent)


def test_a_finished_run_is_not_made_again(
    comparison: Comparison, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = comparison.run(_trial())
    monkeypatch.setattr(
        "trainer.experiments.compare._train",
        lambda request: pytest.fail("trained again"),
    )
    assert comparison.run(_trial()) == first
    record, _ = read_run(tmp_path / "out" / "runs" / _trial().name)
    assert record.noise_multiplier == 0.9


def test_a_run_of_other_settings_is_refused(
    comparison: Comparison, tmp_path: pathlib.Path
) -> None:
    comparison.run(_trial())
    for changed in ({"noise_multiplier": 2.0}, {"hidden": (5,)}, {"init_seed": 1}):
        with pytest.raises(InputError, match="settings that are asked for"):
            comparison.run(_trial(**changed))
    path = tmp_path / "out" / "runs" / f"{_trial().name}.settings.json"
    path.unlink()
    with pytest.raises(InputError, match="to say what the finished run"):
        comparison.run(_trial())


def test_what_an_earlier_release_was_asked_in_flags_is_known(
    comparison: Comparison, tmp_path: pathlib.Path, held_out: pathlib.Path
) -> None:
    out = tmp_path / "out"
    run = out / "runs" / _trial().name
    first = comparison.run(_trial())
    settings_path(run).unlink()
    arguments = [
        f"--batches={out}/batches/truncated-poisson-seed0", f"--eval={held_out}",
        f"--out={run}", "--method=dp-sgd", "--init-seed=0", *FLAGS,
    ]  # fmt: skip
    run.with_name(f"{run.name}.flags.json").write_text(json.dumps(arguments))
    experiment_body._take_over(out)
    assert comparison.run(_trial()) == first
    with pytest.raises(InputError, match="settings that are asked for"):
        comparison.run(_trial(noise_multiplier=2.0))


def test_a_finished_run_of_code_that_was_edited_is_refused(
    comparison: Comparison, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "share_of_ones.py"
    code.write_text(
        "def share(labels, predictions):\n    return float(labels.mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    trial = _trial(metric="share_of_ones:share")
    first = comparison.run(trial)
    code.write_text(code.read_text() + "# and more\n")
    with pytest.raises(InputError, match=r"share_of_ones\.py"):
        comparison.run(trial)
    code.write_text(code.read_text().removesuffix("# and more\n"))
    assert comparison.run(trial) == first


def _compare(*arguments: str) -> Result:
    return CliRunner().invoke(compare, list(arguments))


@pytest.mark.thorough
def test_shuffled_batches_of_the_same_noise_show_their_larger_epsilon(
    tmp_path: pathlib.Path,
    rows: Callable[..., np.ndarray],
    held_out: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    source = write_held_out(tmp_path / "train", rows(400))
    common = [
        f"--input={source}", f"--eval={held_out}", f"--out={tmp_path / 'out'}",
        "--batch-size=20", "--epochs=1", "--epsilon=2", "--delta=1e-3", "--seeds=1",
        "--method=dp-sgd", "--l2-norm-clip=1",
    ]  # fmt: skip
    result = _compare(*common, *SMALL, "--json")
    assert result.exception is None, result.output
    poisson, shuffled = (Outcome(**fields) for fields in json.loads(result.stdout))
    assert poisson.sampler == "truncated-poisson"
    assert poisson.epsilon is not None
    assert 1.9 < poisson.epsilon <= 2
    assert shuffled.noise_multiplier == poisson.noise_multiplier
    # Against the accountant, asked directly.
    plan = read_manifest(tmp_path / "out/batches/dynamic-shuffle-seed0").plan
    found = accountant.epsilon(
        plan, noise_multiplier=shuffled.noise_multiplier, delta=1e-3
    )
    assert shuffled.epsilon == pytest.approx(found.upper)
    assert shuffled.epsilon_lower_bound == pytest.approx(found.lower)
    assert found.lower > poisson.epsilon
    for name in ("comparison.json", "comparison.md", "comparison.png"):
        assert (tmp_path / "out" / name).stat().st_size
    assert (tmp_path / "out/comparison.png").read_bytes().startswith(b"\x89PNG")
    # The library, asked for the same, finds all runs done.
    monkeypatch.setattr(library, "_train", lambda request: pytest.fail("trained"))
    small = dataclasses.replace(SETTINGS, noise_multiplier=None, target_epsilon=2.0)
    settings = ComparisonSettings(
        source=str(source), held_out=held_out, out=tmp_path / "out", seeds=1,
        batches=BatchSettings(expected_batch_size=20, num_epochs=1, epsilon=2.0),
        trained=(small,),
    )  # fmt: skip
    assert library.compare(settings) == [poisson, shuffled]
    # Finished batches of another size are not what is asked for.
    for batches in ({"expected_batch_size": 40}, {"num_epochs": 2}):
        changed = dataclasses.replace(settings.batches, **batches)
        with pytest.raises(InputError, match="to be of the plan that is asked for"):
            library.compare(dataclasses.replace(settings, batches=changed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=0"], "epsilon=0"),
        (["--epsilon=1", "--seeds=0"], "seeds=0"),
        (["--epsilon=1", "--no-such-flag=3"], "no-such-flag"),
        (["--epsilon=1", "--learning-rate=-1"], "learning_rate=-1"),
        (["--epsilon=1", "--for", "non-private", "--hidden a"], "hidden='a'"),
        (["--epsilon=1", "--method=model-mix"], "no --method model-mix"),
        (["--epsilon=1", "--method=dp-sgd", "--for", "non-private", ""], "--for"),
        (["--epsilon=1", "--batches=/elsewhere"], "no --batches=/elsewhere"),
        (["--epsilon=1", "--init-seed", "5"], "no --init-seed"),
        (["--epsilon=1", "--noise-multiplier=9"], "no --noise-multiplier=9"),
        (["--epsilon=1", "--", "--epsilon=9"], "no --epsilon=9"),
        (
            ["--epsilon=1", "--for", "dp-sgd", "--checkpoint-every=9"],
            "--checkpoint-every to be those of all methods",
        ),
        (["--epsilon=1", "--csv=a.csv"], "no --csv=a.csv"),
        (["--epsilon=1", "--tensorboard=board"], "no --tensorboard=board"),
        (["--epsilon=1", "--simulates=much"], "no --simulates=much"),
        (["--epsilon=1", "--for", "dp-sgd", "--init-seed=5"], "no --init-seed=5"),
        (["--epsilon=1", "--for", "dp-sgd", "--hidden 4 --delta .1"], "no --delta"),
        (["--epsilon=1", "--for", "dp-sgd", "--out=x"], "no --out=x"),
        (["--epsilon=1", "--for", "dp-sgd", "--eval=x"], "no --eval=x"),
        (["--epsilon=1", "--for", "dp-sgd", "--method=bam"], "no --method=bam"),
        (["--epsilon=1", "--metric=f1"], "metric='f1' to be one of auc, log_loss"),
        (["--epsilon=1", "--loss=huber"], "metric='auc' to be one of loss"),
        (
            ["--epsilon=1", "--metric=f1", "--", "--metric=statistics:mean"],
            "metric='f1' to be one of auc, log_loss, accuracy, mean",
        ),
        (["--epsilon=1", "--eval=s3://bucket/test"], "eval=s3:/bucket/test on this"),
        (["--epsilon=1", "--out=s3://bucket/out"], "out=s3:/bucket/out on this"),
    ],
)
def test_what_training_would_refuse_is_refused_before_any_batch_is_made(
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _compare(
        f"--input={tmp_path}", f"--eval={tmp_path}", f"--out={tmp_path / 'out'}",
        "--batch-size=20", "--epochs=1", "--delta=1e-3", "--l2-norm-clip=1", *arguments,
    )  # fmt: skip
    assert isinstance(result.exception, InputError), result.output
    assert message in str(result.exception)
    assert not any(tmp_path.iterdir())


def test_held_out_files_that_are_sampled_from_are_refused_before_any_batch_is_made(
    tmp_path: pathlib.Path, rows: Any
) -> None:
    source = write_held_out(tmp_path / "train", rows(400))
    result = _compare(
        f"--input={source}", f"--eval={source}", f"--out={tmp_path / 'out'}",
        "--batch-size=20", "--epochs=1", "--epsilon=2", "--delta=1e-3", "--seeds=1",
        "--l2-norm-clip=1", *SMALL,
    )  # fmt: skip
    assert isinstance(result.exception, InputError), result.output
    assert "no training examples" in str(result.exception)
    assert not (tmp_path / "out").exists()


PRIVATE = TrainSettings(target_epsilon=2.0, target_delta=1e-3, l2_norm_clip=1.0)


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        ((), "to compare; got none"),
        ((SETTINGS,), "Expected target_epsilon"),
        ((dataclasses.replace(PRIVATE, init_seed=3),), "no init_seed=3"),
        ((dataclasses.replace(PRIVATE, simulates="much"),), "no simulates='much'"),
        ((PRIVATE, dataclasses.replace(PRIVATE, target_delta=1e-4)), "as that of all"),
    ],
)
def test_settings_that_cannot_be_compared_are_refused(
    trained: tuple[TrainSettings, ...], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(InputError, match=message):
        ComparisonSettings(
            source="", held_out=tmp_path, out=tmp_path, trained=trained,
            batches=BatchSettings(expected_batch_size=20, num_epochs=1),
        )  # fmt: skip
