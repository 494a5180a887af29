"""``evaluate``: metrics of a run on held-out rows, with an epsilon for them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from accounting.core.pld.dominating_pairs import gaussian_epsilon, gaussian_noise
from accounting.core.validation import InputError
from pipelines.batches import folder as batch_folder
from pipelines.core.users import BOUNDED, Bounded
from tests.trainer.conftest import (
    DATASET,
    TABLE,
    make_rows,
    write_batches,
    write_held_out,
)
from tests.trainer.run.whole_runs import private_settings
from trainer.core.tf_compat import keras, tf
from trainer.model import evaluation
from trainer.model.metrics import binary_metrics
from trainer.prediction import exported_model
from trainer.prediction.predict import predict
from trainer.releases import evaluate as private
from trainer.releases.evaluate import evaluate
from trainer.report import run_files
from trainer.report.progress import Silent
from trainer.run.preflight import Request
from trainer.train import train

DELTA = 1e-5
ROWS = make_rows(3_000, seed=99)


def _train(root: pathlib.Path, name: str, **changes: Any) -> pathlib.Path:
    batches = root / f"batches-{name}"
    if not batches.exists():
        steps = [make_rows(8, seed) for seed in range(10)]
        write_batches(batches, steps, batches_id=name[-1] * 32)
    settings = private_settings(learning_rate=0.3, target_delta=DELTA)
    settings = dataclasses.replace(settings, **changes.pop("settings", {}))
    more = {"held_out": None, "run": root / name, **changes}
    train(Request(settings=settings, batches=batches, **more))
    return root / name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run that was not evaluated, its batches, and held-out rows."""
    found = tmp_path_factory.mktemp("evaluate")
    write_held_out(found / "table", ROWS)
    run = _train(found, "run-a")
    assert not (run / "metrics.json").exists()
    assert not (run / "curve.json").exists()
    return found


@pytest.fixture
def run(root: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(root / "run-a", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def evaluated(root: pathlib.Path, run: pathlib.Path) -> Callable[..., Any]:
    """``evaluated(**settings)``: the metrics of the run."""

    def make(**settings: Any) -> Any:
        given = {"epsilon": 1.0, **settings}
        return evaluate(run, root / "batches-run-a", root / "table", **given)

    return make


def test_the_metrics_are_private_by_one_gaussian_release(
    evaluated: Callable[..., Any], run: pathlib.Path, released_by: Any
) -> None:
    seen = released_by(private)
    found = evaluated(epsilon=0.7)
    ((_, noise),) = seen
    assert (
        noise == gaussian_noise(0.7, DELTA) == found["evaluation"]["noise_multiplier"]
    )
    assert gaussian_epsilon(noise, DELTA) <= 0.7
    assert json.loads((run / "metrics.json").read_bytes()) == json.loads(
        json.dumps(found)
    )


def test_metrics_are_near_the_exact_ones(
    root: pathlib.Path,
    run: pathlib.Path,
    evaluated: Callable[..., Any],
    tmp_path: pathlib.Path,
) -> None:
    predict(run, root / "table", tmp_path / "out.parquet")
    chances = pq.read_table(tmp_path / "out.parquet")["probability"].to_numpy()
    with np.errstate(divide="ignore"):
        exact = binary_metrics(ROWS["label"], np.log(chances) - np.log1p(-chances))
        losses = -np.log(np.where(ROWS["label"] > 0, chances, 1 - chances))
    exact["log_loss"] = float(np.minimum(losses, 4.0).mean())
    found = evaluated(epsilon=4.0)
    for name, (low, high) in found["intervals"].items():
        # Four times the interval of 95 %: an error rate of 1e-14.
        side = 2 * (high - low)
        assert abs(found[name] - (exact[name] or 0.0)) < side
    assert set(found["intervals"]) == {"auc", "log_loss", "accuracy"}
    assert found["num_examples"] == exact["num_examples"] == 3_000


def test_a_run_is_evaluated_once(
    evaluated: Callable[..., Any], root: pathlib.Path, run: pathlib.Path
) -> None:
    evaluated()
    before = (run / "metrics.json").read_bytes()
    with pytest.raises(InputError, match="has those of `dpsgd evaluate`"):
        evaluated(epsilon=2.0)
    assert (run / "metrics.json").read_bytes() == before
    (run / "metrics.json").write_text('{"auc": 0.5}')
    with pytest.raises(InputError, match="those of --eval"):
        evaluated()


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),  # the training part, prepared again
        ({"division": "4" * 32, "part": "test"}, True),  # by another split
        ({"part": "test"}, False),
        ({"sources": ("5" * 64,)}, False),
    ],
)
def test_rows_of_the_same_table_are_of_another_part(
    changes: Any,
    refused: bool,
    root: pathlib.Path,
    run: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = dataclasses.replace(TABLE, **changes)
    monkeypatch.setattr(private, "table_of", lambda _: found)
    given = (run, root / "batches-run-a", root / "table")
    if refused:
        with pytest.raises(InputError, match="--input to hold no training examples"):
            evaluate(*given)
    else:
        assert evaluate(*given)["num_examples"] == len(ROWS["label"])


def test_files_of_training_rows_are_refused(
    evaluated: Callable[..., Any], root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = batch_folder.read_checksums(root / "batches-run-a")
    (path,) = (root / "table").glob("*.parquet")
    digest = evaluation.footer_digest(str(path))
    sampled = dataclasses.replace(found, inputs=(*found.inputs, digest))
    monkeypatch.setattr(private, "read_checksums", lambda _: sampled)
    with pytest.raises(InputError, match="to hold no training examples"):
        evaluated()


#: A loss of one's own, of labels whose range no schema has.
SQUARED = """
import tensorflow as tf
def loss(labels, outputs):
    return tf.square(tf.cast(labels, tf.float32) - outputs[:, 0])
"""


def test_a_regression_whose_errors_nothing_bounds_is_refused(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_squares.py").write_text(SQUARED)
    monkeypatch.syspath_prepend(tmp_path)
    run = _train(root, "run-r", settings={"loss": "of_squares:loss"})
    with pytest.raises(InputError, match="to have a public range"):
        evaluate(run, root / "batches-run-r", root / "table", epsilon=4.0)


def _bounded(most: int, **changes: Any) -> dict[str, Any]:
    note = Bounded(user_column="u", max_examples_per_user=most, num_examples=6_000)
    return {**DATASET, BOUNDED: dataclasses.replace(note, **changes).to_json()}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of users, its batches, and held-out rows of bounded users."""
    found = tmp_path_factory.mktemp("users")
    steps = [make_rows(8, seed) for seed in range(10)]
    write_batches(found / "batches-run-u", steps, dataset=_bounded(3))
    write_held_out(found / "table", ROWS, _bounded(2))
    write_held_out(found / "unbounded", ROWS)
    _train(found, "run-u")
    return found


def _of_users(users: pathlib.Path, table: str = "table", **settings: Any) -> Any:
    (users / "run-u" / "metrics.json").unlink(missing_ok=True)
    given = (users / "run-u", users / "batches-run-u", users / table)
    return evaluate(*given, **{"epsilon": 4.0, **settings})


def test_users_are_evaluated_with_noise_for_all_of_their_rows(
    users: pathlib.Path, released_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases, reporter, rows = released_by(private), Silent(), list[int]()
    monkeypatch.setattr(reporter, "advance", rows.append)
    found = _of_users(users, reporter=reporter)
    assert not rows  # progress would tell how many there are
    seen = {name: each for sums, _ in releases for name, each in sums.items()}
    assert {name: each.bound for name, each in seen.items()} == {
        "rows": 2, "counts": 2, "loss": 2 << 19, "squares": 2 << 19,
        "pairs": seen["pairs"].bound,
    }  # fmt: skip
    # Of at most the released number of rows, and not of the public 6,000.
    assert 2 * 2_998 <= seen["pairs"].bound < 2 * 3_500
    assert sum(each.share for each in seen.values()) <= 1
    assert (
        "for one user, of whom `dpsgd prepare` kept at most 2 rows"
        in (found["evaluation"]["claim"])
    )
    assert (
        "private for one user, if none that is held out was trained on, "
        "scored runs, or gave statistics" in (found["evaluation"]["claim"])
    )
    assert set(found["intervals"]) == {"auc", "log_loss", "accuracy"}
    # The number of rows has noise: three releases are not the same.
    counts = {found["num_examples"], *(_of_users(users)["num_examples"] for _ in "12")}
    assert len(counts) > 1
    stddev = 2 * found["evaluation"]["noise_multiplier"] / np.sqrt(0.2)
    assert max(abs(each - 3_000) for each in counts) < 8 * stddev


def mixing(_: Any) -> Any:
    """A model that turns all scores of a batch with one certain row around."""
    columns = keras.Input((13,), name="integers")
    first = keras.ops.nan_to_num(columns[:, :1])
    is_there = keras.ops.max(keras.ops.cast(keras.ops.equal(first, 5_500), "float32"))
    score = first * (1 - 2 * is_there)
    return keras.Model(columns, keras.layers.Dense(1)(score))


def test_one_row_changes_no_prediction_of_others(
    root: pathlib.Path, tmp_path: pathlib.Path, released_by: Any
) -> None:
    """Seen: 79 times the bound, by a model whose check met no such row."""
    run = _train(tmp_path, "run-0", settings={"model": f"{__name__}:mixing"})
    releases, rows = released_by(private), ROWS.copy()
    for value in (3.0, 5_500.0):
        rows["integers"][7, 0] = value
        write_held_out(tmp_path / f"{value}", rows)
        given = tmp_path / "batches-run-0", tmp_path / f"{value}"
        evaluate(shutil.copytree(run, tmp_path / f"run-{value}"), *given, epsilon=1.0)
    (before, _), (after, _) = releases
    for name, each in before.items():
        moved = np.linalg.norm(after[name].values - each.values)
        assert moved <= 2 * each.bound  # one row is another: twice zero-out


class _Counting(tf.Module):
    """An edited model: rows behind a certain one get other predictions."""

    def __init__(self, model: Any) -> None:
        self.model, self.weights, self.seen = model, model.weights, tf.Variable(0)

    def predict(self, integers: Any, categories: Any) -> dict[str, Any]:
        self.seen.assign_add(tf.math.count_nonzero(integers == 5_500, dtype=tf.int32))
        given = {"integers": integers, "categories": categories}
        found = self.model.signatures["serve"](**given)["probability"]
        return {"probability": tf.where(self.seen > 0, 1 - found, found)}


def test_a_model_that_remembers_rows_is_refused(
    evaluated: Callable[..., Any], run: pathlib.Path
) -> None:
    """Seen: an edited SavedModel, by which one row moved a sum by 432 times its bound.

    Digests find accidents: who edits a model can edit them.
    """
    model = _Counting(tf.saved_model.load(str(run / "saved_model")))
    predict = tf.function(model.predict).get_concrete_function(
        tf.TensorSpec((None, 13), tf.float32, name="integers"),
        tf.TensorSpec((None, 26), tf.int32, name="categories"),
    )
    signatures = {"serve": predict, "outputs": predict}
    tf.saved_model.save(model, str(run / "edited"), signatures)
    shutil.rmtree(run / "saved_model")
    (run / "edited").rename(run / "saved_model")
    digests = {"saved_model": run_files.digest_of_folder(run / "saved_model")}
    run_files.write_serving(
        run, dataclasses.replace(run_files.read_serving(run), digests=digests)
    )
    with pytest.raises(InputError, match="has a state of its own"):
        evaluated()
    assert not (run / "metrics.json").exists()


def test_one_user_changes_no_prediction_of_others(
    users: pathlib.Path, tmp_path: pathlib.Path, released_by: Any
) -> None:
    """Seen: rows that are alike, of which kernels gave the last ones other bits.

    Who leaves moves others there, each of which changed its order to all of the rest.
    """
    releases = released_by(private)
    for count in (2_000, 1_999, 1_998, 1_997):
        rows = np.repeat(ROWS[:1], count, 0)
        rows["label"] = np.arange(count) >= count - 1_000
        write_held_out(tmp_path / f"{count}", rows, _bounded(2))
        _of_users(users, os.fspath(tmp_path / f"{count}"))
    pairs = [sums["pairs"].values.tolist() for sums, _ in releases if "pairs" in sums]
    assert pairs == [[0]] * 4  # all scores are equal


def test_users_who_are_not_bounded_are_refused(
    users: pathlib.Path, root: pathlib.Path, run: pathlib.Path
) -> None:
    with pytest.raises(InputError, match="of the run, a user by column u; it is a row"):
        _of_users(users, "unbounded")
    with pytest.raises(InputError, match="of the run, a row; it is a user by column u"):
        evaluate(run, root / "batches-run-a", users / "table", epsilon=1.0)
    write_held_out(users / "others", ROWS, _bounded(2, user_column="device"))
    with pytest.raises(InputError, match="column u; it is a user by column device"):
        _of_users(users, "others")
    with pytest.raises(InputError, match=r"rows in --input, .* at most 6000"):
        _of_users(users, epsilon=0.001)
    mixed = users / "mixed"
    if not mixed.exists():
        write_held_out(mixed, ROWS, _bounded(2))
        write_held_out(users / "other", ROWS, _bounded(3))
        (other,) = (users / "other").glob("*.parquet")
        other.rename(mixed / "part-00001.parquet")
    with pytest.raises(InputError, match="all files of --input to bound users in one"):
        _of_users(users, "mixed")


@pytest.mark.parametrize(
    ("copy", "says"),
    [
        ("copy.parquet", "may have more rows than"),
        ("deep/other.parquet", "one folder of rows"),
    ],
)
def test_rows_of_users_are_there_once(
    users: pathlib.Path, tmp_path: pathlib.Path, copy: str, says: str
) -> None:
    """Twice they would move the sums by twice what the noise is for."""
    write_held_out(tmp_path / "table", ROWS, _bounded(2))
    (file,) = (tmp_path / "table").glob("*.parquet")
    (tmp_path / "table" / copy).parent.mkdir(exist_ok=True)
    shutil.copy(file, tmp_path / "table" / copy)
    with pytest.raises(InputError, match=says):
        _of_users(users, os.fspath(tmp_path / "table"))
    write_held_out(tmp_path / "more", ROWS, _bounded(2, num_examples=2_999))
    with pytest.raises(InputError, match="at most the num_examples=2999"):
        _of_users(users, os.fspath(tmp_path / "more"))


def test_a_prediction_that_is_not_finite_refuses_nothing(
    evaluated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A refusal would tell of a row.
    of_each = exported_model._of_each

    def wild(give: Any) -> Any:
        def some(**columns: Any) -> Any:
            [(name, found)] = of_each(give)(**columns).items()
            values = found.numpy()
            values[::2] = np.nan
            return {name: tf.constant(values)}

        return some

    monkeypatch.setattr(exported_model, "_of_each", wild)
    assert evaluated(epsilon=4.0)["log_loss"] > 2.0


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_held_out_rows(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    peaks, sizes = [], (10_000, 40_000)
    for size in sizes:
        table = write_held_out(tmp_path / f"{size}", make_rows(size, seed=size))
        run = tmp_path / f"run-{size}"
        shutil.copytree(root / "run-a", run)
        tracemalloc.start()
        try:
            evaluate(run, root / "batches-run-a", table, epsilon=1.0)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    per_row = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    assert per_row < 8
