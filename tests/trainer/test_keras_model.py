"""``make_private``: Keras's compile and fit, with the steps of ``dpsgd train``."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.files.storage import read_json
from trainer.core.run.run_record import read_run
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras, tf
from trainer.html_report import facts, page
from trainer.keras_model import PrivateModel, make_private
from trainer.report import run_files
from trainer.run.privacy import run_statement


def _network() -> Any:
    keras.utils.set_random_seed(0)
    integers = keras.Input((13,), name="integers")
    known = keras.ops.nan_to_num(integers) / 8
    return keras.Model(integers, keras.layers.Dense(1)(known))


@pytest.fixture
def private(small_batches: Any, tmp_path: pathlib.Path) -> Any:
    def make(name: str = "run", network: Any = None, **changes: Any) -> PrivateModel:
        fields = {"noise_multiplier": 0.8, "l2_norm_clip": 1.0, "delta": 1e-3}
        made = make_private(
            network or _network(), batches=small_batches.path, run=tmp_path / name,
            **{**fields, **changes},
        )  # fmt: skip
        # Epochs of four steps: ten steps are three epochs, the last of two.
        made._session.manifest.plan.__dict__["num_examples"] = 32
        return made

    return make


def _compiled(model: PrivateModel, rate: float = 0.1) -> PrivateModel:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["AUC"])
    return model


@pytest.fixture
def data(rows: Any) -> Any:
    table = rows(50, seed=9)
    return {"integers": table["integers"]}, table["label"]


def test_every_step_is_consumed_once_however_often_fit_is_called(
    private: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []
    begin = Step.begin

    def spy(self: Step, noise: Any, later: Any = None) -> None:
        drawn.append(noise[0].tobytes())
        begin(self, noise, later)

    monkeypatch.setattr(Step, "begin", spy)
    model = private()
    steps = []
    for epochs, initial in ((1, 0), (6, 5), (None, 0)):
        _compiled(model)  # another optimizer, the same run
        model.fit(epochs=epochs, initial_epoch=initial, verbose=0)
        steps.append(model.num_steps_executed)
    assert steps == [4, 8, 10]
    assert len(set(drawn)) == len(drawn) == 10
    for epochs in (None, 3):
        with pytest.raises(InputError, match="none is used twice"):
            model.fit(epochs=epochs, verbose=0)
    record, manifest = read_run(tmp_path / "run")
    assert record.complete and record.num_steps_executed == 10  # noqa: PT018
    assert manifest.plan.num_steps == 10


def test_epochs_count_as_in_keras_over_several_calls(private: Any, data: Any) -> None:
    calls: list[dict[str, int]] = [
        {"epochs": 1}, {"epochs": 1}, {"epochs": 9, "initial_epoch": 7},
    ]  # fmt: skip
    plain = _network()
    plain.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    model = _compiled(private())
    for call in calls:
        wanted = plain.fit(*data, verbose=0, **call).epoch
        # Two steps per epoch, so that four epochs fit into ten steps.
        assert model.fit(verbose=0, steps_per_epoch=2, **call).epoch == wanted
    assert model.num_steps_executed == 2 * 4
    with pytest.raises(InputError, match="epochs=2 to be at most 1: 8 of"):
        model.fit(epochs=2, steps_per_epoch=2)
    with pytest.raises(InputError, match="epochs=1 >= 2"):
        model.fit(epochs=1, initial_epoch=1)


def _early_stopping(**more: Any) -> Any:
    # No metric falls by 9: it stops after the second epoch, at its first improvement.
    return keras.callbacks.EarlyStopping(min_delta=9, patience=1, **more)


def test_early_stopping_leaves_the_best_weights_and_a_statement_of_the_whole_plan(
    private: Any, data: Any, tmp_path: pathlib.Path
) -> None:
    kept: list[Any] = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: kept.append(model.get_weights())
    )
    model = _compiled(private())
    stop = _early_stopping(restore_best_weights=True)
    model.fit(validation_data=data, callbacks=[keep, stop], verbose=0)
    assert (len(kept), stop.best_epoch) == (2, 0)
    for left, right in zip(model.get_weights(), kept[0], strict=True):
        np.testing.assert_array_equal(left, right)
    record, manifest = read_run(tmp_path / "run")
    assert (record.num_steps_executed, record.complete) == (8, False)
    stopped = run_statement(record, manifest, delta=None)
    assert stopped == model.privacy_statement()
    assert "after 8 of T=10 steps; epsilon is of all T" in stopped.to_text()
    assert stopped.to_json()["num_steps_executed"] == 8
    _check_export(model, data[0], tmp_path)
    model.fit(verbose=0)  # the steps that are left, of the same plan
    whole = model.privacy_statement()
    assert "stopped" not in whole.to_text()
    assert stopped.epsilon == whole.epsilon


def _check_export(model: PrivateModel, x: Any, folder: pathlib.Path) -> None:
    """Both exports of a run that stopped give the outputs of the model."""
    model.export()
    assert run_files.read_serving(folder / "run").outputs == ("probability",)
    model.export(folder / "alone")
    for path in (folder / "run" / "saved_model", folder / "alone"):
        _check_outputs(path, model, x)


def _check_outputs(saved_model: pathlib.Path, model: PrivateModel, x: Any) -> None:
    wanted = tf.sigmoid(model.predict(x, verbose=0))
    loaded = tf.saved_model.load(str(saved_model))
    np.testing.assert_allclose(loaded.serve(x)["probability"], wanted, rtol=1e-5)


def test_metrics_of_validation_data_are_in_the_files_of_the_run(
    private: Any, data: Any, tmp_path: pathlib.Path
) -> None:
    model = _compiled(private())
    history = model.fit(
        validation_data=data, validation_freq=2, verbose=0,
    ).history  # fmt: skip
    curve = read_json(tmp_path / "run" / "curve.json")
    assert curve["examples"] == "held-out"
    [point] = curve["points"]  # after the second of three epochs
    assert (point["step"], point["num_examples"]) == (8, 50)
    assert set(point) == {"step", "num_examples", "loss", "auc"}
    assert [point["auc"]] == pytest.approx(history["val_AUC"])
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert {name: metrics[name] for name in point} == point
    found = facts.collect(tmp_path / "run", delta=1e-3)["evaluation"]
    assert (found["by_fit"], found["step"]) == (True, 8)
    assert list(found["metrics"]) == ["loss", "auc"]
    text = page.render(facts.collect(tmp_path / "run", delta=1e-3))
    assert "after step 8 of 10, where it was validated last" in text
    assert "did not check that they are held out" in text


def _tags(folder: pathlib.Path) -> set[str]:
    """Returns all tags that TensorBoard's callback wrote."""
    events = (
        event
        for path in folder.rglob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
    )
    return {value.tag for event in events for value in event.summary.value}


def test_ordinary_callbacks_see_epochs_steps_and_validation(
    private: Any, data: Any, tmp_path: pathlib.Path, capsys: Any
) -> None:
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    model = _compiled(private())
    history = model.fit(
        validation_data=data,
        callbacks=[
            rates,
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            keras.callbacks.TensorBoard(str(tmp_path / "board"), histogram_freq=1),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True
            ),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "best.keras"), save_best_only=True
            ),
        ],
    )  # fmt: skip
    assert set(history.history) == {"learning_rate", "val_loss", "val_AUC"}
    np.testing.assert_allclose(
        history.history["learning_rate"], [0.1, 0.05, 0.1 / 3], rtol=1e-6
    )
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    # Of training there are weights and learning rates, and no metrics.
    of_training = {t for t in _tags(tmp_path / "board/train") if "histogram" not in t}
    assert of_training == {"epoch_learning_rate"}
    assert "epoch_loss" in _tags(tmp_path / "board/validation")
    plain = keras.models.load_model(tmp_path / "best.keras")
    assert plain.get_weights()[0].shape == (13, 1)
    plain = _network()
    plain.load_weights(tmp_path / "3.weights.h5")
    np.testing.assert_array_equal(plain.get_weights()[0], model.get_weights()[0])
    assert "val_loss" in capsys.readouterr().out
    model.save(tmp_path / "plain.keras")
    again = keras.models.load_model(tmp_path / "plain.keras")
    x = data[0]
    np.testing.assert_allclose(again.predict(x), model.predict(x), rtol=1e-5)


def test_the_same_cell_goes_on_where_a_kill_left_it(
    private: Any, data: Any, tmp_path: pathlib.Path
) -> None:
    """Calls of fit that had ended return at once; the one that had not ends."""

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)
            if len(epochs) == 2:
                raise KeyboardInterrupt

    def cell() -> Any:
        model = _compiled(private())
        model.fit(epochs=1, verbose=0)
        history = model.fit(validation_data=data, callbacks=[Kill()], verbose=0)
        return model, history.history

    epochs: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        cell()
    model, history = cell()
    assert model.num_steps_executed == 10
    assert epochs == [0, 1, 1]  # what followed the commit is done again
    assert len(history["val_loss"]) == 2
    points = read_json(tmp_path / "run" / "curve.json")["points"]
    assert [point["step"] for point in points] == [8, 10]
    with pytest.raises(InputError, match="finished run"):
        cell()


def test_callbacks_see_no_row_of_a_lazy_table_without_its_noise(
    batch_folder: Any, rows: Any, tmp_path: pathlib.Path
) -> None:
    ids = keras.Input((26,), dtype="int32", name="categories")
    flat = keras.layers.Flatten()(keras.layers.Embedding(7, 2)(ids))
    model = make_private(
        keras.Model(ids, keras.layers.Dense(1)(flat)),
        batches=batch_folder([rows(2, seed) for seed in range(4)]).path,
        run=tmp_path / "run", noise_multiplier=1.0, l2_norm_clip=1.0, delta=1e-3,
        embedding_noise="lazy",
    )  # fmt: skip
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    seen: list[int] = []

    def look(*_: Any, **logs: Any) -> None:
        seen.append(model._training._lazy.num_pending)

    look_at = keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(callbacks=[look_at], steps_per_epoch=1, verbose=0)
    assert seen == [0] * 4


# Seen to fail at the begin: step 4 had the noise of step 0.
@pytest.mark.parametrize("moment", ["on_epoch_end", "on_epoch_begin"])
def test_a_fit_within_a_fit_uses_no_noise_twice(
    moment: str, private: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit_once(epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            model.fit(epochs=1, verbose=0)

    nested = keras.callbacks.LambdaCallback(**{moment: fit_once})

    def begin(self: Step, noise: Any, later: Any = None) -> None:
        drawn.append(noise[0].tobytes())
        real(self, noise, later)

    drawn: list[bytes] = []
    real, model = Step.begin, _compiled(private())
    monkeypatch.setattr(Step, "begin", begin)
    with pytest.raises(InputError, match="fit to end before"):
        model.fit(callbacks=[nested], verbose=0)
    assert model.num_steps_executed == len(drawn) == len(set(drawn))


def test_a_folder_in_which_another_run_has_begun_is_refused(
    private: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: it held a record of noise 4 beside a model of noise 0.5."""
    first = _compiled(private(noise_multiplier=4.0))
    first.fit(epochs=1, verbose=0)
    shutil.rmtree(tmp_path / "run")
    _compiled(private(noise_multiplier=0.5)).fit(verbose=0)
    for use in (lambda: first.fit(verbose=0), first.export):
        with pytest.raises(InputError, match="another one has begun there"):
            use()
    record, _ = read_run(tmp_path / "run")
    assert (record.noise_multiplier, record.complete) == (0.5, True)


class _Linear(tf.Module):
    def __init__(self) -> None:
        super().__init__(name="linear")
        self.kernel = tf.Variable(tf.ones((13, 1)), name="kernel")
        self.fixed = tf.Variable(2.0, trainable=False)

    def __call__(self, columns: Any) -> Any:
        known = tf.where(tf.math.is_nan(columns["integers"]), 0.0, columns["integers"])
        return self.fixed * tf.matmul(known / 16, self.kernel)


def test_a_module_of_tensorflow_trains_as_the_same_layers(
    private: Any, data: Any, tmp_path: pathlib.Path, small_batches: Any
) -> None:
    module, layers = _Linear(), _network()
    layers.layers[-1].set_weights([np.ones((13, 1)), np.zeros(1)])
    layers.layers[-1].bias.trainable = False  # of other noise, otherwise
    models = {"module": private("module", module), "layers": private("layers", layers)}
    for model in models.values():
        model._session.noise_multiplier = 0.0
        _compiled(model).fit(verbose=0)
    assert models["module"].weights[0].value is module.kernel
    np.testing.assert_allclose(
        module.kernel, models["layers"].get_weights()[0], rtol=1e-4
    )
    models["module"].export()
    columns = {**data[0], "categories": np.zeros((50, 26), "i4")}  # all but the label
    _check_outputs(tmp_path / "module" / "saved_model", models["module"], columns)
    assert not (tmp_path / "module" / "model.keras").exists()


def _with_own(name: str) -> Any:
    plain = _network()
    kind = type("Own", (keras.Model,), {name: lambda self, *_, **__: None})
    return kind(plain.inputs, plain.outputs)


class _LossOfBatches(keras.losses.MeanSquaredError):
    def __call__(self, *args: Any, **more: Any) -> Any:
        return 2.0 * super().__call__(*args, **more)


class _Own(keras.callbacks.Callback):
    monitor = "loss"


def _with_hook(kind: Any) -> Any:
    return type("Seeing", (kind,), {"on_train_batch_end": print})


def _dense(outputs: Any = None, *, name: str | None = "integers") -> Any:
    """A model of the integers; ``outputs`` makes them of two dense layers."""
    integers = keras.Input((13,), name=name)
    known = keras.ops.nan_to_num(integers) / 8
    made = [keras.layers.Dense(n, name=x) for x, n in (("label", 1), ("other", 13))]
    return keras.Model(
        integers, (outputs or (lambda a, b: a))(*(d(known) for d in made))
    )


def _of_key(key: str, name: str | None) -> Any:
    integers = keras.Input((13,), name=name)
    known = keras.ops.nan_to_num(integers) / 8
    return keras.Model({key: integers}, keras.layers.Dense(1)(known))


def _mean_of_last_axis(labels: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.square(labels - outputs), -1)


@pytest.mark.parametrize(
    ("make", "loss", "more"),
    [
        # Outputs (batch,), whose last axis is the batch.
        (lambda: _dense(lambda a, _: a[:, 0]), "mse", {}),
        (lambda: _dense(lambda a, _: a[:, 0]), _mean_of_last_axis, {}),
        # Names of columns where Keras has them.
        (lambda: _of_key("integers", None), "mse", {"jit_compile": False}),
        (lambda: _of_key("integers", "numbers"), "mse", {}),
        # A loss that all outputs of a dict have.
        (lambda: _dense(lambda a, _: {"label": a}), "mse", {}),
        # Keras's defaults, given.
        (
            _dense,
            "mse",
            {
                "jit_compile": "auto", "run_eagerly": False, "steps_per_execution": 1,
                "auto_scale_loss": True, "weighted_metrics": None,
            },
        ),
    ],
)  # fmt: skip
def test_what_keras_takes_is_trained_as_a_loop_over_rows_would(
    make: Any, loss: Any, more: Any, private: Any, small_batches: Any, data: Any
) -> None:
    """Seen to fail: each was refused, most with an error of TensorFlow."""
    network = make()
    before = network.get_weights()
    model = private(network=network, noise_multiplier=0.0, l2_norm_clip=1e3)
    model.compile(keras.optimizers.SGD(0.1), loss, **more)
    model.fit(
        epochs=1, steps_per_epoch=1, verbose=0, batch_size=None, shuffle=True,
        validation_split=0.0, validation_data=data,
    )  # fmt: skip
    found = network.get_weights()
    network.set_weights(before)
    rows = small_batches.steps[0]
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(network(rows["integers"]))[0]
        errors = tf.reshape(outputs, (-1,)) - rows["label"].astype("f4")
        total = tf.reduce_sum(tf.square(errors)) / 8  # expected_batch_size
    keras.optimizers.SGD(0.1).apply(
        tape.gradient(total, network.trainable_variables), network.trainable_variables
    )
    for left, right in zip(found, network.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def _in_a_strategy() -> Any:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return _dense()


def _of_strings() -> Any:
    integers = keras.Input((13,), dtype="string", name="integers")
    ids = keras.layers.StringLookup(vocabulary=["1"])(integers)
    values = keras.layers.Flatten()(keras.layers.Embedding(3, 1)(ids))
    return keras.Model(integers, keras.layers.Dense(1)(values))


class _WithoutConfig(keras.layers.Layer):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def call(self, values: Any) -> Any:
        return 2.0 * values


def _not_saved() -> Any:
    integers = keras.Input((13,), name="integers")
    known = _WithoutConfig(object)(keras.ops.nan_to_num(integers))
    return keras.Model(integers, keras.layers.Dense(1)(known))


def _mean_of_batch(labels: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.square(labels - outputs))


class _Looked(keras.layers.Layer):
    """Reads a table that no layer of the model has."""

    def call(self, values: Any) -> Any:
        return _TABLE.lookup(tf.cast(values, tf.int64))


_TABLE = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(7, dtype="int64"), tf.range(7.0)), -1.0
)


def _of_an_untracked_table() -> Any:
    integers = keras.Input((13,), name="integers")
    found = _Looked()(keras.ops.nan_to_num(integers))
    return keras.Model(integers, keras.layers.Dense(1)(found))


#: What makes a model, its loss, and why it cannot be trained here.
_REFUSED_MODELS: tuple[tuple[Any, Any, str], ...] = (
    (_network, _mean_of_batch, r"one for a batch.*axis=-1"),
    (lambda: keras.Sequential([keras.layers.Dense(1)]), "mse", r"keras\.Input\(sh"),
    (lambda: _of_key("numbers", "integers"), "mse", r"'numbers'.*the key"),
    (lambda: _dense(lambda *both: both), "mse", r"dict\(zip\(\['label', 'other'\]"),
    (_network, {"label": "mse"}, "the loss alone"),
    (lambda: _dense(lambda a, _: {"label": a}), {"x": "mse"}, "label; got x"),
    (_of_strings, "mse", "takes strings"),
    (_in_a_strategy, "mse", r"without strategy\.scope"),
    (_not_saved, "mse", "get_config"),
    (_of_an_untracked_table, "mse", "AssertionError: .*untracked"),
    (_network, ["mse"], "one loss"),
    (_network, _LossOfBatches(), "into call"),
    # Seen to fail: the loss of compile was trained in its place.
    (lambda: _with_own("train_step"), "mse", "would not be called"),
    (lambda: _with_own("compute_loss"), "mse", "would not be called"),
    (lambda: _with_own("test_step"), "mse", "would not be called"),
    (lambda: 3, "mse", r"not builtins\.int"),
    (
        lambda: importlib.import_module("tf_keras").Sequential([]), "mse",
        "of Keras 3",
    ),
)  # fmt: skip
#: What makes a callback, and why ``fit`` refuses it.
_REFUSED_CALLBACKS: tuple[tuple[Any, str], ...] = (
    (lambda: keras.callbacks.EarlyStopping("loss"), "monitor='loss' of EarlySt"),
    (lambda: keras.callbacks.ReduceLROnPlateau("auc"), "covered by"),
    (lambda: keras.callbacks.EarlyStopping(), "validation_data in fit"),
    (_Own, "monitor='loss' of _Own"),
    (
        lambda: keras.callbacks.ModelCheckpoint("x.keras", save_best_only=True),
        "validation_data in fit",
    ),
    (lambda: keras.callbacks.CallbackList([_Own()]), "not a CallbackList"),
    (lambda: keras.callbacks.BackupAndRestore("x"), "checkpoints of its own"),
    (
        lambda: keras.callbacks.LambdaCallback(on_train_batch_end=print),
        "at the end of an epoch",
    ),
    (lambda: keras.callbacks.ModelCheckpoint("x.keras", save_freq=3), "end of an ep"),
    (lambda: keras.callbacks.TensorBoard(update_freq="batch"), "end of an epoch"),
    # Seen to fail: each saw the weights after every step, before their commit.
    (lambda: _with_hook(keras.callbacks.ModelCheckpoint)("x.keras"), "end of an ep"),
    (lambda: _with_hook(keras.callbacks.TensorBoard)("x"), "end of an epoch"),
    (lambda: _with_hook(keras.callbacks.TerminateOnNaN)(), "end of an epoch"),
    (
        lambda: keras.callbacks.TensorBoard(write_steps_per_second=True),
        "write_steps_per_second=False",
    ),
    (lambda: 3, "callbacks of Keras 3; int"),
)
#: Settings of a fit, and why it refuses them.
_REFUSED_FITS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"x": 1}, "without data"),
    ({"epochs": 4}, "epochs=4"),
    ({"initial_epoch": -1}, "initial_epoch=-1"),
    ({"batch_size": 8}, "batch_size in fit; the plan"),
    ({"workers": 2}, "workers in fit; omit it"),
    ({"class_weight": {0: 1.0}}, "no class_weight in fit; give compile a loss"),
    ({"sample_weight": np.ones(3)}, "no sample_weight in fit; give compile a loss"),
)


def test_what_is_not_supported_is_refused_in_one_line(
    private: Any, data: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: an error of TensorFlow or Keras, or one that named another."""
    model = private()
    calls: list[tuple[Any, str]] = [
        (model.fit, "compile before fit"),
        (lambda: model.compile("sgd", "mse", loss_weights=[1.0]), "loss_weights"),
        (
            lambda: private(network=_dense(lambda a, b: {"a": a, "b": b})).compile(
                "sgd", {"a": "mse", "b": "mse"}, loss_weights={"other": 1.0}
            ),
            r"loss_weights of the outputs.*got other",
        ),
        (lambda: model.compile("adamm", "mse"), "a Keras optimizer.*'adamm'"),
        (
            lambda: model.compile(
                importlib.import_module("tf_keras").optimizers.Adam(), "mse"
            ),
            r"a Keras optimizer.*none of tf_keras.*\.adam\.Adam",
        ),
        (lambda: model.train_on_batch(*data), "without privacy"),
        (lambda: model.train_step(data), "without privacy"),
        (lambda: private(method="dp-sat"), "dp-sat"),
        (lambda: private(method="model-mix"), "model-mix"),
        (lambda: private(clip_quantile=0.5), "--l2-norm-clip 1.0 is fixed"),
    ]
    fits = [({"callbacks": [make()]}, message) for make, message in _REFUSED_CALLBACKS]
    fitted = _compiled(private())
    calls += [
        (lambda more=more: fitted.fit(**more), message)
        for more, message in (*fits, *_REFUSED_FITS)
    ]
    calls += [
        (lambda m=make, f=loss: private(network=m()).compile("sgd", f), message)
        for make, loss, message in _REFUSED_MODELS
    ]
    for call, message in calls:
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "theirs").touch()
    with pytest.raises(InputError, match="new or empty"):
        private()


def _fails(labels: Any, outputs: Any) -> Any:
    raise ValueError("planted")


def test_an_error_of_validation_is_found_before_a_step(private: Any, data: Any) -> None:
    """Seen to fail: each ended the run for good after its first epoch."""
    model, (x, y) = private(), data
    for validation_data, metrics, message in (
        ((x, y[:49]), [], "cardinality"),
        (({"integers": x["integers"][:, :5]}, y), [], "shape"),
        (data, [_fails], "planted"),
    ):
        model.compile("sgd", "mse", metrics=metrics)
        with pytest.raises(ValueError, match=message):
            model.fit(validation_data=validation_data, verbose=0)
    model.compile("sgd", "mse", metrics=[])
    model.fit(validation_data=tf.data.Dataset.from_tensors(data), verbose=0)
    assert model.num_steps_executed == 10


class _KillAt(keras.callbacks.Callback):
    """Kills, as far as a run can tell, after an epoch; keeps what its begin saw."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch, self.at_begin, self.at_end = epoch, [], []  # type: ignore[var-annotated]

    def _state(self) -> list[Any]:
        return [
            v.numpy() for v in (*self.model.weights, *self.model.optimizer.variables)
        ]

    def on_train_begin(self, logs: Any = None) -> None:
        self.at_begin = self._state()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            self.at_end = self._state()
            raise KeyboardInterrupt


def _freeze(model: PrivateModel) -> None:
    model.network.layers[-1].trainable = True
    model.network.layers[-1].bias.trainable = False


#: What code may do between two calls of fit.
_BETWEEN = {
    "other weights are trained": (_freeze, keras.optimizers.Adam),
    "another optimizer": (lambda model: None, keras.optimizers.SGD),
    "the same compiled again": (lambda model: None, keras.optimizers.Adam),
    "weights are set": (
        lambda model: model.set_weights([0 * w + 7 for w in model.get_weights()]),
        keras.optimizers.Adam,
    ),
}


@pytest.mark.parametrize("between", _BETWEEN)
def test_a_second_fit_goes_on_from_its_commit_whatever_is_between(
    between: str, private: Any
) -> None:
    """Seen to fail: each was refused, or undid committed steps or the optimizer."""
    change, optimizer = _BETWEEN[between]

    def cell(kill: _KillAt) -> PrivateModel:
        model = private()
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(epochs=1, verbose=0)
        change(model)
        model.compile(optimizer(0.1), "mse")
        model.fit(callbacks=[kill], verbose=0)
        return model

    killed, goes_on = _KillAt(0), _KillAt(9)
    with pytest.raises(KeyboardInterrupt):
        cell(killed)
    assert cell(goes_on).num_steps_executed == 10
    for left, right in zip(killed.at_end, goes_on.at_begin, strict=True):
        np.testing.assert_array_equal(left, right)


def test_rates_and_history_of_a_run_that_went_on_are_those_of_the_whole_run(
    private: Any, data: Any
) -> None:
    """Seen to fail: the rate was halved twice, and columns differed in length."""

    def cell(kill: _KillAt) -> list[Any]:
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        model, given = _compiled(private(), 0.8), {"verbose": 0, "steps_per_epoch": 2}
        given |= {"validation_data": data, "callbacks": [halve, kill]}
        return [model.fit(epochs=2, initial_epoch=1, **given), model.fit(**given)]

    with pytest.raises(KeyboardInterrupt):
        cell(_KillAt(2))
    ended, history = cell(_KillAt(9))
    assert (ended.epoch, history.epoch) == ([1], [0, 1, 2, 3])
    np.testing.assert_allclose(ended.history["learning_rate"], [0.4])
    np.testing.assert_allclose(
        history.history["learning_rate"], [0.2, 0.1, 0.05, 0.025], rtol=1e-6
    )
    for found in (ended, history):
        assert {*map(len, found.history.values())} == {len(found.epoch)}
        assert set(found.history) == {"learning_rate", "val_loss", "val_AUC"}
