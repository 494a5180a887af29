"""Lazy noise: what steps read and what leaves is as if every row had its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from accounting.validation import InputError
from pipelines.sampling.keys import insecure_key
from trainer.gradients import lazy_noise as module
from trainer.gradients import traced_model
from trainer.gradients.clipping import clipped_sum
from trainer.gradients.dp_step import Step
from trainer.gradients.lazy_noise import LazyNoise
from trainer.gradients.noise import LaterNoise, normal
from trainer.gradients.traced_model import TableReads
from trainer.methods import lazy_tables
from trainer.methods.bam import bam_sum
from trainer.methods.lazy_tables import choose, is_plain_sgd
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras, tf

KEY = insecure_key(8)
NUM_ROWS, DIM = 30, 2
PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0}


def _model(num_rows: int = NUM_ROWS, *, dense: bool = True) -> TrainableModel:
    keras.utils.set_random_seed(3)
    ids = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Flatten()(keras.layers.Embedding(num_rows, DIM)(ids * 2))
    last = keras.layers.Dense(1) if dense else keras.layers.GlobalAveragePooling1D()
    values = values if dense else keras.layers.Reshape((26 * DIM, 1))(values)
    network = keras.Model(ids, last(values))
    return TrainableModel(network=network, description={})


def _batch(rows: np.ndarray, size: int = 4) -> tuple[dict[str, Any], Any]:
    data = np.concatenate([rows, np.zeros(size - len(rows), rows.dtype)])
    columns = {name: tf.constant(data[name]) for name in rows.dtype.names}
    return columns, tf.constant((np.arange(size) < len(rows)).astype("f4"))


# -- the same weights as with noise at every step --------------------------------------


class _Replay:
    """Gives lazy draws that add up to the noise of an eager run."""

    def __init__(self, reads: TableReads, noise: np.ndarray, rates: Any) -> None:
        self._reads, self._noise, self._rates = reads, noise, rates
        self._next = np.zeros(NUM_ROWS, int)
        self.step = 0

    def values(self, rows: np.ndarray, num_values: int) -> np.ndarray:
        found = np.zeros((num_values, DIM), np.float32)
        for place, row in enumerate(rows):
            steps = range(self._next[row], self.step)
            total = sum(self._rates[s] * self._noise[s, row] for s in steps)
            size = math.sqrt(sum(self._rates[s] ** 2 for s in steps))
            found[place] = total / size if size else 0
        self._next[rows] = self.step
        return found

    def of_batch(self, batch: Any, shape: Sequence[int]) -> np.ndarray:
        (ids,) = self._reads.ids(*batch)
        _, first = np.unique(ids, return_index=True)
        return self.values(ids.numpy()[np.sort(first)], shape[0])

    def of_chunk(self, index: int, chunk: int, shape: Sequence[int]) -> np.ndarray:
        start = chunk * max(1, module._FLUSH_CHUNK // DIM)
        return self.values(np.arange(start, start + shape[0]), shape[0])


class _LaterParts:
    def __init__(self, replay: _Replay, parts: list[Any]) -> None:
        self._replay, self._parts = replay, parts

    def of_part(self, part: int, variable: int, shape: Sequence[int]) -> np.ndarray:
        return self._replay.of_batch(self._parts[part], shape)


def _rate() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([3, 7], [0.5, 2.0, 0.1])


def _step(
    model: TrainableModel, lazy: LazyNoise | None, method: str = "dp-sgd"
) -> Step:
    gradient_sum = (
        clipped_sum(model, l2_norm_clip=0.5)
        if method == "dp-sgd"
        else bam_sum(model, l2_norm_clip=0.5, radius=0.3)
    )
    return Step(
        model.variables,
        gradient_sum,
        keras.optimizers.SGD(_rate()),
        expected_batch_size=4,
        lazy=lazy,
    )


def _weights(model: TrainableModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def _eager(
    steps: list[list[Any]], noise: list[list[np.ndarray]], method: str, *, dense: bool
) -> list[Any]:
    model = _model(dense=dense)
    step, found = _step(model, None, method), []
    for parts, values in zip(steps, noise, strict=True):
        step.begin(values)
        for part in parts:
            step.add(*part)
        step.finish()
        found.append(_weights(model))
    return found


@pytest.mark.parametrize(
    ("method", "dense"), [("dp-sgd", True), ("bam", True), ("dp-sgd", False)]
)
@pytest.mark.parametrize("sizes", [(3,), (4, 0, 2)])
def test_flushed_weights_are_those_of_noise_at_every_step(
    sizes: tuple[int, ...],
    method: str,
    dense: bool,
    rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FLUSH_CHUNK", 14)  # rows do not fill the last chunk
    num_steps, random = 12, np.random.default_rng(0)
    steps = [
        [_batch(rows(size, 10 * s + p)[:size]) for p, size in enumerate(sizes)]
        for s in range(num_steps)
    ]
    model = _model(dense=dense)
    shapes = [v.shape for v in model.variables]
    noise = [[random.normal(0, 2, s).astype("f4") for s in shapes] for _ in steps]
    wanted = _eager(steps, noise, method, dense=dense)
    reads = traced_model.table_reads(model)
    assert reads is not None
    lazy = LazyNoise(reads, physical_batch_size=4, expected_batch_size=4)
    replay = _Replay(
        reads, np.stack([n[0] for n in noise]), [float(_rate()(s)) for s in range(12)]
    )
    step, differed = _step(model, lazy, method), 0
    for index, parts in enumerate(steps):
        replay.step = index
        values = [replay.of_batch(parts[0], step.shapes[0]), *noise[index][1:]]
        step.begin(values, _LaterParts(replay, parts))  # type: ignore[arg-type]
        for part in parts:
            step.add(*part)
        step.finish()
        differed += not np.allclose(_weights(model)[0], wanted[index][0], atol=1e-3)
        if index in (1, 5, 11):
            replay.step = index + 1
            lazy.flush(replay.of_chunk)
            for left, right in zip(_weights(model), wanted[index], strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    # Else there would have been nothing to flush.
    assert differed == num_steps
    assert step.num_traces == (1 if len(sizes) == 1 else 2)


def test_a_further_batch_without_its_own_noise_is_an_error(rows: Any) -> None:
    # Noise that is used twice would cancel in a difference.
    model = _model()
    reads = traced_model.table_reads(model)
    assert reads is not None
    lazy = LazyNoise(reads, physical_batch_size=4, expected_batch_size=4)
    step = _step(model, lazy)
    step.begin([np.zeros(shape, "f4") for shape in step.shapes])
    step.add(*_batch(rows(4)))
    step.add(*_batch(rows(4)))
    with pytest.raises(ValueError, match="LaterNoise"):
        step.finish()


# -- the law of what is read, and of what leaves ---------------------------------------


def _direct_reads(table: Any) -> TableReads:
    return TableReads(
        tables=(table,), num_ids=(1,), ids=lambda columns, weight: [columns["ids"]]
    )


def _read_and_final(num_rows: int, rates: list[float], read_at: int) -> np.ndarray:
    """Noise of all rows as read at one step, and at the end: shape (2, values)."""
    table = tf.Variable(tf.zeros((num_rows, 8)))
    lazy = LazyNoise(
        _direct_reads(table), physical_batch_size=num_rows, expected_batch_size=4
    )
    random, read = np.random.default_rng(0), np.zeros(0)
    shape = lazy.shapes[0]
    for step, rate in enumerate(rates):
        # Some rows again and again, and repeated within a batch.
        ids = random.integers(0, num_rows // 2, num_rows // 3)
        if step == read_at:
            ids = random.permutation(num_rows)
        noise = 3.0 * normal(KEY, step, 0, shape)
        lazy.complete_read({"ids": tf.constant(ids, tf.int32)}, None, [noise])
        if step == read_at:
            read = table.numpy().ravel()
        lazy.count_step(tf.constant(rate))
        assert lazy.num_pending == num_rows
    later = LaterNoise(noise_key=KEY, step=len(rates), noise_stddev=3.0)
    lazy.flush(later.of_chunk)
    assert lazy.num_pending == 0
    return np.stack([read, table.numpy().ravel()])


def test_reads_and_flushed_weights_have_the_joint_law_of_noise_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FLUSH_CHUNK", 10_000)
    rates, read_at, num_rows = [0.5, 2.0, 0.1, 1.0, 1.0, 0.7, 0.3], 4, 5_000
    values = _read_and_final(num_rows, rates, read_at)
    scale = (3.0 / 4) ** 2
    before = scale * sum(rate**2 for rate in rates[:read_at])
    end = scale * sum(rate**2 for rate in rates)
    found, n = np.cov(values, bias=True), values.shape[1]
    # An entry of the covariance of n pairs of normals has a deviation of at most
    # sqrt(2/n) times the larger variance.  Five of them are 3.5 %: it fails with
    # probability < 1e-5, and a variance off by 10 % is seen with one > 0.999.
    wanted = np.array([[before, before], [before, end]])
    bound = 5 * math.sqrt(2 / n) * np.array([[before, end], [end, end]])
    assert (np.abs(found - wanted) < bound).all()
    # Rows are independent of each other: neighbours, and those of the two halves.
    for lag in (1, 8, n // 2):
        last = values[1] / math.sqrt(end)
        correlation = float(np.mean(last * np.roll(last, lag)))
        assert abs(correlation) < 5 / math.sqrt(n)


def test_no_two_draws_of_a_run_share_a_stream() -> None:
    shape, found = (6,), []
    for step in range(3):
        later = LaterNoise(noise_key=KEY, step=step, noise_stddev=1.0)
        for variable in range(2):
            found.append(normal(KEY, step, variable, shape))
            found += [later.of_part(part, variable, shape) for part in (1, 2)]
            found += [later.of_chunk(variable, chunk, shape) for chunk in (0, 1, 2)]
    assert len({values.tobytes() for values in found}) == 3 * 2 * 6


def test_flushing_twice_adds_nothing() -> None:
    table = tf.Variable(tf.zeros((10, 2)))
    lazy = LazyNoise(_direct_reads(table), physical_batch_size=2, expected_batch_size=1)
    lazy.count_step(tf.constant(1.0))
    draw = LaterNoise(noise_key=KEY, step=1, noise_stddev=1.0).of_chunk
    lazy.flush(draw)
    once = table.numpy()
    assert once.all()
    lazy.flush(draw)
    np.testing.assert_array_equal(table.numpy(), once)


def test_draws_of_a_flush_do_not_depend_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FLUSH_CHUNK", 6)
    found = []
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(module, "_FLUSH_THREADS", num_threads)
        table = tf.Variable(tf.zeros((100, 2)))
        lazy = LazyNoise(
            _direct_reads(table), physical_batch_size=2, expected_batch_size=1
        )
        lazy.count_step(tf.constant(1.0))
        lazy.flush(LaterNoise(noise_key=KEY, step=1, noise_stddev=1.0).of_chunk)
        found.append(table.numpy().tobytes())
    assert len(set(found)) == 1


# -- where it is used, and where it is refused -----------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"clipnorm": 1.0},
        {"clipvalue": 1.0},
        {"global_clipnorm": 1.0},
        {"use_ema": True},
    ],
)
def test_only_plain_sgd_is_plain(changes: dict[str, Any]) -> None:
    assert is_plain_sgd(keras.optimizers.SGD(0.5))
    assert is_plain_sgd(keras.optimizers.SGD(_rate()))
    assert not is_plain_sgd(keras.optimizers.SGD(0.5, **changes))
    assert not is_plain_sgd(keras.optimizers.Adam(0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "momentum"}, "--optimizer momentum.*--optimizer sgd"),
        ({"optimizer": "adam"}, "--optimizer adam"),
        ({"optimizer": "sgd", "ema_decay": 0.9}, "--ema-decay and --tail read"),
        ({"optimizer": "sgd", "tail": 2}, "--ema-decay and --tail read"),
    ],
)
def test_lazy_noise_is_refused_with_the_reason_where_it_would_not_be_exact(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        TrainSettings(embedding_noise="lazy", **PRIVATE, **changes)


def _choose(model: TrainableModel, manifest: Any, **changes: Any) -> lazy_tables.Choice:
    fields = {"optimizer": "sgd", **PRIVATE, **changes}
    settings = TrainSettings(**fields)
    optimizer = keras.optimizers.SGD(0.1)
    return choose(
        model, optimizer, settings, manifest=manifest, checkpoint_every=None
    )  # fmt: skip


def test_large_tables_are_lazy_by_themselves_and_small_ones_are_not(
    small_batches: Any,
) -> None:
    manifest = small_batches.manifest  # a step reads at most 16 * 26 rows
    assert _choose(_model(831), manifest) == lazy_tables.Choice()
    chosen = _choose(_model(832), manifest)
    assert chosen.reads is not None
    assert [table.shape[0] for table in chosen.reads.tables] == [832]
    assert "lazy for 1,664 values" in chosen.message
    # 4 flushes' worth: 4 * 832 * 2 / (416 * 2 + 53 dense values).
    assert chosen.flush_every == math.ceil(4 * 1664 / (832 + 53))
    forced = _choose(_model(831), manifest, embedding_noise="lazy")
    assert forced.reads is not None
    assert (
        _choose(_model(10**4), manifest, embedding_noise="dense")
        == lazy_tables.Choice()
    )


def test_dense_noise_of_large_tables_says_why_and_what_it_costs(
    small_batches: Any,
) -> None:
    manifest = small_batches.manifest
    chosen = _choose(_model(10**4), manifest, optimizer="momentum")
    assert chosen.reads is None
    assert "dense, 20,000 values at every step" in chosen.message
    assert "--optimizer sgd" in chosen.message
    assert _choose(_model(100), manifest, optimizer="momentum").message == ""


def test_models_without_rows_that_are_known_beforehand_are_refused(
    small_batches: Any,
) -> None:
    integers = keras.Input((13,), name="integers")
    network = keras.Model(integers, keras.layers.Dense(1)(integers))
    dense = TrainableModel(network=network, description={})
    with pytest.raises(InputError, match="no Embedding"):
        _choose(dense, small_batches.manifest, embedding_noise="lazy")
    constrained = _model()
    constrained.variables[0]._constraint = keras.constraints.NonNeg()
    with pytest.raises(InputError, match="no Embedding"):
        _choose(constrained, small_batches.manifest, embedding_noise="lazy")
