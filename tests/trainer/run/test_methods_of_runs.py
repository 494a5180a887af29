"""Every method and average of a run is its definition, with epsilon of its theorem."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from accounting.claims import model_mix
from accounting.claims.model_mix import Mixing
from accounting.core import accountant
from accounting.core.validation import InputError
from pipelines.batches.folder import read_checksums, write_manifest
from pipelines.core.users import BOUNDED, Bounded
from tests.trainer.bounded import plan_of
from tests.trainer.conftest import DATASET
from tests.trainer.flat_settings import train_settings
from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    linear,
    load_model,
    private_settings,
)
from tests.trainer.thread_workers import Together
from tests.trainer.zoo import make_model, one_id
from trainer.claims.lazy_noise import LazyNoise
from trainer.core.run.run_record import read_run
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras
from trainer.gradients.proof import table_reads
from trainer.keras_model import make_private
from trainer.model.evaluation import HeldOut
from trainer.report.run_files import RUN_NAMES, exported_names
from trainer.run import hooks, privacy
from trainer.run.preflight import Request
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")


@pytest.mark.parametrize(
    "method",
    [{"method": "bam", "bam_radius": 0.25}, {"method": "dp-sat", "sat_radius": 0.25}],
)
def test_a_method_has_the_epsilon_of_dp_sgd_and_is_named_with_its_radius(
    method: dict[str, Any], request_for: Any
) -> None:
    settings = private_settings(**method, model=LINEAR)
    request = request_for(settings=settings, held_out=None)
    summary = train(request)
    assert summary.statement is not None
    kind = method["method"].replace("-", "").upper()
    assert kind in summary.statement["mechanism"].replace("-", "").upper()
    assert "radius=0.25" in summary.statement["mechanism"]
    record, manifest = read_run(request.run)
    assert record.method == method["method"]
    assert 0.25 in record.method_settings.values()
    of_dp_sgd = accountant.epsilon(manifest.plan, noise_multiplier=0.8, delta=1e-3)
    assert summary.statement["epsilon"] == of_dp_sgd.guarantee
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == summary.statement


MIXED: dict[str, Any] = {
    "method": "model-mix",
    "mix_width": 0.5,
    "linf_factor": 16,
    "optimizer": "sgd",
}


@pytest.fixture
def poisson_batches(batch_folder: Any, rows: Any) -> pathlib.Path:
    """Ten steps without a cap, since one this small would cost too much noise."""
    steps = [rows(size, seed) for seed, size in enumerate([7, 9, 4, 0, *[8] * 6])]
    folder = batch_folder(steps, "poisson", truncated_batch_size=None)
    path: pathlib.Path = folder.path
    return path


def test_model_mix_has_an_epsilon_of_its_own_and_says_by_which_theorem(
    request_for: Any, poisson_batches: pathlib.Path
) -> None:
    settings = private_settings(**{**MIXED, **AVERAGES, "noise_multiplier": 0.4})
    request = request_for(settings=settings, batches=poisson_batches)
    summary = train(request)
    record, manifest = read_run(request.run)
    assert record.method_settings == {"mix_width": 0.5, "linf_factor": 16}
    statement = privacy.run_statement(record, manifest, delta=None)
    assert statement.to_json() == summary.statement
    mixed = Mixing(mix_width=0.5, l2_norm_clip=1.0, linf_factor=16)
    wanted = mixed.epsilon(manifest.plan, noise_multiplier=0.4, delta=1e-3).guarantee
    assert summary.statement["epsilon"] == wanted
    plain = accountant.epsilon(
        manifest.plan, noise_multiplier=0.4, delta=1e-3
    ).guarantee
    assert wanted < plain
    assert "Xiao et al. 2023, Corollary 4.1" in summary.statement["theorem"]
    assert summary.statement["discretization"] == model_mix.DISCRETIZATION
    assert model_mix.NOT_COVERED in summary.text
    for words in ("sqrt(16)", "at least 0.5 times the learning rate apart"):
        assert words in summary.statement["mechanism"]
    # Kept iterates are the released ones.
    kept = np.load(request.run / "iterates/step-00000010.npz")
    weights = load_model(request.run / "model.keras").trainable_variables
    for index, variable in enumerate(weights):
        assert np.array_equal(kept[f"weight_{index}"], variable.numpy())
    # A record of another optimizer is no record of the theorem's mechanism.
    for other in ({"name": "momentum"}, {"name": "sgd", "train_over": "uta"}):
        changed = dataclasses.replace(record, optimizer=other)
        found = privacy.run_statement(changed, manifest, delta=None)
        assert found.epsilon.guarantee == plain
        assert "ModelMix (" not in found.epsilon.method


def _shuffled(batches: Any, folder: pathlib.Path) -> pathlib.Path:
    """The same batches, as if another sampler had made them."""
    plan = dataclasses.replace(
        batches.manifest.plan, sampler="dynamic-shuffle", truncated_batch_size=None,
        num_examples=80,
    )  # fmt: skip
    manifest = dataclasses.replace(batches.manifest, plan=plan)
    shutil.copytree(batches.path, folder)
    (folder / "manifest.json").unlink()
    checksums = read_checksums(batches.path).files
    write_manifest(folder, manifest, checksums, seal_key="5" * 64)
    return folder


@pytest.mark.parametrize(
    ("of_users", "message"),
    [
        (False, r"sampler='dynamic-shuffle'.*no other"),
        (True, "max_examples_per_user=3 to be 1 for"),
    ],
)
def test_batches_that_the_theorem_does_not_cover_are_refused_before_any_work(
    of_users: bool, message: str, batch_folder: Any, rows: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: `make_private` trained, and the run had no statement."""
    note = Bounded(user_column="user", max_examples_per_user=3, num_examples=200)
    dataset = {**DATASET, BOUNDED: note.to_json()} if of_users else DATASET
    steps = [rows(8, seed) for seed in range(10)]
    made = batch_folder(steps, truncated_batch_size=None, dataset=dataset)
    batches = made.path if of_users else _shuffled(made, tmp_path / "shuffled")
    run = tmp_path / "run"
    settings = private_settings(**MIXED, target_delta=None)
    request = Request(settings=settings, batches=batches, held_out=None, run=run)
    own = {name: value for name, value in MIXED.items() if name != "optimizer"}
    for refused in (
        lambda: train(request),
        lambda: make_private(
            linear(), batches=batches, run=run, noise_multiplier=0.8,
            l2_norm_clip=1.0, **own,
        ),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            refused()
        assert not run.exists()


def test_every_average_has_metrics_and_the_asked_ones_a_model(
    request_for: Any, small_batches: Any
) -> None:
    request = request_for(settings=private_settings(**AVERAGES))
    run, metrics = request.run, train(request).metrics
    found = metrics["aggregates"]
    assert list(found) == ["ema", "uta", "past_ema", "upa", "opa", "omv"]
    losses = [values["log_loss"] for values in (metrics, *found.values())]
    assert len(set(losses)) == 7
    assert {path.name for path in run.iterdir()} == set(RUN_NAMES) - {
        "certificate.json",
        "curve.png",
        *exported_names("past_ema"),
    }
    # By other means: plain NumPy and the exported models.
    kept = [np.load(run / f"iterates/step-{step:08d}.npz") for step in (6, 8, 10)]
    last, upa = (load_model(run / name) for name in ("model.keras", "upa_model.keras"))
    for index, weight in enumerate(upa.trainable_weights):
        mean = sum(file[f"weight_{index}"].astype("f8") for file in kept) / 3
        np.testing.assert_allclose(weight, mean, rtol=1e-6, atol=1e-9)
    manifest = small_batches.manifest
    held_out = HeldOut(request.held_out, manifest.columns, manifest.dataset)
    columns = next(held_out.batches())
    predictions = []
    for file in kept:
        last.set_weights([file[name] for name in file])
        inputs = {name: columns[name] for name in last.input}
        predictions.append(last(inputs).numpy().ravel())
    label, opa = columns["label"], np.mean(predictions, 0)
    loss = -np.log(np.where(label, opa, 1 - opa)).mean()
    assert found["opa"]["log_loss"] == pytest.approx(loss, rel=1e-5)


CLAIMED: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "bam": {"bam_radius": 0.1},
    "dp-sat": {"sat_radius": 0.1},
    "model-mix": {"mix_width": 0.1, "optimizer": "sgd"},
}


def _step(method: str = "dp-sgd", *, lazy: bool = False, workers: int = 1) -> Step:
    settings = train_settings(
        method=method, noise_multiplier=1.0, l2_norm_clip=1.0, **CLAIMED[method]
    )
    model = make_model(one_id)
    found = hooks.step_sum(model, settings, plan_of(8), 1.0)
    reads = table_reads(model)
    assert reads is not None
    worker = Together(workers).one(0)
    tables = LazyNoise(reads, bounded=found, workers=worker) if lazy else None
    optimizer = keras.optimizers.SGD(1.0)
    return Step(model.variables, found, optimizer, lazy=tables, workers=worker)


def test_every_claim_that_a_step_uses_has_its_name() -> None:
    settings = train_settings(noise_multiplier=1.0, l2_norm_clip=1.0)
    viewed = dataclasses.replace(make_model(one_id), description={"views": 2})
    of_views = hooks.step_sum(viewed, settings, plan_of(8), 1.0)
    assert of_views.relies_on == ("graph gradients", "views")
    graph = "graph gradients"
    assert _step().relies_on == (graph,)
    assert _step("bam").relies_on == (graph, "moved weights")
    assert _step("dp-sat").relies_on == (graph, "released moves")
    assert _step("model-mix").relies_on == (graph, "hidden mixtures")
    found = _step(lazy=True, workers=2).relies_on
    assert found == (graph, "lazy noise", "workers")
