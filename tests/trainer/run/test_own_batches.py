"""Each private run has batches of its own, or says that others may have used them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from accounting.statement import SHARED_BATCHES
from tests.trainer.flat_settings import train_settings
from tests.trainer.run.whole_runs import (
    LINEAR,
    SMALL,
    KillAt,
    Planted,
    linear,
    private_settings,
)
from trainer.cli import account_body
from trainer.core.run.run_record import read_run
from trainer.core.tf_compat import keras
from trainer.html_report import page
from trainer.keras_model import make_private
from trainer.run.preflight import Request
from trainer.settings.methods import NON_PRIVATE
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

REFUSED = "of this run alone; the run begun in .*/first has used them.*dpsgd batches"


@pytest.fixture(autouse=True)
def batches_may_be_used_again() -> None:
    """Instead of what ``conftest`` does for all other runs."""


class Front:
    """A way to train on the batches of a test."""

    def __init__(self, batches: pathlib.Path, folder: pathlib.Path) -> None:
        self.batches, self.folder = batches, folder

    def train(self, name: str, *, method: str | None = None, **more: Any) -> Any:
        raise NotImplementedError


class CommandLine(Front):
    def train(self, name: str, *, method: str | None = None, **more: Any) -> Any:
        settings = private_settings(model=LINEAR)
        if method is not None:
            settings = train_settings(**SMALL, model=LINEAR, method=method)
        request = Request(
            settings=settings, batches=self.batches, held_out=None,
            run=self.folder / name, **more,
        )  # fmt: skip
        return train(request).text


class Python(Front):
    def train(self, name: str, *, method: str | None = None, **more: Any) -> Any:
        privacy = {"noise_multiplier": 0.8, "l2_norm_clip": 1.0, "delta": 1e-3}
        given = privacy if method is None else {"method": method}
        model = make_private(
            linear(), batches=self.batches, run=self.folder / name, **given, **more
        )
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit(verbose=0)
        return "" if method else model.privacy_statement().to_text()


@pytest.fixture(params=[CommandLine, Python])
def front(
    request: pytest.FixtureRequest, small_batches: Any, tmp_path: pathlib.Path
) -> Front:
    found: Front = request.param(small_batches.path, tmp_path)
    return found


def test_a_second_run_on_the_same_batches_is_refused_before_any_work(
    front: Front, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: both were private, and a note said that their epsilons add."""
    front.train("plain", method=NON_PRIVATE)  # draws no noise, and claims nothing
    assert SHARED_BATCHES not in front.train("first")
    with pytest.raises(InputError, match=REFUSED) as error:
        front.train("second")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "second").exists()
    front.train("plain-again", method=NON_PRIVATE)


def test_a_run_that_accepts_it_says_that_nothing_is_proven_together(
    front: Front, tmp_path: pathlib.Path
) -> None:
    front.train("first")
    found = front.train("second", batches_used_before=True)
    assert SHARED_BATCHES in found.partition("\n")[0]
    assert read_run(tmp_path / "second")[0].batches_used_before
    assert not read_run(tmp_path / "first")[0].batches_used_before
    for name in ("first", "second"):
        page.write_report(tmp_path / name, tmp_path / f"{name}.html")
        text = " ".join((tmp_path / f"{name}.html").read_text().split())
        assert (SHARED_BATCHES in text) == (name == "second")
    flags = dict.fromkeys(("delta", "relation", "max_examples_per_user"))
    flags |= {"allow_large_delta": False}
    runs = [tmp_path / "first", tmp_path / "second"]
    with pytest.raises(InputError, match="epsilons do not add"):
        account_body.of_runs(runs, flags, account_body.More())


def test_a_run_that_another_one_overtook_is_refused(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found no mark before they began."""
    monkeypatch.setattr("trainer.run.preflight.check_unused", lambda *_, **__: None)
    front.train("first")
    with pytest.raises(InputError, match=REFUSED):
        front.train("second")


def test_a_run_that_was_killed_goes_on_and_no_other_one_begins(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    def request(name: str) -> Request:
        return Request(
            settings=private_settings(model=LINEAR), batches=small_batches.path,
            held_out=None, run=tmp_path / name, checkpoint_every=1,
        )  # fmt: skip

    with pytest.raises(Planted):
        train(request("first"), KillAt(3))
    with pytest.raises(InputError, match=REFUSED):
        train(request("second"))
    assert train(request("first")).statement["is_guarantee"]
    assert not read_run(tmp_path / "first")[0].batches_used_before
