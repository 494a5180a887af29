"""Every kind of task, through every command that a table sees, as a person types them.

`fit` gives `prepare`, `plan`, `statistics`, `batches`, `train`, `evaluate`
and `report` as it would print them; `predict` follows.  Tables have enough rows to be
evaluated, which is where a task was forgotten.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.usefixtures("warm_starts", "answers_once")

NUM_ROWS = 2_000
#: Of whole batches epsilon takes no time.
FLAGS = (
    "--epsilon=20", "--delta=1e-4", "--epochs=3",
    "--train=--hidden 4 --embedding-dim 2", "--numeric=size", "--category=shape",
)  # fmt: skip
OF_ROWS = ("--drop=who", "--rows-are-independent", "--batch-size=1500")
OF_USERS = (
    "--user=who", "--max-examples-per-user=2", "--num-examples=2000",
    "--batch-size=2000",
)  # fmt: skip
NAMES = ("red wine", "<white>", "rosé")


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of label, and what is made of it.

    Attributes:
      values: Row's score in [0, 3) -> label.
      flags: Flags of `fit` for it.
      outputs: Columns of predictions.
      metrics: Metrics of held-out rows.
      names: Names of classes; empty for none.
    """

    values: Callable[[float], Any]
    flags: Sequence[str]
    outputs: Sequence[str]
    metrics: frozenset[str]
    names: Sequence[str] = ()


_BINARY = frozenset({"auc", "log_loss", "accuracy"})
_CLASSES = frozenset({"log_loss", "accuracy"})
_NUMBER = frozenset({"mean_squared_error", "mean_absolute_error"})
TASKS = {
    "binary, 0 and 1": Task(
        lambda score: int(score > 1.5), (), ("predicted", "probability"), _BINARY
    ),
    "binary, names": Task(
        lambda score: NAMES[int(score > 1.5)],
        (f"--classes={','.join(NAMES[:2])}",),
        ("predicted", "probability"),
        _BINARY,
        NAMES[:2],
    ),
    "classes, integers": Task(
        lambda score: int(score) + 4,
        ("--classes=4,5,6",),
        ("predicted", "probability_4", "probability_5", "probability_6"),
        _CLASSES,
        ("4", "5", "6"),
    ),
    "classes, names": Task(
        lambda score: NAMES[int(score)],
        (f"--classes={','.join(NAMES)}",),
        ("predicted", *(f"probability_{name}" for name in NAMES)),
        _CLASSES,
        NAMES,
    ),
    "regression": Task(
        lambda score: round(100 + 10 * score, 3),
        ("--range=kind:100:130",),
        ("prediction",),
        _NUMBER,
    ),
}


def write_table(path: pathlib.Path, task: Task) -> None:
    random = np.random.default_rng(0)
    scores, users = 3 * random.random(NUM_ROWS), random.permutation(NUM_ROWS) // 2
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["who", "size", "shape", "kind"])
        for score, user in zip(scores, users, strict=True):
            size = round(score + random.normal(scale=0.3), 3)
            shape = "abc"[int(score)] if random.random() < 0.8 else ""
            rows.writerow([f"u{user}", size, shape, task.values(score)])


def fitted(typed: Callable[..., str], task: Task, *flags: str) -> dict[str, Any]:
    """Returns what `fit --json` says of a table of the task."""
    write_table(pathlib.Path("table.csv"), task)
    found: dict[str, Any] = json.loads(
        typed("fit", "table.csv", "--label=kind", *FLAGS, *flags, "--json")
    )
    return found


def check_results(found: dict[str, Any], task: Task) -> None:
    """Metrics, one epsilon of everything, and the page."""
    metrics = found["metrics"]
    assert set(metrics["intervals"]) == task.metrics
    assert None not in {metrics[name] for name in task.metrics}
    if task.metrics == _NUMBER:  # in units of the label, whose variance is 75
        assert 50 < metrics["guessing"]["mean_squared_error"] < 100
    assert found["together"].startswith("Model")
    assert "(20.0000, 0.0001)-differentially private" in found["together"]
    page = pathlib.Path("table-fit/report.html").read_text()
    assert found["together"] in page  # model, metrics and ranges
    assert metrics["evaluation"]["claim"] in html.unescape(page)
    for name in ("table.csv", *task.names):
        assert html.escape(name) in page


def check_predictions(typed: Callable[..., str], task: Task, run: str) -> None:
    """Of raw rows as CSV, and of prepared ones as Parquet."""
    typed("predict", run, "--input=table.csv", "--out=raw.csv", "--carry=who")
    raw = pa_csv.read_csv("raw.csv")
    assert raw.column_names == ["who", *task.outputs]
    assert raw.num_rows == NUM_ROWS
    typed("predict", run, "--input=table-fit/data/test", "--out=prepared.parquet")
    prepared = pq.read_table("prepared.parquet")
    assert prepared.column_names == list(task.outputs)
    if task.metrics == _NUMBER:
        assert 95 < np.mean(raw["prediction"]) < 135
    if task.names:
        assert set(raw["predicted"].to_pylist()) <= {*task.names, *map(int, "456")}
    of_classes = [raw[name].to_numpy() for name in task.outputs[1:]]
    if len(of_classes) > 1:
        np.testing.assert_allclose(sum(of_classes), 1, rtol=1e-4)
        assert {task.names[each] for each in np.argmax(of_classes, 0)} == {
            *map(str, raw["predicted"].to_pylist())
        }


#: Those of which the others take the same way, in the thorough tests alone.
THOROUGH = [
    ("binary, 0 and 1", "rows"), ("classes, integers", "rows"),
    ("binary, names", "users"), ("classes, names", "users"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("binary, names", "rows"),
        ("classes, names", "rows"),
        ("regression", "rows"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in THOROUGH),
    ],
)
def test_a_task_goes_all_the_way(
    name: str, unit: str, typed: Callable[..., str]
) -> None:
    task = TASKS[name]
    found = fitted(typed, task, *task.flags, *(OF_ROWS if unit == "rows" else OF_USERS))
    check_results(found, task)
    check_predictions(typed, task, "table-fit/run")
