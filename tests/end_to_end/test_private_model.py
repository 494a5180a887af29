"""``dpsgd.make_private`` on data in memory: batches in the run's folder, and a run."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

import dpsgd
from dpsgd import InputError, private_model
from pipelines.job.poisson_batching import make_batches

pd = pytest.importorskip("pandas", reason="no pandas: pip install '.[dev]'")

ROWS = 600
SIZES: dict[str, Any] = {"batch_size": 30, "epochs": 2}
NOISE: dict[str, Any] = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0}
#: A key of 32 bytes, so that the batches of two runs are drawn alike.
KEY = "5b" * 32


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    age = random.normal(size=ROWS)
    return {"age": age, "label": age + random.normal(size=ROWS) > 0}


def network(name: str = "age") -> Any:
    value = keras.Input((1,), name=name)
    return keras.Model(value, keras.layers.Dense(1)(value))


@pytest.fixture
def jobs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batch jobs, which run in this process."""
    found: list[Any] = []

    def call(_: str, *arguments: Any) -> None:
        found.append(arguments)
        make_batches(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(private_model.processes, "call", call)
    return found


def made(data: Any, run: str = "run", **changes: Any) -> Any:
    return dpsgd.make_private(network(), data, run=run, **{**SIZES, **NOISE, **changes})


def keyed(run: str) -> None:
    """Makes the sampling key of a run before its batch job would."""
    folder = pathlib.Path(run, "private/batches/private")
    folder.mkdir(parents=True, mode=0o700)
    (folder / "sampling.key").write_text(KEY)
    (folder / "sampling.key").chmod(0o600)


def batches_of(run: str) -> dict[str, bytes]:
    folder = pathlib.Path(run, "private/batches")
    return {path.name: path.read_bytes() for path in folder.glob("batches-*")}


def test_the_same_batches_come_of_every_kind_of_data(jobs: list[Any]) -> None:
    keyed("arrays")
    made(arrays(), "arrays")
    wanted = batches_of("arrays")
    pathlib.Path("rows").mkdir()
    shutil.copy("arrays/private/data.parquet", "rows")
    for name, data in {
        "frame": pd.DataFrame(arrays(), index=range(ROWS, 0, -1)),
        "table": pa.table(arrays()),
        "labels of Keras": {**arrays(), "label": arrays()["label"][:, None]},
        "file": "rows/data.parquet",
        "folder": pathlib.Path("rows"),
        "glob": "rows/*.parquet",
    }.items():
        keyed(name)
        made(data, name)
        assert batches_of(name) == wanted, name
    assert len(wanted) > 1
    keyed("other")
    made(arrays(seed=1), "other")
    assert batches_of("other") != wanted


def test_steps_and_layout_are_those_of_dpsgd_batches(jobs: list[Any]) -> None:
    made(arrays())
    settings = dpsgd.BatchSettings(expected_batch_size=30, num_epochs=2)
    by_hand = make_batches("run/private/data.parquet", "by_hand", settings)
    found = dpsgd.read_manifest("run/private/batches")
    assert (found.plan, found.columns, found.files, found.physical_batch_size) == (
        by_hand.plan, by_hand.columns, by_hand.files, by_hand.physical_batch_size
    )  # fmt: skip
    model = made(arrays(), "usual", batch_size=None, epochs=None, sampler="poisson")
    plan = model._session.manifest.plan
    assert (plan.expected_batch_size, plan.num_epochs, plan.sampler) == (
        64, 8, "poisson"
    )  # fmt: skip
    assert model._session.settings.target_delta == 1e-4


def test_the_same_call_again_takes_or_finishes_the_same_batches(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ends = private_model.processes.call, [KeyboardInterrupt, None]

    def call(*arguments: Any) -> None:
        if (error := ends.pop(0)) is not None:
            raise error
        now(*arguments)

    monkeypatch.setattr(private_model.processes, "call", call)
    with pytest.raises(KeyboardInterrupt):
        made(arrays())
    with pytest.raises(InputError, match=r"the data .*run=run.*another run="):
        made(arrays(seed=1))
    made(arrays())
    wanted = batches_of("run")
    model = made(pd.DataFrame(arrays()), noise_multiplier=2.0)
    with pytest.raises(InputError, match=r"private already.*\.network"):
        dpsgd.make_private(model, arrays(), **SIZES, **NOISE)
    assert batches_of("run") == wanted
    assert len(jobs) == 1
    for changes in ({"batch_size": 31}, {"epochs": 3}, {"sampler": "poisson"}):
        with pytest.raises(InputError, match=r"the settings .*run=run"):
            made(arrays(), **changes)
    changed = arrays()
    changed["age"][7] += 1
    with pytest.raises(InputError, match=r"the data .*run=run"):
        made(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "either data or batches.*neither"),
        ({"batches": "batches"}, "either data or batches.*both"),
        ({"data": None, "batches": "batches"}, "no batch_size.*with batches"),
        ({"data": {"age": np.zeros(ROWS)}}, "column 'label'.* Rename the one"),
        ({"data": {"age": [[1.0], [1.0, 2.0]]}}, r"column dense .*\.to_tensor\(\)"),
        (
            {"data": {"ages": np.zeros(ROWS), "label": np.zeros(ROWS)}},
            "input 'age'.*ages",
        ),
        ({"data": "rows"}, "Expected files at"),
        ({"epsilon": "3"}, "epsilon"),
        ({"batch_size": ROWS + 1}, "expected_batch_size"),
        ({"epochs": 0}, "epochs=0"),
        ({"run": "s3://bucket/run"}, "on this machine"),
        ({"run": "full"}, "new or empty"),
        # Seen to fail: the batches were sampled, and fixed the next call's bands.
        ({"noise_multiplier": None}, "Noise needs either"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"method": "bam"}, "bam-radius"),
        ({"method": "dp-sat", "sat_radius": 0.1, "bands": 2}, "without bands"),
    ],
)
def test_what_cannot_train_is_refused_before_anything_is_written(
    jobs: list[Any],
    tmp_path: pathlib.Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(InputError, match=message):
        made(**{"data": arrays(), **changes})
    assert {path.name for path in tmp_path.iterdir()} == {"full"}
    assert not jobs


def test_several_workers_do_not_each_sample_batches(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(InputError, match=r"one process.*dpsgd batches"):
        made(arrays())
    assert not jobs


def test_a_column_that_seems_to_name_users_is_warned_of(jobs: list[Any]) -> None:
    data = {**arrays(), "user_id": np.arange(ROWS)}
    with pytest.warns(UserWarning, match=r"user_id.*single rows.*dpsgd prepare"):
        made(data)


def test_a_frame_trains_a_model_with_an_input_of_each_column(jobs: list[Any]) -> None:
    """Seen to fail: a column of single numbers could not be exported for (1,)."""
    frame = pd.DataFrame({**arrays(), "hours": arrays(seed=1)["age"]})
    held_out = frame[:100]
    inputs = {name: keras.Input((1,), name=name) for name in ("age", "hours")}
    together = keras.ops.concatenate([*inputs.values()], 1)
    plain = keras.Model(inputs, keras.layers.Dense(1)(together))
    model = dpsgd.make_private(plain, frame, **SIZES, **NOISE)
    model.compile(keras.optimizers.Adam(0.1), "mse", ["mae"])
    columns = dict(held_out.drop(columns="label"))
    with pytest.raises(InputError, match="with a column 'hours'; it has age, label"):
        model.fit(validation_data=held_out.drop(columns="hours"))
    history = model.fit(validation_data=held_out, verbose=0)
    assert len(history.history["val_mae"]) == 2
    pairs = columns, held_out["label"]
    assert model.evaluate(*pairs, return_dict=True, verbose=0)["mae"] == pytest.approx(
        history.history["val_mae"][-1]
    )
    assert model.evaluate(held_out, return_dict=True, verbose=0) == pytest.approx(
        model.evaluate(*pairs, return_dict=True, verbose=0)
    )
    predicted = model.predict(held_out, verbose=0)
    model.export("saved")
    saved = tf.saved_model.load("saved")
    given = {name: values.to_numpy("float32") for name, values in columns.items()}
    served = saved.serve({name: tf.constant(values) for name, values in given.items()})
    np.testing.assert_allclose(
        served["prediction"], plain.predict(columns, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(served["prediction"], predicted, rtol=1e-5)


def test_arrays_become_a_model_with_a_statement_and_a_page(
    jobs: list[Any], typed: Callable[..., str]
) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4, 4, 1))
    y = x.mean(axis=(1, 2, 3)) > 0
    plain = keras.Sequential(
        [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model = dpsgd.make_private(plain, {"x": x, "label": y}, **SIZES, epsilon=3)
    typed("verify", "--resample", "run/private/batches",
          "--input=run/private/data.parquet")  # fmt: skip
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, ["AUC"])
    history = model.fit(validation_data=(x, y), verbose=0)
    assert history.history["val_AUC"][-1] > 0.6
    statement = model.privacy_statement()
    assert statement.epsilon.upper == pytest.approx(3, abs=1e-3)
    assert statement.delta == 1e-4
    model.export()
    dpsgd.write_report("run", "page.html")
    assert statement.claim in typed("account", "run")
    public = {path.name for path in pathlib.Path("run").iterdir()} - {"private"}
    assert {"run_record.json", "manifest.json", "model.keras"} <= public
    assert pathlib.Path("run/private").stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match="finished run"):
        dpsgd.make_private(plain, {"x": x, "label": y}, **SIZES, epsilon=3)


OF_RULE: dict[str, Any] = {
    "batch_size": 10, "epochs": 1, "epsilon": 8.0, "l2_norm_clip": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "bands"),
    [
        ({}, 8),
        ({"bands": 1}, None),
        ({"bands": 3}, 3),
        ({"sampler": "balls-and-bins"}, None),
        ({"method": "dp-sat", "sat_radius": 0.03}, None),
        ({"embedding_noise": "lazy"}, None),
        ({"epsilon": None, "noise_multiplier": 1.0}, None),
    ],
)
def test_bands_are_those_that_method_and_noise_permit(
    changes: dict[str, Any], bands: int | None, jobs: list[Any]
) -> None:
    model = dpsgd.make_private(network(), arrays(), **{**OF_RULE, **changes})
    assert model._training.session.manifest.plan.bands == bands


def test_bands_of_batches_that_are_there_count(jobs: list[Any]) -> None:
    for target in (8.0, 0.1):  # by the rule others for the second
        again = dpsgd.make_private(
            network(), arrays(), **{**OF_RULE, "epsilon": target}
        )
        assert again._training.session.manifest.plan.bands == 8
    assert len(jobs) == 1
    fresh = dpsgd.make_private(
        network(), arrays(), run="fresh", **{**OF_RULE, "epsilon": 0.1}
    )
    assert fresh._training.session.manifest.plan.bands != 8
    with pytest.raises(InputError, match=r"the bands .*run=run.*another run="):
        dpsgd.make_private(network(), arrays(), **OF_RULE, bands=1)


def test_a_large_model_has_fewer_bands(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(one.size for one in network().get_weights())
    monkeypatch.setattr(private_model, "_MOST_MEMORY", 8 * 4 * parameters)
    model = dpsgd.make_private(network(), arrays(), **OF_RULE)
    assert model._training.session.manifest.plan.bands == 4


class OfTensor(keras.Model):
    """The usual subclassed model, whose layers are built when it is called."""

    def __init__(self, factor: Any = 1.0) -> None:
        super().__init__()
        self.factor, self.dense = factor, keras.layers.Dense(1)

    def call(self, values: Any) -> Any:
        return self.factor * self.dense(values)


def test_a_subclassed_model_takes_the_only_column(jobs: list[Any]) -> None:
    """Seen to fail: it got a dict, and the refusal had the colours of a terminal."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    data = {"x": x, "label": arrays()["label"]}
    with pytest.raises(InputError, match=r"'x', or a dict.* Of the dict: ") as error:
        dpsgd.make_private(OfTensor(None), data, **SIZES, **NOISE)
    assert str(error.value).isprintable()
    model = dpsgd.make_private(OfTensor(), data, **SIZES, **NOISE)
    model.compile("sgd", "mse")
    model.fit(validation_data=(x, data["label"]), verbose=0)
    assert model.predict(x[:5], verbose=0).shape == (5, 1)
