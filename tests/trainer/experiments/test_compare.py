"""Comparisons: their noise, their runs, and their results in numbers and words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core import accountant
from accounting.core.validation import InputError
from pipelines.files.processes import StoppedError
from pipelines.job.batch_settings import BatchSettings
from tests.command_line import invoke
from tests.trainer.conftest import make_rows, write_batches, write_held_out
from tests.trainer.experiments.conftest import NUM_EXAMPLES, PRIVATE, Work
from trainer.experiments import compare as library
from trainer.experiments import comparison_runs as compare_runs
from trainer.experiments.compare import summarise
from trainer.experiments.comparison_runs import (
    ComparisonCase,
    Runs,
    Trial,
    find_cases,
    settings_path,
    silent,
)
from trainer.run import privacy
from trainer.settings.requests import ComparisonSettings, Experiment
from trainer.settings.train_settings import AUTO_LOSS, TrainSettings

NON_PRIVATE = TrainSettings(method="non-private")
MakeSettings = Callable[..., ComparisonSettings]


def _lists(make_settings: MakeSettings, **changes: Any) -> ComparisonSettings:
    """Two samplers, two sizes, two targets and no privacy: 12 cases of two seeds."""
    four = dataclasses.replace(PRIVATE, target_epsilon=4.0)
    fields: dict[str, Any] = {
        "batches": tuple(
            BatchSettings(expected_batch_size=size, num_epochs=1) for size in (20, 40)
        ),
        "trained": (PRIVATE, four, NON_PRIVATE),
        "seeds": 2,
    }
    return make_settings(**{**fields, **changes})


def test_a_comparison_of_lists_that_was_stopped_makes_nothing_again(
    make_settings: MakeSettings, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(request: Any) -> None:
        if len(work.runs) == 5:
            compare_runs.note(request)
            raise StoppedError("Stopped.")
        work.train(request)

    settings = _lists(make_settings)
    monkeypatch.setattr(compare_runs, "train_here", stop)
    with pytest.raises(StoppedError):
        library.compare(settings)
    monkeypatch.setattr(compare_runs, "train_here", work.train)
    report = library.compare(settings)
    assert len(work.runs) == len(set(work.runs)) == 24
    # Batches of every sampler, size and seed, which targets and methods share.
    assert len(work.batches) == len(set(work.batches)) == 8
    assert {(each.num_seeds, each.weights) for each in report.outcomes} == {(2, "last")}
    assert len(report.outcomes) == 12


def test_settings_that_a_name_does_not_tell_apart_are_refused_before_any_batch(
    make_settings: MakeSettings, work: Work
) -> None:
    other = dataclasses.replace(PRIVATE, hidden=(4,))
    with pytest.raises(InputError, match="to have the same settings"):
        library.compare(make_settings(trained=(PRIVATE, other)))
    assert not work.batches


def test_flags_and_settings_ask_for_the_same(
    make_settings: MakeSettings, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lists at once, as flags and as settings."""
    asked: list[ComparisonSettings] = []
    report = library.Comparison(title="", tables=[], fields=[], outcomes=[])
    monkeypatch.setattr(
        library, "compare", lambda settings, _: asked.append(settings) or report
    )
    settings = make_settings()
    result = invoke([
        "compare",
        f"--input={settings.source}", f"--eval={settings.held_out}",
        f"--out={settings.out}", "--seeds=1", "--delta=1e-3", "--batch-size=20,40",
        "--epochs", "1,2", "--epsilon=1,2,3",
        "--method=dp-sgd,model-mix", "--l2-norm-clip=1,3", "--learning-rate", "0.1,0.2",
        "--for", "model-mix", "--optimizer sgd --learning-rate 2 --mix-width 0.1,0.2",
        "--sampler=poisson",
    ])  # fmt: skip
    assert result.exception is None, result.output
    mixed = {"method": "model-mix", "optimizer": "sgd", "learning_rate": 2.0}
    sides: list[dict[str, Any]] = [
        *({"l2_norm_clip": clip, "learning_rate": rate}
          for clip, rate in _pairs((1, 3), (0.1, 0.2))),
        *({"l2_norm_clip": clip, "method_settings": {"mix_width": width}, **mixed}
          for clip, width in _pairs((1, 3), (0.1, 0.2))),
    ]  # fmt: skip
    expected = dataclasses.replace(
        settings, samplers=("poisson",),
        batches=tuple(
            BatchSettings(expected_batch_size=size, num_epochs=epochs)
            for size, epochs in _pairs((20, 40), (1, 2))
        ),
        trained=tuple(
            TrainSettings(
                target_epsilon=epsilon, target_delta=1e-3, loss=AUTO_LOSS, **side
            )
            for side in sides for epsilon in (1.0, 2.0, 3.0)
        ),
    )  # fmt: skip
    assert asked == [expected]
    assert not work.runs


def _pairs(*values: Any) -> list[Any]:
    return list(itertools.product(*values))


POISSON, SHUFFLE = "truncated-poisson", "dynamic-shuffle"
MIXED = TrainSettings(
    method="model-mix", optimizer="sgd", learning_rate=1.0, l2_norm_clip=1.0,
    target_epsilon=2.0, target_delta=1e-3,
    method_settings={"mix_width": 0.1, "linf_factor": 100},
)  # fmt: skip


def _epsilon(case: ComparisonCase) -> Any:
    return accountant.epsilon(
        case.batches.plan(NUM_EXAMPLES),
        noise_multiplier=case.settings.noise_multiplier or 0.0,
        delta=1e-3,
    )


def test_noise_is_that_of_each_sampler_and_meets_the_target(
    make_settings: MakeSettings,
) -> None:
    samplers = (POISSON, SHUFFLE, "deterministic")
    cases = find_cases(make_settings(samplers=samplers), NUM_EXAMPLES, silent)
    assert tuple(case.batches.sampler for case in cases) == samplers
    assert len({case.settings.noise_multiplier for case in cases}) == len(samplers)
    for case in cases:
        delta = accountant.delta(
            case.batches.plan(NUM_EXAMPLES),
            noise_multiplier=case.settings.noise_multiplier or 0.0,
            epsilon=2.0,
        )
        assert delta.guarantee <= 1e-3
        # Nor is there much more of it than is needed.
        assert _epsilon(case).guarantee == pytest.approx(2, rel=1e-3)


def test_the_files_of_a_comparison_hold_the_table_that_is_shown(
    make_settings: MakeSettings, work: Work
) -> None:
    report = library.compare(make_settings())
    assert work.runs
    out = make_settings().out
    fields = json.loads((out / "comparison.json").read_bytes())
    assert [each["sampler"] for each in fields] == [POISSON, SHUFFLE]
    assert all(0 < each["epsilon"] <= 2 for each in fields)
    assert (out / "comparison.md").read_text().startswith(report.markdown())
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_model_mix_gets_the_noise_of_its_theorem_where_that_holds(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings(trained=(PRIVATE, MIXED))
    with pytest.raises(InputError, match="dynamic-shuffle"):
        find_cases(settings, NUM_EXAMPLES, silent)
    settings = dataclasses.replace(settings, samplers=(POISSON,))
    cases = find_cases(settings, NUM_EXAMPLES, silent)
    [mixed] = [case for case in cases if case.settings.method == "model-mix"]
    assert mixed.batches.sampler == POISSON
    noise = mixed.settings.noise_multiplier
    assert noise is not None
    plan = mixed.batches.plan(NUM_EXAMPLES)
    theorem = privacy.theorem_of_settings(MIXED)
    assert theorem is not None
    found = theorem.epsilon(plan, noise_multiplier=noise, delta=1e-3)
    assert found.guarantee <= 2
    plain = accountant.noise_multiplier(plan, epsilon=2.0, delta=1e-3)
    assert noise < plain.guarantee


def _case(**changes: Any) -> ComparisonCase:
    settings = dataclasses.replace(PRIVATE, target_epsilon=None, noise_multiplier=0.9)
    fields: dict[str, Any] = {
        "batches": BatchSettings(expected_batch_size=20, num_epochs=1),
        "settings": settings, "target_epsilon": 3.0,
    }  # fmt: skip
    return ComparisonCase(**{**fields, **changes})


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


def test_summarise_reports_every_case_with_mean_and_standard_deviation() -> None:
    plain = _case(settings=NON_PRIVATE, target_epsilon=None)
    results = [
        (_case(), _result(0.7, ema=0.5)),
        (_case(), _result(0.8, ema=0.7, epsilon=2.75)),
        (plain, _result(0.9)),
    ]
    last, ema, without = summarise(results, metric="auc")
    assert (last.weights, ema.weights, without.weights) == ("last", "ema", "last")
    assert last.mean == pytest.approx(0.75)
    assert last.stddev == pytest.approx(np.sqrt(0.005))
    assert last.num_seeds == 2
    assert last.epsilon == 2.75  # the weakest of the statements
    assert ema.mean == pytest.approx(0.6)
    assert (without.epsilon, without.noise_multiplier, without.stddev) == (None,) * 3


BATCHES = "truncated-poisson-seed0"
SETTINGS = TrainSettings(
    noise_multiplier=0.9, l2_norm_clip=1.0, target_delta=0.001, hidden=(4,),
    embedding_dim=2, eval_every=100,
)  # fmt: skip


def _trial(**changes: Any) -> Trial:
    settings = dataclasses.replace(SETTINGS, **changes)
    return Trial(name="dp-sgd", batches=BATCHES, settings=settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, dict[str, Any]]:
    """A run and its result; each test leaves the run as it was."""
    folder = tmp_path_factory.mktemp("finished")
    batches = [make_rows(size, size) for size in (8, 5)]
    write_batches(folder / "out" / "batches" / BATCHES, batches)
    held_out = write_held_out(folder / "held_out", make_rows(300, seed=99))
    runs = Runs(Experiment(source="", held_out=held_out, out=folder / "out"), silent)
    return runs, runs.run(_trial())


def test_the_epsilon_of_a_run_is_that_of_its_record(finished: Any) -> None:
    """Seen to fail: it was what ``privacy.json`` said, which is public."""
    runs, first = finished
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
    runs, _ = finished
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
