"""Small batches, held-out data and models for the tests of the trainer."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorflow.python.eager import context

from accounting.core import accountant
from accounting.core.plan import CYCLIC_POISSON, POISSON, SAMPLERS, DpSgdPlan
from pipelines.batches import first_use
from pipelines.batches.folder import write_manifest
from pipelines.core.batches.batch_format import encode_batch, write_record
from pipelines.core.batches.manifest import BatchFile, Column, FileChecksum, Manifest
from pipelines.core.users import BOUNDED
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.inputs.source_table import (
    FOOTERS,
    PREPARED_NAME,
    SourceTable,
    footers_of,
)
from tests.criteo import described
from trainer import models
from trainer.core.run.run_record import RunRecord, write_run
from trainer.core.step.dp_step import Step

NUM_BUCKETS = [7] * 26
DATASET = described(NUM_BUCKETS)
COLUMNS = (
    Column(name="label", dtype="int8"),
    Column(name="integers", dtype="float32", shape=(13,)),
    Column(name="categories", dtype="int32", shape=(26,)),
)
ROW = np.dtype([(column.name, column.numpy_dtype) for column in COLUMNS])


def make_rows(num_rows: int, seed: int = 0) -> np.ndarray:
    """Rows whose label depends on the first integer and the first category."""
    random = np.random.default_rng(seed)
    rows = np.zeros(num_rows, ROW)
    integers = random.geometric(0.2, (num_rows, 13)).astype("f4") - 3
    integers[random.random(integers.shape) < 0.1] = np.nan
    rows["integers"] = integers
    rows["categories"] = random.integers(0, 7, (num_rows, 26))
    score = np.nan_to_num(integers[:, 0]) / 2 + rows["categories"][:, 0] - 4
    rows["label"] = random.random(num_rows) < 1 / (1 + np.exp(-score))
    return rows


@dataclasses.dataclass(frozen=True)
class BatchFolder:
    """Batches on disk, and their content."""

    path: pathlib.Path
    manifest: Manifest
    steps: list[np.ndarray]


def _records(
    steps: Mapping[int, np.ndarray],
    truncated_batch_size: int | None,
    physical_batch_size: int,
    columns: Sequence[Column],
) -> Iterator[tuple[int, int, bytes]]:
    """Yields step, part and record of every physical batch."""
    for step, rows in steps.items():
        size = truncated_batch_size or max(1, len(rows))
        for part in range(-(-size // physical_batch_size)):
            chosen = rows[part * physical_batch_size : (part + 1) * physical_batch_size]
            record = encode_batch(
                {column.name: chosen[column.name] for column in columns},
                step=step,
                part=part,
                physical_batch_size=physical_batch_size,
            )
            yield step, part, record


#: Key of the seal of batches that tests write.
SEAL_KEY = "5" * 64
#: Table that batches are of.
TABLE = SourceTable(sources=("1" * 64, "2" * 64), division="3" * 32, part="train")


def _write_file(
    path: pathlib.Path, records: Iterable[tuple[int, int, bytes]], num_real: int
) -> FileChecksum:
    """Writes the records of a file, and returns its checksum."""
    buffer, sums = io.BytesIO(), []
    for step, part, record in records:
        sums.append(write_record(buffer.write, record, step=step, part=part))
    path.write_bytes(buffer.getvalue())
    return FileChecksum(num_real=num_real, records=tuple(sums))


def write_batches(
    path: pathlib.Path,
    steps: Sequence[np.ndarray],
    *,
    expected_batch_size: int = 8,
    truncated_batch_size: int | None = 16,
    physical_batch_size: int = 16,
    num_examples: int = 200,
    steps_per_file: int = 4,
    batches_id: str = "0" * 32,
    seal_key: str = "",
    columns: Sequence[Column] = COLUMNS,
    dataset: dict[str, Any] = DATASET,
    table: SourceTable = TABLE,
    bands: int | None = None,
) -> BatchFolder:
    """Writes the rows of each step as the batch job would, by default by one key."""
    seal_key = seal_key or SEAL_KEY
    path.mkdir(parents=True)
    name = POISSON if bands is None else CYCLIC_POISSON
    plan = DpSgdPlan(
        sampler=name if truncated_batch_size is None else f"truncated-{name}",
        bands=bands,
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        num_steps=len(steps),
        truncated_batch_size=truncated_batch_size,
    )
    files, checksums = [], {}
    for first in range(0, len(steps), steps_per_file):
        chosen = steps[first : first + steps_per_file]
        name = f"batches-{first:08d}.tfrecord"
        files.append(BatchFile(name=name, first_step=first, num_steps=len(chosen)))
        records = _records(
            dict(enumerate(chosen, first)),
            truncated_batch_size,
            physical_batch_size,
            columns,
        )
        checksums[name] = _write_file(path / name, records, sum(map(len, chosen)))
    manifest = Manifest(
        plan=plan,
        columns=tuple(columns),
        physical_batch_size=physical_batch_size,
        batches_id=batches_id,
        files=tuple(files),
        dataset=dataset,
    )
    source = dataclasses.asdict(table)
    write_manifest(path, manifest, checksums, seal_key=seal_key, table=source)
    return BatchFolder(path, manifest, list(steps))


def make_record(manifest: Manifest, **changes: Any) -> RunRecord:
    """The record of a finished run on the batches of ``manifest``."""
    fields: dict[str, Any] = {
        "method": "dp-sgd",
        "method_settings": {},
        "num_steps_executed": manifest.plan.num_steps,
        "complete": True,
        "noise_multiplier": 1.5,
        "l2_norm_clip": 1.0,
        "expected_batch_size": manifest.plan.expected_batch_size,
        "target_delta": 1e-3,
        "manifest_fingerprint": manifest.fingerprint,
        "batches_id": manifest.batches_id,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "model": {"name": "criteo"},
        "versions": {"numpy": "1"},
    }
    return RunRecord(**{**fields, **changes})


def write_run_folder(
    root: pathlib.Path, batches: BatchFolder, **changes: Any
) -> pathlib.Path:
    """A new folder with the manifest and the record of a run."""
    (root / "private").mkdir(parents=True)
    record = make_record(batches.manifest, **changes)
    write_run(root, record, batches.manifest)
    return root


def write_held_out(
    path: pathlib.Path,
    rows: np.ndarray,
    dataset: dict[str, Any] = DATASET,
    columns: Sequence[Column] = COLUMNS,
) -> pathlib.Path:
    """Writes rows as the Parquet files of `dpsgd prepare`."""
    path.mkdir(parents=True)
    arrays = []
    for column in columns:
        values = pa.array(rows[column.name].reshape(-1))
        if column.shape:
            values = pa.FixedSizeListArray.from_arrays(values, column.shape[0])
        arrays.append(values)
    table = pa.table(dict(zip([c.name for c in columns], arrays, strict=True)))
    table = table.replace_schema_metadata({DATASET_METADATA_KEY: json.dumps(dataset)})
    pq.write_table(table, path / "part-00000.parquet", row_group_size=100)
    if BOUNDED in dataset:
        footers = footers_of(path.parent, [f"{path.name}/part-00000.parquet"])
        place = path.parent / PREPARED_NAME  # of all that lie there
        if place.exists():
            footers |= json.loads(place.read_bytes())[FOOTERS]
        record = {"settings": {}, "dataset": dataset, "files": {}, FOOTERS: footers}
        place.write_text(json.dumps(record))
    return path


@pytest.fixture
def rows() -> Callable[..., np.ndarray]:
    """``rows(num_rows, seed=0)``."""
    return make_rows


@pytest.fixture
def batch_folder(tmp_path: pathlib.Path) -> Callable[..., BatchFolder]:
    """``batch_folder(steps, name="batches", **plan)``."""

    def make(
        steps: Sequence[np.ndarray], name: str = "batches", **more: object
    ) -> BatchFolder:
        return write_batches(tmp_path / name, steps, **more)  # type: ignore[arg-type]

    return make


@pytest.fixture
def small_batches(batch_folder: Callable[..., BatchFolder]) -> BatchFolder:
    """Ten steps of data-dependent size, of which one is empty."""
    random = np.random.default_rng(1)
    sizes = [int(size) for size in random.binomial(40, 0.2, 10)]
    sizes[3] = 0
    return batch_folder([make_rows(size, seed) for seed, size in enumerate(sizes)])


@pytest.fixture
def held_out(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of 300 held-out examples in three row groups."""
    return write_held_out(tmp_path / "held_out", make_rows(300, seed=99))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """The noise of each step that begins, whatever becomes of it."""
    found: list[list[np.ndarray]] = []
    begin = Step.begin

    def keep(step: Step, noise: Any, later: Any = None) -> None:
        found.append([one.copy() for one in noise])
        begin(step, noise, later)

    monkeypatch.setattr(Step, "begin", keep)
    return found


@pytest.fixture(autouse=True, scope="module")
def kernels_are_kept() -> Iterator[None]:
    """A seed, or a new session of Keras, forgets no kernel within a module of tests.

    Else TensorFlow makes that of every operation anew: a seventh of a small test.  No
    test draws by kernels that keep state, which is why TensorFlow forgets them.
    """
    forget = context.pywrap_tfe.TFE_ContextClearCaches
    context.pywrap_tfe.TFE_ContextClearCaches = lambda _: None
    yield
    context.pywrap_tfe.TFE_ContextClearCaches = forget
    context.context().clear_kernel_cache()


@pytest.fixture(autouse=True)
def batches_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs, which nobody sees, use the batches of a test one after the other.

    That others are refused is tested in ``test_batches_of_runs``, without this.
    """
    monkeypatch.setattr(first_use, "check", lambda batches, run_id: None)


#: Default models that were checked in this process.
_CHECKED: set[str] = set()
#: What the descriptions of models that are ours have, and the name of a loss of ours.
_AUDITED = "tests.trainer.auditing.audit_model"
_OURS = {
    "embedding_dim",
    "tests.trainer.run.whole_runs:linear",
    *(f"{_AUDITED}:{name}" for name in ("weights", "unproven_weights", "linear")),
}


@pytest.fixture(autouse=True)
def default_models_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs check an equal default model once in a process: a sixth of a small run.

    The check is a function of the model and the columns, which the description and the
    manifest determine, and weights of its own.  Code of users is always checked.
    """
    check = models.check_model

    def check_once(model: models.TrainableModel, manifest: Manifest) -> None:
        is_ours = _OURS & {*model.description, model.description.get("name")}
        is_default = is_ours and (not model.loss.ones_own or model.loss.name in _OURS)
        sizes = (manifest.columns, manifest.physical_batch_size)
        known = repr((model.description, manifest.dataset, sizes))
        if not is_default or known not in _CHECKED:
            check(model, manifest)
            _CHECKED.add(known)

    monkeypatch.setattr(models, "check_model", check_once)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The accountant's function, which computes an answer once in this process."""
    known = functools.lru_cache(maxsize=None, typed=True)(function)

    def answer(plan: DpSgdPlan, **asked: Any) -> Any:
        return (known if plan.sampler in SAMPLERS else function)(plan, **asked)

    return answer


_ANSWERS = {
    name: _once(getattr(accountant, name))
    for name in ("epsilon", "delta", "noise_multiplier")
}


@pytest.fixture(autouse=True)
def answers_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs share the accountant's answers, functions of their arguments alone.

    Most small runs have one plan.  Tests of the accountant compute every answer.
    """
    for name, function in _ANSWERS.items():
        monkeypatch.setattr(accountant, name, function)


def save_nothing(network: Any, inner: Any, path: str) -> None:
    """Stands in for ``export._save_tensorflow``, whose files are in a folder too."""
    del network, inner
    folder = pathlib.Path(path) / "variables"
    folder.mkdir(parents=True)
    (folder / "none").touch()


@pytest.fixture
def lean_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without SavedModels and picture, half of a small run's time.

    For tests of what is trained and how: Keras' files hold it.  What a run writes is
    tested without this, in ``test_complete_results``.
    """
    monkeypatch.setattr("trainer.export._save_tensorflow", save_nothing)
    monkeypatch.setattr("trainer.report.report.plot_curve", lambda *_, title: None)
