"""Whole runs: what they write, what they refuse, and what a crash may not change."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from accounting import accountant
from accounting.model_mix import theorem
from accounting.model_mix.theorem import Mixing
from accounting.validation import InputError
from pipelines.batches.manifest import read_checksums, write_manifest
from pipelines.sampling.keys import create_key_file
from trainer.averaging.iterates import Iterates
from trainer.gradients.dp_step import Step
from trainer.model.evaluation import HeldOut
from trainer.report.progress import Silent, Terminal
from trainer.run import authenticated_arrays, privacy
from trainer.run.preflight import Request
from trainer.run.run_record import RUN_NAMES, exported_names, read_run
from trainer.run.session import Session
from trainer.settings.aggregation_settings import WEIGHT_AVERAGES
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras
from trainer.train import StoppedError, train

from .conftest import write_held_out

SMALL: dict[str, Any] = {"embedding_dim": 2, "hidden": (4,)}
ROOT = pathlib.Path(__file__).parents[2]
ONE_ID = "5" * 32


#: All averages and intervals; of ten steps 6, 8 and 10 are kept.
AVERAGES: dict[str, Any] = {
    "ema_decay": 0.9,
    "tail": 3,
    "keep_last": 3,
    "keep_every": 2,
    "uncertainty": 0.9,
    "export": ("upa",),
}


class Planted(BaseException):
    """A crash: no handler expects it."""


def _private(**changes: Any) -> TrainSettings:
    fields = {"noise_multiplier": 0.8, "l2_norm_clip": 1.0, "target_delta": 1e-3}
    return TrainSettings(**{**SMALL, **fields, **changes})


@pytest.fixture
def request_for(small_batches: Any, held_out: Any, tmp_path: pathlib.Path) -> Any:
    create_key_file(tmp_path / "noise.key")

    def make(name: str = "run", *, run_id: str | None = None, **changes: Any) -> Any:
        if run_id is not None:  # as if the run had been killed at once
            private = tmp_path / name / "private"
            private.mkdir(parents=True, exist_ok=True)
            (private / "run.id").write_text(run_id + "\n")
        fields = {
            "settings": _private(),
            "batches": small_batches.path,
            "held_out": held_out,
            "run": tmp_path / name,
            "noise_key_file": tmp_path / "noise.key",
        }
        return Request(**{**fields, **changes})

    return make


def _model(path: pathlib.Path) -> Any:
    return keras.models.load_model(path)


def _weights(run: pathlib.Path) -> list[np.ndarray]:
    """Of all models of the run."""
    models = map(_model, sorted(run.glob("*.keras")))
    return [v.numpy() for model in models for v in model.variables]


def _same(left: pathlib.Path, right: pathlib.Path) -> bool:
    """Whether two finished runs have bit-identical results."""
    pairs = zip(_weights(left), _weights(right), strict=True)
    patterns = ("metrics.json", "curve.json", "privacy.*", "*.parquet", "iterates/*")
    names = [
        [str(path.relative_to(run)) for name in patterns for path in run.glob(name)]
        for run in (left, right)
    ]
    return (
        all(a.tobytes() == b.tobytes() for a, b in pairs)
        and sorted(names[0]) == sorted(names[1])
        and all((left / n).read_bytes() == (right / n).read_bytes() for n in names[0])
    )


# -- what a run writes -----------------------------------------------------------------


def test_a_run_writes_all_results_and_a_statement_of_what_it_executed(
    request_for: Any,
) -> None:
    request = request_for(noise_key_file=None)
    summary = train(request)
    run = request.run
    averages = {*map(exported_names, WEIGHT_AVERAGES)}
    unasked = {"iterates", "uncertainty.parquet", *itertools.chain(*averages)}
    assert {path.name for path in run.iterdir()} == set(RUN_NAMES) - unasked
    assert {path.name for path in (run / "private").iterdir()} == {
        "noise.key",
        "origin.json",
        "run.id",
        "run_record.mac",
    }
    for path in [run / "private", *(run / "private").iterdir()]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    record, manifest = read_run(run)
    assert record.complete
    assert record.num_steps_executed == manifest.plan.num_steps == 10
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == json.loads((run / "privacy.json").read_text())
    assert statement.to_json() == summary.statement
    metrics = json.loads((run / "metrics.json").read_text())
    points = json.loads((run / "curve.json").read_text())["points"]
    assert [point["step"] for point in points] == list(range(11))
    assert points[-1]["auc"] == metrics["auc"]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_target_is_met_by_the_noise_that_is_recorded(request_for: Any) -> None:
    settings = _private(noise_multiplier=None, target_epsilon=2.0)
    request = request_for(settings=settings)
    summary = train(request)
    assert summary.statement is not None
    assert 1.9 < summary.statement["epsilon"] <= 2.0


def test_a_run_without_delta_says_how_to_get_a_statement(request_for: Any) -> None:
    request = request_for(settings=_private(target_delta=None))
    summary = train(request)
    assert "dpsgd account RUN --delta" in summary.text
    fields = json.loads((request.run / "privacy.json").read_text())
    assert fields["epsilon"] is None
    assert fields == summary.statement
    assert (request.run / "privacy.txt").read_text().strip() == summary.text


def test_a_run_without_privacy_says_so(request_for: Any) -> None:
    settings = TrainSettings(method="non-private", **SMALL)
    request = request_for(settings=settings)
    train(request)
    assert "not private" in (request.run / "privacy.txt").read_text()
    record, manifest = read_run(request.run, noise_key_file=request.noise_key_file)
    assert record.noise_multiplier is None
    with pytest.raises(InputError, match="no epsilon"):
        privacy.run_statement(record, manifest, delta=1e-3)


def test_zero_noise_and_a_clip_that_never_bites_equal_the_run_without_privacy(
    request_for: Any,
) -> None:
    plain = TrainSettings(method="non-private", optimizer="sgd", **SMALL)
    free = _private(noise_multiplier=0.0, l2_norm_clip=1e6, optimizer="sgd")
    requests = [
        request_for("plain", settings=plain),
        request_for("free", settings=free),
    ]
    for request in requests:
        train(request)
    for left, right in zip(*(_weights(r.run) for r in requests), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_steps_of_several_batches_give_the_run_of_one_batch(
    request_for: Any, small_batches: Any, batch_folder: Callable[..., Any]
) -> None:
    split = batch_folder(small_batches.steps, "split", physical_batch_size=3)
    settings = _private(noise_multiplier=0.0, optimizer="sgd", learning_rate=1.0)
    whole = request_for("whole", run_id=ONE_ID, settings=settings)
    parts = request_for("parts", settings=settings, batches=split.path)
    for request in (whole, parts):
        train(request)
    for left, right in zip(_weights(whole.run), _weights(parts.run), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_same_key_same_run_other_key_other_noise(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    create_key_file(tmp_path / "other.key")
    for name in ("first", "again"):
        train(request_for(name, run_id=ONE_ID))
    other_key = tmp_path / "other.key"
    train(request_for("other", run_id=ONE_ID, noise_key_file=other_key))
    assert _same(tmp_path / "first", tmp_path / "again")
    assert not _same(tmp_path / "first", tmp_path / "other")


@pytest.mark.parametrize("run_id", [None, ONE_ID])
def test_runs_that_share_a_key_share_no_noise(
    run_id: str | None, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Common noise would cancel in the difference of two released models.
    drawn: list[bytes] = []
    begin = Step.begin

    def spy(self: Step, noise: Any, later: Any) -> None:
        drawn.extend(values.tobytes() for values in noise)
        begin(self, noise, later)

    monkeypatch.setattr(Step, "begin", spy)
    clip, rate = _private(l2_norm_clip=1.0001), _private(learning_rate=0.01)
    train(request_for("first", run_id=run_id))
    train(request_for("second", run_id=run_id, settings=clip))
    train(request_for("third", run_id=run_id, settings=rate))
    if run_id is None:  # even the same request again is another run
        train(request_for("fourth"))
    num_variables = 5
    assert len(drawn) == (3 if run_id else 4) * 10 * num_variables
    assert len(set(drawn)) == len(drawn)


METHODS: list[dict[str, Any]] = [
    {"method": "bam", "bam_radius": 0.25},
    {"method": "bam", "bam_radius": 0.25, "bam_variant": "hvp"},
    {"method": "dp-sat", "sat_radius": 0.25},
]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_epsilon_of_dp_sgd_and_is_named_with_its_radius(
    method: dict[str, Any], request_for: Any
) -> None:
    plain = train(request_for("plain", run_id=ONE_ID))
    request = request_for(settings=_private(**method))
    summary = train(request)
    assert summary.statement is not None
    assert plain.statement is not None
    assert summary.statement["epsilon"] == plain.statement["epsilon"]
    kind = method["method"].replace("-", "").upper()
    assert kind in summary.statement["mechanism"].replace("-", "").upper()
    assert "radius=0.25" in summary.statement["mechanism"]
    record, manifest = read_run(request.run, noise_key_file=request.noise_key_file)
    assert record.method == method["method"]
    assert 0.25 in record.method_settings.values()
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == summary.statement


@pytest.mark.parametrize("method", METHODS)
def test_radius_0_is_the_run_of_dp_sgd(
    method: dict[str, Any], request_for: Any, tmp_path: pathlib.Path
) -> None:
    free = {"noise_multiplier": 0.0, "optimizer": "sgd", "embedding_noise": "dense"}
    name = next(key for key in method if key.endswith("radius"))
    for run, changes in (
        ("plain", {}),
        ("zero", {**method, name: 0.0}),
        ("moved", method),
    ):
        train(request_for(run, settings=_private(**free, **changes)))
    plain, zero, moved = (_weights(tmp_path / n) for n in ("plain", "zero", "moved"))
    for left, right in zip(plain, zero, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)
    assert not all(np.allclose(a, b) for a, b in zip(plain, moved, strict=True))


def test_lazy_noise_gives_the_same_run_of_bam(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    # An example's own move touches the rows that it reads, and no other.
    free = {"noise_multiplier": 0.0, "optimizer": "sgd", "learning_rate": 1.0}
    for kind in ("lazy", "dense"):
        settings = _private(**free, method="bam", bam_radius=0.25, embedding_noise=kind)
        train(request_for(kind, settings=settings))
    lazy, dense = (_weights(tmp_path / kind) for kind in ("lazy", "dense"))
    for left, right in zip(lazy, dense, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_diagnostics_are_marked_and_private_and_change_nothing(
    request_for: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    free = {"noise_multiplier": 0.0, "method": "bam", "bam_radius": 0.1}
    train(request_for("without", settings=_private(**free)))
    settings = _private(**free, non_private_diagnostics=True)
    request = request_for("with", settings=settings)
    with Terminal() as reporter:
        train(request, reporter)
    assert "NON-PRIVATE" in "".join(capfd.readouterr())
    assert _same(tmp_path / "without", tmp_path / "with")
    files = [path.relative_to(request.run) for path in request.run.rglob("*bias*")]
    assert list(map(str, files)) == ["private/non_private_clipping_bias.csv"]
    lines = (request.run / files[0]).read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", *map(str, range(1, 11))]
    assert not list((tmp_path / "without").rglob("*bias*"))


MIXED: dict[str, Any] = {
    "method": "model-mix",
    "mix_width": 0.5,
    "linf_factor": 16,
    "optimizer": "sgd",
}


@pytest.fixture
def poisson_batches(batch_folder: Any, rows: Any) -> pathlib.Path:
    """Ten steps without a cap: one this small would cost more than all noise."""
    steps = [rows(size, seed) for seed, size in enumerate([7, 9, 4, 0, *[8] * 6])]
    folder = batch_folder(steps, "poisson", truncated_batch_size=None)
    path: pathlib.Path = folder.path
    return path


def test_model_mix_has_an_epsilon_of_its_own_and_says_by_which_theorem(
    request_for: Any, poisson_batches: pathlib.Path
) -> None:
    settings = _private(**{**MIXED, "noise_multiplier": 0.4})
    request = request_for(settings=settings, batches=poisson_batches)
    summary = train(request)
    record, manifest = read_run(request.run, noise_key_file=request.noise_key_file)
    assert record.method_settings == {"mix_width": 0.5, "linf_factor": 16}
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == summary.statement
    mixed = Mixing(mix_width=0.5, l2_norm_clip=1.0, linf_factor=16)
    wanted = theorem.epsilon(
        manifest.plan, mixed, noise_multiplier=0.4, delta=1e-3
    ).guarantee
    assert summary.statement["epsilon"] == wanted
    plain = accountant.epsilon(
        manifest.plan, noise_multiplier=0.4, delta=1e-3
    ).guarantee
    assert wanted < plain
    assert "Xiao et al. 2023, Corollary 4.1" in summary.statement["theorem"]
    assert summary.statement["discretization"] == theorem.DISCRETIZATION
    assert theorem.NOT_COVERED in summary.text
    for words in ("sqrt(16)", "at least 0.5 times the learning rate apart"):
        assert words in summary.statement["mechanism"]
    # A record of another optimizer is no record of the theorem's mechanism.
    for other in ({"name": "momentum"}, {"name": "sgd", "train_over": "uta"}):
        changed = dataclasses.replace(record, optimizer=other)
        found = privacy.run_statement(changed, manifest, delta=None)
        assert found.epsilon.guarantee == plain
        assert "ModelMix (" not in found.epsilon.method


def test_model_mix_needs_less_gaussian_noise_for_the_same_epsilon(
    request_for: Any, poisson_batches: pathlib.Path
) -> None:
    target = {"noise_multiplier": None, "target_epsilon": 3.0, "target_delta": 1e-3}
    noise = {}
    for name, changes in (("plain", {"optimizer": "sgd"}), ("mixed", MIXED)):
        settings = _private(**{**target, **changes})
        request = request_for(name, settings=settings, batches=poisson_batches)
        summary = train(request)
        assert summary.statement["epsilon"] <= 3.0
        noise[name] = summary.statement["noise_multiplier"]
    assert noise["mixed"] < noise["plain"] / 1.5


def test_kept_iterates_of_model_mix_are_the_released_ones(request_for: Any) -> None:
    request = request_for(settings=_private(**MIXED, **AVERAGES))
    train(request)
    kept = np.load(request.run / "iterates/step-00000010.npz")
    found = _model(request.run / "model.keras").trainable_variables
    for index, variable in enumerate(found):
        assert np.array_equal(kept[f"weight_{index}"], variable.numpy())


# -- what a run refuses ----------------------------------------------------------------


def test_model_mix_refuses_batches_of_other_samplers_before_any_work(
    request_for: Any, small_batches: Any
) -> None:
    plan = dataclasses.replace(
        small_batches.manifest.plan, sampler="dynamic-shuffle",
        truncated_batch_size=None, num_examples=80,
    )  # fmt: skip
    manifest = dataclasses.replace(small_batches.manifest, plan=plan)
    checksums = read_checksums(small_batches.path)
    shutil.copytree(small_batches.path, small_batches.path.parent / "shuffled")
    (small_batches.path.parent / "shuffled" / "manifest.json").unlink()
    write_manifest(small_batches.path.parent / "shuffled", manifest, checksums)
    request = request_for(
        settings=_private(**MIXED), batches=small_batches.path.parent / "shuffled"
    )
    with pytest.raises(InputError, match=r"sampler='dynamic-shuffle'.*no other"):
        train(request)
    assert not request.run.exists()


def test_nothing_is_written_where_a_request_is_refused(
    request_for: Any, tmp_path: pathlib.Path, small_batches: Any
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    open_key = tmp_path / "open.key"
    create_key_file(open_key)
    open_key.chmod(0o644)
    for changes, message in (
        ({"name": "full"}, "new or empty"),
        ({"batches": tmp_path / "full"}, r"manifest\.json"),
        ({"held_out": tmp_path / "full"}, "parquet"),
        ({"settings": _private(model="nothing:here")}, "nothing"),
        ({"noise_key_file": tmp_path / "run" / "noise.key"}, "outside"),
        ({"noise_key_file": open_key}, "0600"),
        ({"settings": _private(keep_last=11)}, "keep_last=11"),
    ):
        with pytest.raises(InputError, match=message):
            train(request_for(**changes))
        assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_finished_run_is_not_replaced(request_for: Any) -> None:
    train(request_for())
    with pytest.raises(InputError, match="finished run"):
        train(request_for())


def test_batches_that_change_during_the_run_end_it(
    request_for: Any, small_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(*_: object) -> None:
        path = small_batches.path / small_batches.manifest.files[2].name
        data = bytearray(path.read_bytes())
        data[-30] ^= 1
        path.write_bytes(data)

    reporter = Silent()
    monkeypatch.setattr(reporter, "start", lambda *_, **__: edit())
    request = request_for()
    with pytest.raises(InputError, match="changed"):
        train(request, reporter)
    record, manifest = read_run(request.run, noise_key_file=request.noise_key_file)
    assert not record.complete
    # Steps 0 to 7 were read; that step 7 was whole shows with the batch after it.
    assert record.num_steps_executed == 7
    assert not (request.run / "model.keras").exists()
    with pytest.raises(InputError, match="num_steps_executed=7"):
        privacy.run_statement(record, manifest, delta=1e-3)


# -- what nobody may see ---------------------------------------------------------------


def test_no_value_and_no_count_of_real_rows_appears_in_public(
    request_for: Any,
    batch_folder: Callable[..., Any],
    rows: Any,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    canary, count = 12345432, 1237
    steps = [rows(count), rows(3)]
    steps[0]["integers"][5] = canary
    folder = batch_folder(
        steps, "canary", truncated_batch_size=2048, physical_batch_size=2048,
        expected_batch_size=1024, num_examples=4096,
    )  # fmt: skip
    messages = []
    request = request_for(batches=folder.path)
    with Terminal() as reporter:
        train(request, reporter)
    # The same data on paths that fail.
    spoiled = (folder.path / folder.manifest.files[0].name).read_bytes()
    (folder.path / folder.manifest.files[0].name).write_bytes(spoiled[:-9] + b"x" * 9)
    with pytest.raises(InputError) as caught:
        train(request_for("spoiled", batches=folder.path))
    messages.append(str(caught.value))
    captured = capfd.readouterr()
    texts = [captured.out, captured.err, caplog.text, *messages]
    for run in (request.run, request.run.parent / "spoiled"):
        public = (p for p in run.rglob("*") if "private" not in p.parts and p.is_file())
        texts += [path.read_bytes().decode("latin-1") for path in public]
    pattern = re.compile(rf"(?<![\d.])({canary}|{count}|{count + 3}|{count / 4096})")
    assert not [text for text in texts if pattern.search(text)]


def test_errors_of_the_model_do_not_quote_examples(
    request_for: Any,
    rows: Any,
    batch_folder: Callable[..., Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "short_table.py").write_text(
        "import tf_keras as keras\n"
        "def make(manifest):\n"
        "    ids = keras.Input((26,), dtype='int32', name='categories')\n"
        "    values = keras.layers.Flatten()(keras.layers.Embedding(7, 1)(ids))\n"
        "    return keras.Model(ids, keras.layers.Dense(1)(values))\n"
    )
    monkeypatch.chdir(tmp_path)
    steps = [rows(4), rows(5)]
    steps[1]["categories"][2, 3] = 86420
    folder = batch_folder(steps, "out_of_range")
    request = request_for(
        batches=folder.path, settings=_private(model="short_table:make")
    )
    with pytest.raises(InputError, match="InvalidArgumentError") as caught:
        train(request)
    captured = capfd.readouterr()
    text = "".join(map(str, (caught.value, captured.out, captured.err)))
    assert "86420" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# -- what a crash may not change -------------------------------------------------------


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``crash(request, step)`` runs until after the given number of steps."""

    def run(request: Request, step: int) -> None:
        count = 0
        finish = Step.finish

        def finish_or_crash(self: Step) -> None:
            nonlocal count
            if count == step:
                raise Planted
            count += 1
            finish(self)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "finish", finish_or_crash)
            with pytest.raises(Planted):
                train(request)

    return run


def test_every_average_has_metrics_and_the_asked_ones_a_model(
    request_for: Any, small_batches: Any
) -> None:
    request = request_for(settings=_private(**AVERAGES))
    run, metrics = request.run, train(request).metrics
    found = metrics["aggregates"]
    assert list(found) == ["ema", "uta", "past_ema", "upa", "opa", "omv"]
    losses = [values["log_loss"] for values in (metrics, *found.values())]
    assert len(set(losses)) == 7
    assert {path.name for path in run.iterdir()} == set(RUN_NAMES) - {
        *exported_names("past_ema")
    }
    # By other means: plain NumPy and the exported models.
    kept = [np.load(run / f"iterates/step-{step:08d}.npz") for step in (6, 8, 10)]
    last, upa = (_model(run / name) for name in ("model.keras", "upa_model.keras"))
    for index, weight in enumerate(upa.trainable_weights):
        mean = sum(file[f"weight_{index}"].astype("f8") for file in kept) / 3
        np.testing.assert_allclose(weight, mean, rtol=1e-6, atol=1e-9)
    columns = next(HeldOut(request.held_out, small_batches.manifest).batches())
    predictions = []
    for file in kept:
        last.set_weights([file[name] for name in file])
        inputs = {name: columns[name] for name in last.input_names}
        predictions.append(last(inputs).numpy().ravel())
    table = pq.read_table(run / "uncertainty.parquet")
    np.testing.assert_allclose(table["prediction"], np.mean(predictions, 0), rtol=1e-5)
    stddev = np.std(predictions, 0, ddof=1)
    np.testing.assert_allclose(table["stddev"], stddev, rtol=1e-3, atol=1e-7)
    label, opa = columns["label"], np.mean(predictions, 0)
    loss = -np.log(np.where(label, opa, 1 - opa)).mean()
    assert found["opa"]["log_loss"] == pytest.approx(loss, rel=1e-5)


def test_training_depends_on_an_average_only_from_the_step_that_starts_at_it(
    request_for: Any,
) -> None:
    none = {"keep_last": 3, "keep_every": 2, "noise_multiplier": 0.0}
    plain = {**AVERAGES, "noise_multiplier": 0.0}
    over = {**plain, "train_over": "uta", "aggregate_from": 8}
    requests = [
        request_for(name, settings=_private(**settings))
        for name, settings in (("none", none), ("plain", plain), ("over", over))
    ]
    for request in requests:
        train(request)
    for step, same in ((6, True), (8, True), (10, False)):
        without, left, right = (
            np.load(request.run / f"iterates/step-{step:08d}.npz")["weight_0"]
            for request in requests
        )
        assert np.array_equal(without, left)
        assert np.array_equal(left, right) == same


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd"},
        {
            "optimizer": "adam",
            "learning_rate_schedule": "cosine",
            "warmup_steps": 2,
        },
        {"method": "dp-sat", "sat_radius": 0.1},
        {"method": "bam", "bam_radius": 0.1, "optimizer": "sgd"},
        {
            "method": "model-mix",
            "mix_width": 0.1,
            "linf_factor": 4,
            "optimizer": "sgd",
            "learning_rate_schedule": "linear",
            "train_over": None,
            "aggregate_from": None,
        },
    ],
)
def test_a_crashed_run_continues_to_bit_identical_results(
    changes: dict[str, Any], request_for: Any, tmp_path: pathlib.Path, crash: Any
) -> None:
    feedback = {"train_over": "uta", "aggregate_from": 4}
    settings = _private(**{**AVERAGES, **feedback, **changes})
    train(request_for("whole", run_id=ONE_ID, settings=settings))
    request = request_for(
        "broken", run_id=ONE_ID, settings=settings, checkpoint_every=3
    )
    for step in (0, 8, 1, 0):
        crash(request, step)
    train(request)
    assert _same(tmp_path / "whole", tmp_path / "broken")


def test_a_replayed_step_draws_the_same_noise(
    request_for: Any, crash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []
    begin = Step.begin

    def spy(self: Step, noise: Any, later: Any) -> None:
        drawn.append(noise[0].tobytes())
        begin(self, noise, later)

    monkeypatch.setattr(Step, "begin", spy)
    request = request_for(checkpoint_every=100)
    crash(request, 4)
    train(request)
    assert drawn[:5] == drawn[5:10]
    assert len(set(drawn)) == 10


@pytest.mark.parametrize("text", [b"", b"0" * 32, b"xyz\n"])
def test_a_damaged_id_is_refused(text: bytes, request_for: Any, crash: Any) -> None:
    request = request_for()
    crash(request, 2)
    (request.run / "private" / "run.id").write_bytes(text)
    with pytest.raises(InputError, match=r"run\.id"):
        train(request)


def test_a_checkpoint_without_its_id_is_refused(request_for: Any, crash: Any) -> None:
    request = request_for(checkpoint_every=1)
    crash(request, 2)
    (request.run / "private" / "run.id").unlink()
    with pytest.raises(InputError, match="checkpoint of this run"):
        train(request)


def test_a_crash_while_a_checkpoint_is_written_leaves_the_one_before(
    request_for: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(request_for("whole", run_id=ONE_ID))
    request = request_for("broken", run_id=ONE_ID, checkpoint_every=2)
    write, calls = authenticated_arrays.write_atomically, 0

    def write_half(path: pathlib.Path, data: bytes, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            path.with_name(".checkpoint.npz.half").write_bytes(data[: len(data) // 2])
            raise Planted
        write(path, data, **more)

    with monkeypatch.context() as patch:
        patch.setattr(authenticated_arrays, "write_atomically", write_half)
        with pytest.raises(Planted):
            train(request)
    train(request)
    assert _same(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("written", [False, True])
def test_a_crash_while_an_iterate_is_kept_is_mended(
    written: bool,
    request_for: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = _private(keep_last=3, keep_every=2)
    train(request_for("whole", run_id=ONE_ID, settings=settings))
    request = request_for(
        "broken", run_id=ONE_ID, settings=settings, checkpoint_every=1
    )
    keep = Iterates.keep

    def keep_and_crash(self: Iterates, step: int, weights: Any) -> None:
        if step == 8:
            if written:
                keep(self, step, weights)
            raise Planted
        keep(self, step, weights)

    with monkeypatch.context() as patch:
        patch.setattr(Iterates, "keep", keep_and_crash)
        with pytest.raises(Planted):
            train(request)
    train(request)
    assert _same(tmp_path / "whole", tmp_path / "broken")


def test_a_run_whose_iterate_was_changed_does_not_go_on(
    request_for: Any, crash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(
        settings=_private(keep_last=3, keep_every=2), checkpoint_every=1
    )
    crash(request, 7)
    path = request.run / "iterates" / "step-00000006.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    steps: list[int] = []
    reporter = Silent()
    monkeypatch.setattr(reporter, "advance", steps.append)
    with pytest.raises(InputError, match=r"step-00000006\.npz.*was changed"):
        train(request, reporter)
    assert not steps


@pytest.mark.parametrize("name", ["export", "pretty_json", "write_record"])
def test_a_crash_while_results_are_written_is_mended(
    name: str, request_for: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer import train as module

    train(request_for("whole", run_id=ONE_ID))
    request = request_for("broken", run_id=ONE_ID)

    def fail(*_: object, **more: Any) -> None:
        if name != "write_record" or more["complete"]:
            raise Planted

    with monkeypatch.context() as patch:
        target = Session if name == "write_record" else module
        patch.setattr(target, name, fail)
        with pytest.raises(Planted):
            train(request)
    train(request)
    assert _same(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_damaged_checkpoint_is_refused(
    place: int, request_for: Any, crash: Any
) -> None:
    request = request_for(checkpoint_every=2)
    crash(request, 5)
    path = request.run / "private" / "checkpoint.npz"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        train(request)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="damaged"):
        train(request)


def test_a_run_does_not_continue_as_another_one(
    request_for: Any,
    crash: Any,
    tmp_path: pathlib.Path,
    small_batches: Any,
    batch_folder: Callable[..., Any],
) -> None:
    crash(request_for(checkpoint_every=2), 5)
    other_plan = batch_folder(small_batches.steps, "plan", num_examples=201)
    other_rows = [*small_batches.steps[:-1], small_batches.steps[0]]
    other_data = batch_folder(other_rows, "data")
    create_key_file(tmp_path / "other.key")
    for changes, message in (
        ({"settings": _private(noise_multiplier=0.9)}, r"noise_multiplier=0\.9.*0\.8"),
        ({"settings": _private(l2_norm_clip=2.0)}, r"l2_norm_clip=2\.0 to be 1\.0"),
        ({"settings": _private(hidden=(5,))}, r"hidden=\[5\] to be \[4\]"),
        ({"settings": _private(optimizer="sgd")}, "optimizer='sgd' to be 'momentum'"),
        ({"batches": other_plan.path}, "these are others"),
        ({"batches": other_data.path}, "these are others"),
        ({"noise_key_file": tmp_path / "other.key"}, "another key"),
    ):
        with pytest.raises(InputError, match=message):
            train(request_for(**changes))
    train(request_for(checkpoint_every=2))


def test_a_run_does_not_continue_with_other_held_out_examples(
    request_for: Any, crash: Any, rows: Any, tmp_path: pathlib.Path, held_out: Any
) -> None:
    crash(request_for(checkpoint_every=2), 5)
    moved = tmp_path / "moved"
    shutil.copytree(held_out, moved)
    other = write_held_out(tmp_path / "other", rows(300, seed=98))
    with pytest.raises(InputError, match=r"--eval .*first 4 steps"):
        train(request_for(held_out=other))
    # The same examples elsewhere are the same examples.
    train(request_for(held_out=moved))


def test_a_stop_signal_ends_the_run_after_its_step(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    class StopAtThree(Silent):
        def advance(self, done: int) -> None:
            if done == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    request = request_for("stopped", run_id=ONE_ID)
    with pytest.raises(StoppedError, match="step 3 of 10"):
        train(request, StopAtThree())
    assert signal.getsignal(signal.SIGTERM) == before
    train(request)
    train(request_for("whole", run_id=ONE_ID))
    assert _same(tmp_path / "whole", tmp_path / "stopped")


_CHILD = """
    import os, pathlib, pickle, signal, sys
    sys.path.insert(0, {root!r})
    from trainer.report.progress import Silent
    from trainer.train import train

    class KillAt(Silent):
        def advance(self, done):
            if done == {step}:
                os.kill(os.getpid(), signal.SIGKILL)

    train(pickle.loads(pathlib.Path({request!r}).read_bytes()), KillAt())
"""


@pytest.mark.slow
def test_a_run_killed_twice_ends_bit_identical(
    request_for: Any, tmp_path: pathlib.Path
) -> None:
    import pickle

    settings = _private(**AVERAGES, train_over="ema")
    train(request_for("whole", run_id=ONE_ID, settings=settings))
    killed = request_for("killed", run_id=ONE_ID, settings=settings, checkpoint_every=3)
    (tmp_path / "request.pickle").write_bytes(pickle.dumps(killed))
    for step, code in ((1, -signal.SIGKILL), (8, -signal.SIGKILL), (99, 0)):
        child = _CHILD.format(
            root=str(ROOT), step=step, request=str(tmp_path / "request.pickle")
        )
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(child)],
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == code
        # The terminal is for progress: TensorFlow writes nothing to it.
        assert done.stdout + done.stderr == ""
    assert _same(tmp_path / "whole", tmp_path / "killed")


def test_what_a_kill_cut_short_is_removed_when_the_run_goes_on(
    request_for: Any,
) -> None:
    request = request_for(run_id=ONE_ID)
    (request.run / ".0a.saved_model").mkdir()
    for name in (".0a.saved_model/part", ".0b.model.keras", "private/.0c.run.id"):
        (request.run / name).write_bytes(b"half")
    train(request)
    assert not list(request.run.rglob(".*"))
