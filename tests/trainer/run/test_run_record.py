"""Run records: what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from accounting.claims.model_mix import Mixing
from accounting.core.validation import InputError
from accounting.statement import privacy_statement
from pipelines.core.users import BOUNDED, Bounded
from tests.trainer.conftest import make_record, write_run_folder
from trainer.core.run.run_record import (
    RECORD_NAME,
    RunRecord,
    check_execution,
    read_run,
)
from trainer.run import privacy
from trainer.run.privacy import run_statement


@pytest.fixture
def run(tmp_path: pathlib.Path, small_batches: Any) -> pathlib.Path:
    return write_run_folder(tmp_path / "run", small_batches)


def _edit(path: pathlib.Path, **changes: Any) -> None:
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, **changes}, indent=2, sort_keys=True) + "\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"unknown": 1},
        {"version": 2},
        {"method": None},
        {"format": "dpsgd-batches"},
        {"noise_multiplier": None},
        {"noise_multiplier": -1.0},
        {"l2_norm_clip": 0.0},
        {"complete": "yes"},
        {"target_delta": 1.0},
        {"method": "non-private"},
    ],
)
def test_json_that_is_not_a_record_is_refused(
    changes: dict[str, Any], small_batches: Any
) -> None:
    fields = make_record(small_batches.manifest).to_json()
    with pytest.raises(InputError):
        RunRecord.from_json({**fields, **changes})
    del fields["method"]
    with pytest.raises(InputError, match="method"):
        RunRecord.from_json(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"method_settings": {"bam_radius": 0.1}},
        {"method": "bam"},
        {"method": "dp-sat", "method_settings": {"sat_radius": -1.0}},
        {"method": "magic"},
        {"method": "non-private", "noise_multiplier": None, "l2_norm_clip": None},
        {"target_delta": None},
    ],
)
def test_nothing_is_stated_without_a_private_method_its_settings_and_a_delta(
    changes: dict[str, Any], small_batches: Any
) -> None:
    record = make_record(small_batches.manifest, **changes)
    with pytest.raises(InputError, match=r"method|sat_radius|no epsilon|--delta"):
        run_statement(record, small_batches.manifest, delta=None)


def test_a_record_or_manifest_that_was_edited_or_is_of_another_run_is_refused(
    run: pathlib.Path, batch_folder: Any, small_batches: Any
) -> None:
    for change in ({"noise_multiplier": 9.0}, {"versions": {"numpy": "2"}}):
        before = (run / RECORD_NAME).read_bytes()
        _edit(run / RECORD_NAME, **change)
        with pytest.raises(InputError, match="values have changed since"):
            read_run(run)
        (run / RECORD_NAME).write_bytes(before)
    other = batch_folder(small_batches.steps, "other", batches_id="1" * 32)
    (run / "manifest.json").write_bytes((other.path / "manifest.json").read_bytes())
    with pytest.raises(InputError, match="used other batches"):
        read_run(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps_executed": 9}, "num_steps_executed=9"),
        ({"num_steps_executed": 11}, "num_steps_executed=11"),
        ({"complete": False}, "complete"),
        ({"manifest_fingerprint": "0" * 64}, "other batches"),
        ({"batches_id": "1" * 32}, "other batches"),
        ({"expected_batch_size": 16}, "expected_batch_size=16"),
    ],
)
def test_another_execution_than_the_plan_is_refused(
    changes: dict[str, Any], message: str, small_batches: Any
) -> None:
    manifest = small_batches.manifest
    check_execution(make_record(manifest), manifest)
    with pytest.raises(InputError, match=message):
        check_execution(make_record(manifest, **changes), manifest)
    if changes == {"complete": False}:  # it ended before its results were written
        run_statement(make_record(manifest, **changes), manifest, delta=None)
        return
    with pytest.raises(InputError, match=message):
        run_statement(make_record(manifest, **changes), manifest, delta=None)


def test_a_run_on_bounded_users_protects_users(small_batches: Any) -> None:
    plain = small_batches.manifest
    note = Bounded(user_column="user", max_examples_per_user=3, num_examples=9, key="")
    bounded = dataclasses.replace(plain, dataset={BOUNDED: note.to_json()})
    found = run_statement(make_record(bounded), bounded, delta=1e-3)
    of_plan = privacy_statement(
        plain.plan,
        noise_multiplier=1.5,
        delta=1e-3,
        max_examples_per_user=3,
        neighboring_relation="ADD_OR_REMOVE_ONE",
    )
    assert found.epsilon == of_plan.epsilon
    of_example = run_statement(make_record(plain), plain, delta=1e-3)
    assert found.epsilon.guarantee > of_example.epsilon.guarantee
    assert "one user, of whom `dpsgd prepare` kept at most 3 rows" in found.to_text()
    assert "all examples of one user are added or removed" in found.to_text()


def test_noise_for_a_target_is_that_of_the_unit(small_batches: Any) -> None:
    plan = small_batches.manifest.plan
    target = {"epsilon": 2.0, "delta": 1e-3}
    note = Bounded(user_column="user", max_examples_per_user=3, num_examples=40)
    for_users = privacy.noise_bounds(plan, **target, bounded=note)
    assert for_users.guarantee > privacy.noise_bounds(plan, **target).guarantee
    mixing = Mixing(mix_width=0.15, l2_norm_clip=1.0)
    with pytest.raises(InputError, match="max_examples_per_user=3 to be 1 for"):
        privacy.noise_bounds(plan, **target, theorem=mixing, bounded=note)


def test_a_theorem_of_zero_out_is_not_for_truncated_batches_of_users(
    small_batches: Any,
) -> None:
    """With few of the users that there may be, delta is larger than its bound."""
    plan, mixing = small_batches.manifest.plan, Mixing(mix_width=0.0, l2_norm_clip=1.0)
    note = Bounded(user_column="user", max_examples_per_user=1, num_examples=40)
    description, target = {BOUNDED: note.to_json()}, {"epsilon": 2.0, "delta": 1e-3}
    with pytest.raises(InputError, match="Expected batches without a cap"):
        privacy.unit_of(description, plan, mixing)
    asked: dict[str, Any] = {"theorem": mixing, "bounded": note}
    with pytest.raises(InputError, match="Expected batches without a cap"):
        privacy.noise_bounds(plan, **target, **asked)
    without = dataclasses.replace(plan, sampler="poisson", truncated_batch_size=None)
    found = privacy.unit_of(description, without, mixing)
    assert found["neighboring_relation"] == "REPLACE_SPECIAL"
    assert privacy.noise_bounds(without, **target, **asked).guarantee > 0
