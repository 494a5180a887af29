"""What a run relies on besides the core has a name: in record, statement and page."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from tests.trainer.bounded import plan_of
from tests.trainer.conftest import write_run_folder
from tests.trainer.flat_settings import train_settings
from tests.trainer.run.test_certified_runs import said_of
from tests.trainer.thread_workers import Together
from tests.trainer.zoo import make_model, one_id
from trainer.claims.lazy_noise import LazyNoise
from trainer.core.claims import CLAIMS
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras
from trainer.gradients.engine.proof import table_reads
from trainer.methods import registry

METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "bam": {"bam_radius": 0.1},
    "dp-sat": {"sat_radius": 0.1},
    "model-mix": {"mix_width": 0.1, "optimizer": "sgd"},
}


def _step(method: str = "dp-sgd", *, lazy: bool = False, workers: int = 1) -> Step:
    settings = train_settings(
        method=method, noise_multiplier=1.0, l2_norm_clip=1.0, **METHODS[method]
    )
    model = make_model(one_id)
    found = registry.step_sum(model, settings, plan_of(8), 1.0)
    reads = table_reads(model)
    assert reads is not None
    worker = Together(workers).one(0)
    tables = LazyNoise(reads, bounded=found, workers=worker) if lazy else None
    optimizer = keras.optimizers.SGD(1.0)
    return Step(model.variables, found, optimizer, lazy=tables, workers=worker)


def test_every_claim_that_a_step_uses_has_its_name() -> None:
    graph = "graph gradients"
    assert _step().relies_on == (graph,)
    assert _step("bam").relies_on == (graph, "moved weights")
    assert _step("dp-sat").relies_on == (graph, "released moves")
    assert _step("model-mix").relies_on == (graph, "hidden mixtures")
    found = _step(lazy=True, workers=2).relies_on
    assert found == (graph, "lazy noise", "workers")


def test_views_and_rows_of_users_have_their_names() -> None:
    settings = train_settings(noise_multiplier=1.0, l2_norm_clip=1.0)
    for key, name in (("views", "views"), ("rows_per_user", "user rows")):
        model = dataclasses.replace(make_model(one_id), description={key: 2})
        found = registry.step_sum(model, settings, plan_of(8), 1.0)
        assert found.relies_on == ("graph gradients", name)


def test_record_statement_and_page_name_what_a_run_relies_on(
    small_batches: Any, tmp_path: pathlib.Path
) -> None:
    names = ["graph gradients", "lazy noise"]
    run = write_run_folder(tmp_path / "run", small_batches, relies_on=names)
    fields, text, page = said_of(run)
    assert fields["relies_on"] == ["batch job", *names]
    for name in names:
        assert f"  relies on   the {name}: {CLAIMS[name]}" in text
        assert name in page
    assert json.loads((run / "run_record.json").read_text())["relies_on"] == names
