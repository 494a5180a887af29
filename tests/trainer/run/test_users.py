"""A run on records of users: trained by users, evaluated by rows."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core import accountant
from pipelines.batches.folder import read_manifest
from pipelines.core.batches.manifest import Manifest
from pipelines.core.users import USERS
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.poisson_batching import make_batches
from pipelines.tables.bounding import BoundSettings
from tests.pipelines.bounded_rows import bound_rows
from trainer.core.tf_compat import keras
from trainer.prediction.predict import predict
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

MOST, ROWS = 3, 400


def linear(manifest: Manifest) -> Any:
    """A model of rows with one weight, which does not know of users."""
    assert {column.name: column.shape for column in manifest.columns} == {
        "x": (),
        "label": (),
    }
    entry = keras.Input((), name="x")
    return keras.Model(entry, keras.layers.Dense(1)(keras.layers.Reshape((1,))(entry)))


def write_rows(path: pathlib.Path, **more: Any) -> pathlib.Path:
    rng = np.random.default_rng(3)
    x = rng.normal(size=ROWS).astype("f4")
    label = (x + rng.normal(size=ROWS) > 0).astype("f4")
    pq.write_table(pa.table({"x": x, "label": label, **more}), path)
    return path


@pytest.fixture(scope="module")
def request_of_users(tmp_path_factory: pytest.TempPathFactory) -> Request:
    root = tmp_path_factory.mktemp("users")
    users = np.random.default_rng(4).zipf(1.5, ROWS) % 90
    table = write_rows(root / "table.parquet", user=users)
    settings = BoundSettings(
        user_column="user", max_examples_per_user=MOST, num_examples=100, sampled=USERS
    )
    make_batches(
        bound_rows(table, root / "bounded", settings),
        str(root / "batches"),
        BatchSettings(expected_batch_size=20, num_steps=4),
    )
    (root / "held-out").mkdir()
    rng = np.random.default_rng(5)
    held_out = pa.table(
        {"x": rng.normal(size=50).astype("f4"), "label": np.float32(np.arange(50) % 2)}
    )
    pq.write_table(held_out, root / "held-out" / "rows.parquet")
    return Request(
        settings=TrainSettings(
            model="tests.trainer.run.test_users:linear",
            target_epsilon=4.0,
            target_delta=1e-3,
            l2_norm_clip=1.0,
        ),
        batches=root / "batches",
        held_out=root / "held-out",
        run=root / "run",
    )


def test_a_run_on_records_of_users(request_of_users: Request) -> None:
    summary = train(request_of_users)
    run = request_of_users.run
    privacy = json.loads((run / "privacy.json").read_bytes())
    assert privacy["privacy_unit"].startswith("one user: an example holds the rows")
    assert "the mean loss over at most 3 rows of a user" in privacy["mechanism"]
    # There are fewer users than slots, which zero-out does not cover.
    relation = "ADD_OR_REMOVE_ONE"
    assert privacy["neighboring_relation"] == relation
    assert "all examples of one user are added" in privacy["neighboring_relation_text"]
    found = accountant.epsilon(
        read_manifest(request_of_users.batches).plan,
        noise_multiplier=privacy["noise_multiplier"],
        delta=1e-3,
        neighboring_relation=relation,
    )
    assert privacy["epsilon"] == found.guarantee <= 4.0
    record = json.loads((run / "run_record.json").read_bytes())
    assert record["model"]["rows_per_user"] == MOST
    assert summary.metrics["examples"] == "held-out"
    found = predict(run, request_of_users.held_out, run.with_name("out.parquet"))
    assert found.num_rows == 50


def test_a_run_without_privacy_leaves_users_out_whole(
    request_of_users: Request, tmp_path: pathlib.Path
) -> None:
    plain = TrainSettings(
        method="non-private", model=f"{__name__}:linear", learning_rate=0.1
    )
    run = tmp_path / "run"
    request = dataclasses.replace(request_of_users, settings=plain, run=run)
    assert train(request).metrics["step"] > 0
