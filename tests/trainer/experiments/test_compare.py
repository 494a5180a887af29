"""Comparisons from flags to files: what is made once, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from accounting.core.validation import InputError
from pipelines.files.stopping import StoppedError
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.experiments.conftest import PRIVATE, Work
from trainer.cli.experiments.compare_commands import compare
from trainer.experiments import compare as library
from trainer.experiments import comparison_runs as compare_runs
from trainer.settings.requests import (
    OPTIMISTIC,
    OWN,
    ComparisonSettings,
)
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
        "noise": (OWN,),
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


def _compare(*arguments: str) -> Result:
    return CliRunner().invoke(compare, list(arguments))


def test_flags_and_settings_ask_for_the_same(
    make_settings: MakeSettings, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lists at once, as flags and as settings."""
    asked: list[ComparisonSettings] = []
    monkeypatch.setattr(
        "trainer.cli.experiments.compare_body.run",
        lambda settings, *, as_json: asked.append(settings),
    )
    settings = make_settings()
    result = _compare(
        f"--input={settings.source}", f"--eval={settings.held_out}",
        f"--out={settings.out}", "--seeds=1", "--delta=1e-3", "--batch-size=20,40",
        "--epochs", "1,2", "--epsilon=1", "--epsilon=2,3", "--noise=own,optimistic",
        "--method=dp-sgd,model-mix", "--l2-norm-clip=1,3", "--learning-rate", "0.1,0.2",
        "--for", "model-mix", "--optimizer sgd --learning-rate 2 --mix-width 0.1,0.2",
        "--sampler=poisson",
    )  # fmt: skip
    assert result.exception is None, result.output
    mixed = {"method": "model-mix", "optimizer": "sgd", "learning_rate": 2.0}
    sides: list[dict[str, Any]] = [
        *({"l2_norm_clip": clip, "learning_rate": rate}
          for clip, rate in _pairs((1, 3), (0.1, 0.2))),
        *({"l2_norm_clip": clip, "method_settings": {"mix_width": width}, **mixed}
          for clip, width in _pairs((1, 3), (0.1, 0.2))),
    ]  # fmt: skip
    expected = dataclasses.replace(
        settings, samplers=("poisson",), noise=(OWN, OPTIMISTIC),
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
