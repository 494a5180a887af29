"""Each private run has batches of its own, and says if they are certified."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from accounting.statement import SHARED_BATCHES
from pipelines.batches.folder import (
    CERTIFICATE_NAME,
    read_certificate,
    read_checksums,
    stored,
    write_certificate,
    write_manifest,
)
from pipelines.core.users import BOUNDED, Bounded
from tests.command_line import invoke
from tests.trainer.bounded import StandIn
from tests.trainer.conftest import write_run_folder
from tests.trainer.flat_settings import train_settings
from tests.trainer.run.whole_runs import (
    LINEAR,
    SMALL,
    KillAt,
    Planted,
    linear,
    open_session,
    private_settings,
)
from trainer.cli import account_body
from trainer.core.run.run_record import read_run
from trainer.html_report import page
from trainer.html_report.facts import collect
from trainer.html_report.page import render
from trainer.keras_model import make_private
from trainer.run import preflight
from trainer.run.preflight import Request
from trainer.run.privacy import run_statement
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.train_settings import TrainSettings
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


# -- whether the batches of a run are certified ----------------------------------------


@pytest.fixture
def sealed(small_batches: Any) -> Any:
    """Batches with a certificate, as if the reference had compared them."""
    path, manifest = small_batches.path, small_batches.manifest
    write_certificate(path, manifest, read_checksums(path))
    return small_batches


@pytest.fixture
def run(sealed: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a run on these batches, without their certificate."""
    found = stored(sealed.path).records_id()
    return write_run_folder(tmp_path / "run", sealed, records_id=found)


def said_of(run: pathlib.Path) -> tuple[dict[str, Any], str, str]:
    """What `dpsgd account` says, as JSON and as text, and the page."""
    outputs = []
    for more in (["--json"], []):
        result = invoke(["account", str(run), *more])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    return json.loads(outputs[0]), outputs[1], render(collect(run))


def test_without_a_certificate_the_claim_relies_on_the_batch_job(
    run: pathlib.Path, sealed: Any
) -> None:
    fields, text, page = said_of(run)
    assert (fields["relies_on"], fields["batches_certified"]) == (["batch job"], False)
    assert "  relies on   the batch job" in text
    assert "the batch job" in page
    shutil.copy(sealed.path / CERTIFICATE_NAME, run)
    fields, text, page = said_of(run)
    assert (fields["relies_on"], fields["batches_certified"]) == ([], True)
    assert "  batches     certified" in text
    for said in (text, page):
        assert "reference sampler" in said
        assert "the batch job" not in said


def test_a_certificate_of_other_records_is_refused(
    run: pathlib.Path, sealed: Any
) -> None:
    """Of batches that were made again under the same manifest, with other bytes."""
    checksums = read_checksums(sealed.path).files
    name, sums = checksums.popitem()
    worse = {**checksums, name: type(sums)(**{**vars(sums), "num_real": 1})}
    write_manifest(sealed.path, sealed.manifest, worse, seal_key="5" * 64)
    write_certificate(sealed.path, sealed.manifest, read_checksums(sealed.path))
    shutil.copy(sealed.path / CERTIFICATE_NAME, run)
    result = invoke(["account", str(run)])
    assert isinstance(result.exception, InputError)
    assert "about the batches of this run" in str(result.exception)
    with pytest.raises(InputError, match="other records"):
        collect(run)


def test_batches_that_changed_since_they_were_certified_train_nothing(
    sealed: Any,
) -> None:
    """Seen to fail: the run was trained to its end, and then had no statement."""
    preflight.check_files(sealed.path, sealed.manifest)
    sums = read_checksums(sealed.path).files
    write_manifest(sealed.path, sealed.manifest, sums, seal_key="6" * 64)
    with pytest.raises(
        InputError, match=r"certificate\.json to be about these batches"
    ):
        preflight.check_files(sealed.path, sealed.manifest)


def test_a_run_records_its_batches_and_keeps_their_certificate(
    sealed: Any, tmp_path: pathlib.Path
) -> None:
    settings = TrainSettings(noise_multiplier=1.0, l2_norm_clip=1.0, target_delta=1e-3)
    step, run = StandIn([(1,)], clip=1.0, multiplier=1.0), tmp_path / "run"
    done = sealed.manifest.plan.num_steps
    session = open_session(step, sealed, run, settings, num_steps_executed=done)
    session.write_record(complete=True)
    record, _ = read_run(run)
    assert record.records_id == stored(sealed.path).records_id() != ""
    certificate = read_certificate(run)
    assert certificate == read_certificate(sealed.path)
    assert certificate is not None
    # Public, though it commits to the records: the seal is in neither.
    assert certificate.seal not in (run / "run_record.json").read_text()


def test_bounded_users_rely_on_the_bound_job(
    batch_folder: Callable[..., Any], sealed: Any, tmp_path: pathlib.Path
) -> None:
    """A certificate begins with the rows that were kept."""
    bounded = Bounded(user_column="u", max_examples_per_user=2, num_examples=200)
    dataset = {**sealed.manifest.dataset, BOUNDED: bounded.to_json()}
    batches = batch_folder(sealed.steps, "of_users", dataset=dataset)
    run = write_run_folder(tmp_path / "of_users_run", batches)
    found = run_statement(*read_run(run), delta=None)
    assert found.relies_on == ("batch job", "bound job")
