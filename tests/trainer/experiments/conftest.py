"""Comparisons with made-up batches and runs, which take a moment."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelines.batches.folder import MANIFEST_NAME, read_manifest, write_manifest
from pipelines.core.batches.manifest import BatchFile, Manifest
from pipelines.files.storage import pretty_json
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.inputs.source_table import table_of
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.conftest import write_held_out
from trainer.core.run.run_record import RECORD_NAME, RunRecord
from trainer.experiments import comparison_runs as compare_runs
from trainer.report.run_files import METRICS_NAME
from trainer.run.preflight import Request
from trainer.settings.requests import ComparisonSettings
from trainer.settings.train_settings import TrainSettings

NUM_EXAMPLES = 400
PRIVATE = TrainSettings(target_epsilon=2.0, target_delta=1e-3, l2_norm_clip=1.0)


def finish(request: Request, *, auc: float = 0.7) -> None:
    """Writes the files of a finished run that a comparison reads."""
    request.run.mkdir(parents=True)
    manifest, settings = read_manifest(request.batches), request.settings
    record = RunRecord(
        method=settings.method,
        method_settings=dict(settings.method_settings),
        num_steps_executed=manifest.plan.num_steps,
        complete=True,
        noise_multiplier=settings.noise_multiplier,
        l2_norm_clip=settings.l2_norm_clip,
        clip_quantile=settings.clip_quantile,
        expected_batch_size=manifest.plan.expected_batch_size,
        target_delta=settings.target_delta,
        manifest_fingerprint=manifest.fingerprint,
        batches_id=manifest.batches_id,
        optimizer=settings.describe_optimizer(),
        model={},
        versions={},
    )
    told = {"examples": "held-out", "num_examples": 300}
    for name, fields in (
        (METRICS_NAME, {"auc": auc, "log_loss": 0.5, "aggregates": {}, **told}),
        (MANIFEST_NAME, manifest.to_json()),
        (RECORD_NAME, record.to_json()),
    ):
        (request.run / name).write_bytes(pretty_json(fields))


@dataclasses.dataclass
class Work:
    """Names of the folders of all batches and runs that were made."""

    batches: list[str] = dataclasses.field(default_factory=list)
    runs: list[str] = dataclasses.field(default_factory=list)

    def make_batches(
        self, function: str, source: str, folder: str, settings: BatchSettings
    ) -> None:
        """Stands in for ``processes.call``; keeps the table's description."""
        del function
        dataset, path = list_blocks(source), pathlib.Path(folder)
        plan = settings.plan(dataset.num_examples)
        manifest = Manifest(
            plan=plan,
            columns=dataset.columns,
            physical_batch_size=8,
            batches_id="0" * 32,
            files=(BatchFile(name="b", first_step=0, num_steps=plan.num_steps),),
            dataset=dataset.description,
        )
        path.mkdir()
        table = dataclasses.asdict(table_of(dataset))
        key = hashlib.sha256(path.name.encode()).hexdigest()
        write_manifest(path, manifest, {}, seal_key=key, table=table)
        self.batches.append(path.name)

    def train(self, request: Request) -> None:
        """Stands in for ``train_here``."""
        compare_runs.note(request)
        self.runs.append(request.run.name)
        finish(request)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Records batches and runs, and makes them up."""
    found = Work()
    monkeypatch.setattr(compare_runs.processes, "call", found.make_batches)
    monkeypatch.setattr(compare_runs, "train_here", found.train)
    return found


@pytest.fixture
def make_settings(
    tmp_path: pathlib.Path, rows: Callable[..., np.ndarray], held_out: pathlib.Path
) -> Callable[..., ComparisonSettings]:
    """``make_settings(**changes)`` of a comparison on 400 examples."""
    source = write_held_out(tmp_path / "train", rows(NUM_EXAMPLES))

    def make(**changes: Any) -> ComparisonSettings:
        fields: dict[str, Any] = {
            "source": str(source), "held_out": held_out, "out": tmp_path / "out",
            "seeds": 1, "trained": (PRIVATE,),
            "batches": (BatchSettings(expected_batch_size=20, num_epochs=1),),
        }  # fmt: skip
        return ComparisonSettings(**{**fields, **changes})

    return make
