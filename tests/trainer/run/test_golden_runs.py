"""The bytes of runs with a fixed secret, which are the same on every machine.

``golden_runs.json`` holds, of one run by DP-SGD, one by BAM and one by ModelMix: the
bytes of the batch file, of what is drawn for every step (from the secret), and of what
the steps are given; the run record, and the privacy statement.  A change of any is a
change of what users rely on: say so in the changelog, and write the file anew with

    python -m tests.trainer.run.test_golden_runs

Weights are not golden: TensorFlow's kernels round as the processor has them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from accounting.core.plan import POISSON, DpSgdPlan
from pipelines.sampling import samplers
from pipelines.sampling.samplers import BlockRows
from tests.trainer.bounded import StandIn
from tests.trainer.conftest import ROW, BatchFolder, write_batches
from tests.trainer.flat_settings import train_settings
from tests.trainer.run.whole_runs import ONE_SECRET, open_session
from trainer.core.run import session as session_module
from trainer.methods import registry
from trainer.run import privacy

FILE = pathlib.Path(__file__).with_name("golden_runs.json")
NUM_ROWS, NUM_STEPS = 40, 5
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "bam": {"method": "bam", "bam_radius": 0.25},
    "model-mix": {
        "method": "model-mix", "mix_width": 0.5, "linf_factor": 16, "optimizer": "sgd",
    },
}  # fmt: skip


def _rows(numbers: np.ndarray) -> np.ndarray:
    """Rows made of their numbers, without a random generator."""
    rows = np.zeros(len(numbers), ROW)
    rows["label"] = numbers % 2
    rows["integers"] = numbers[:, None] / 8 + np.arange(13)
    rows["categories"] = (numbers[:, None] + np.arange(26)) % 7
    return rows


def _batches(folder: pathlib.Path) -> BatchFolder:
    """Poisson batches of a fixed sampling key."""
    plan = DpSgdPlan(
        sampler=POISSON, num_examples=NUM_ROWS, expected_batch_size=8,
        num_steps=NUM_STEPS,
    )  # fmt: skip
    block = BlockRows(name="golden.parquet#0", num_rows=NUM_ROWS, first_row=0)
    chosen = samplers.sample_block(plan, bytes(range(32)), block, None)
    steps = [_rows(np.sort(chosen.row[chosen.step == s])) for s in range(NUM_STEPS)]
    return write_batches(
        folder / "batches", steps, truncated_batch_size=None, num_examples=NUM_ROWS
    )


class Recorder(StandIn):
    """A step of two variables, which digests its arguments."""

    def __init__(self) -> None:
        super().__init__([(3, 2), (5,)], clip=1.0, multiplier=0.8)
        self.given = hashlib.sha256()

    def begin(self, noise: Iterable[np.ndarray], later: Any) -> None:
        del later
        for array in noise:
            self.given.update(array.astype("<i8").tobytes())

    def add(self, columns: Any, weight: Any) -> None:
        for name in sorted(columns):
            array = columns[name].numpy()
            self.given.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        self.given.update(weight.numpy().astype("<f4").tobytes())

    def finish(self, settle: Any) -> Any:
        return settle(lambda: None)


def _run(folder: pathlib.Path, batches: BatchFolder, method: str) -> dict[str, Any]:
    settings = train_settings(
        noise_multiplier=0.8, l2_norm_clip=1.0, target_delta=1e-3, **METHODS[method]
    ).for_plan(batches.manifest.plan, 0.8)
    step = Recorder()
    session = open_session(step, batches, folder / "run", settings)
    drawn_beside = hashlib.sha256()
    draw = registry.hooks_of(method).draw
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setattr(session_module, "new_secret", lambda: ONE_SECRET)
        for drawn, parts in opened.enter_context(session.steps(draw=draw)):
            for array in drawn[2:]:
                drawn_beside.update(array.astype("<f4").tobytes())
            session.execute(drawn[:2], parts)
    session.num_steps_committed = session.num_steps_executed
    record = session.record(complete=True)
    statement = privacy.run_statement(record, batches.manifest, delta=None)
    fields = {
        k: v for k, v in record.to_json().items() if k not in ("versions", "checksum")
    }
    return {
        "drawn_beside_noise": drawn_beside.hexdigest(),
        "noise_and_batches": step.given.hexdigest(),
        "record": fields,
        "statement": statement.to_text().splitlines(),
    }


def _found(folder: pathlib.Path, method: str) -> dict[str, Any]:
    batches = _batches(folder)
    files = [batches.path / file.name for file in batches.manifest.files]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    run = _run(folder, batches, method)
    found: dict[str, Any] = json.loads(json.dumps({"batch_files": digests, **run}))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_fixed_keys_is_the_golden_one(
    method: str, tmp_path: pathlib.Path
) -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert _found(tmp_path, method) == golden[method]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for method in METHODS:
            (pathlib.Path(name) / method).mkdir()
            found[method] = _found(pathlib.Path(name) / method, method)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")
