"""Every method trains by its definition, and states the epsilon of its theorem."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from accounting.claims.model_mix import theorem
from accounting.claims.model_mix.theorem import Mixing
from accounting.core import accountant
from accounting.core.validation import InputError
from pipelines.batches.folder import read_checksums, write_manifest
from tests.trainer.run.whole_runs import (
    AVERAGES,
    LINEAR,
    load_model,
    private_settings,
)
from trainer.core.run.run_record import read_run
from trainer.run import privacy
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

METHODS: list[dict[str, Any]] = [
    {"method": "bam", "bam_radius": 0.25},
    {"method": "bam", "bam_radius": 0.25, "bam_variant": "hvp"},
    {"method": "dp-sat", "sat_radius": 0.25},
]
ONE_AND_OTHERS = [
    METHODS[0],
    *(pytest.param(method, marks=pytest.mark.thorough) for method in METHODS[1:]),
]


@pytest.mark.parametrize("method", ONE_AND_OTHERS)
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
    assert summary.statement["discretization"] == theorem.DISCRETIZATION
    assert theorem.NOT_COVERED in summary.text
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


def test_model_mix_refuses_batches_of_other_samplers_before_any_work(
    request_for: Any, small_batches: Any
) -> None:
    plan = dataclasses.replace(
        small_batches.manifest.plan, sampler="dynamic-shuffle",
        truncated_batch_size=None, num_examples=80,
    )  # fmt: skip
    manifest = dataclasses.replace(small_batches.manifest, plan=plan)
    checksums = read_checksums(small_batches.path).files
    shuffled = small_batches.path.parent / "shuffled"
    shutil.copytree(small_batches.path, shuffled)
    (shuffled / "manifest.json").unlink()
    write_manifest(shuffled, manifest, checksums, seal_key="5" * 64)
    request = request_for(settings=private_settings(**MIXED), batches=shuffled)
    with pytest.raises(InputError, match=r"sampler='dynamic-shuffle'.*no other"):
        train(request)
    assert not request.run.exists()
