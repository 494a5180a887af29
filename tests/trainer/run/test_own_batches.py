"""Each private run has batches of its own, or says that others may have used them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
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
from trainer.html_report import page
from trainer.keras_model import make_private
from trainer.run.preflight import Request
from trainer.settings.methods import NON_PRIVATE
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

PRIVATE = {"noise_multiplier": 0.8, "l2_norm_clip": 1.0, "target_delta": 1e-3}
REFUSED = "of this run alone; the run begun in .*/first has used them.*dpsgd batches"


@pytest.fixture(autouse=True)
def batches_may_be_used_again() -> None:
    """Instead of what ``conftest`` does for all other runs."""


@pytest.fixture
def front(small_batches: Any, tmp_path: pathlib.Path) -> Callable[..., str]:
    """``front(name, method=..., **more)`` trains; returns the text of the statement."""

    def run(name: str, *, method: str | None = None, **more: Any) -> str:
        settings: dict[str, Any] = PRIVATE if method is None else {"method": method}
        more |= {"batches": small_batches.path, "run": tmp_path / name}
        chosen = train_settings(**SMALL, model=LINEAR, **settings)
        return train(Request(settings=chosen, held_out=None, **more)).text

    return run


def test_a_second_run_on_the_same_batches_is_refused_before_any_work(
    front: Callable[..., str], small_batches: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: both were private, and a note said that their epsilons add."""
    front("plain", method=NON_PRIVATE)  # draws no noise, and claims nothing
    assert SHARED_BATCHES not in front("first")
    network = linear()
    for second in (
        lambda: front("second"),
        lambda: make_private(
            network, batches=small_batches.path, run=tmp_path / "second",
            noise_multiplier=0.8,
        ),
    ):  # fmt: skip
        with pytest.raises(InputError, match=REFUSED) as error:
            second()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "second").exists()
    front("plain-again", method=NON_PRIVATE)


def test_a_run_that_accepts_it_says_that_nothing_is_proven_together(
    front: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    front("first")
    found = front("second", batches_used_before=True)
    assert SHARED_BATCHES in found.partition("\n")[0]
    assert read_run(tmp_path / "second")[0].batches_used_before
    assert not read_run(tmp_path / "first")[0].batches_used_before
    for name in ("first", "second"):
        page.write_report(tmp_path / name, tmp_path / f"{name}.html")
        text = " ".join((tmp_path / f"{name}.html").read_text().split())
        assert (SHARED_BATCHES in text) == (name == "second")
    runs = [tmp_path / "first", tmp_path / "second"]
    with pytest.raises(InputError, match="epsilons do not add"):
        account_body.of_runs(runs, account_body.Asked())


def test_a_run_that_another_one_overtook_is_refused(
    front: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found no mark before they began."""
    monkeypatch.setattr("trainer.run.preflight.check_unused", lambda *_, **__: None)
    front("first")
    with pytest.raises(InputError, match=REFUSED):
        front("second")


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
