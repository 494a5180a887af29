"""Lazy noise: weights that steps read, and flushed weights, are as with dense noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accounting.core.claim import AUTO_CLIP
from accounting.core.validation import InputError
from pipelines.files.key_sources import insecure_key
from tests.trainer import zoo
from tests.trainer.bounded import OnGrid, bam_sum
from tests.trainer.conftest import make_rows
from tests.trainer.thread_workers import Together, Worker, outcomes
from trainer.claims import lazy_noise as module
from trainer.claims.lazy_noise import LazyNoise, choose, is_plain_sgd
from trainer.core.step.dp_step import Step
from trainer.core.step.grid import COUNT_SHAPE, AdaptiveClip, Grid
from trainer.core.step.noise import LaterNoise, grid_normal, step_noise
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import clipped_sum
from trainer.gradients.proof import TableReads, table_reads
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings

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
    return zoo.batch(rows, padding=size - len(rows))


# -- the same weights as with noise at every step --------------------------------------


class _Replay:
    """Lazy draws that add up to the noise of a run with dense noise."""

    def __init__(self, reads: TableReads, noise: np.ndarray, rates: Any) -> None:
        self._reads, self._noise, self._rates = reads, noise, rates
        self._next = np.zeros(NUM_ROWS, int)
        self.step = 0

    def values(self, rows: np.ndarray, num_values: int) -> np.ndarray:
        found = np.zeros((num_values, DIM))
        for place, row in enumerate(rows):
            steps = range(self._next[row], self.step)
            total = sum(self._rates[s] * self._noise[s, row] for s in steps)
            size = math.sqrt(sum(self._rates[s] ** 2 for s in steps))
            found[place] = total / size if size else 0
        self._next[rows] = self.step
        return found

    def read_by(self, batches: list[Any]) -> Any:
        """The draws for a step of these batches, in blocks of two rows."""
        read = np.unique([self._reads.ids(*batch)[0] for batch in batches])
        return lambda table, block, shape: self._block(read, block, shape)

    def of_flush(self, table: int, block: int, shape: Sequence[int]) -> np.ndarray:
        return self._block(np.arange(NUM_ROWS), block, shape)

    def _block(self, rows: np.ndarray, block: int, shape: Sequence[int]) -> np.ndarray:
        rows = rows[2 * block :][: shape[0]]
        assert len(rows) == shape[0]
        return self.values(rows, shape[0])


def _rate() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([3, 7], [0.5, 2.0, 0.1])


#: Fine enough for what is compared here.
GRID = Grid(exponent=-40, clip=0.5)


def _lazy(reads: TableReads, **more: Any) -> LazyNoise:
    bounded = OnGrid(GRID, more.pop("expected_batch_size", 4))
    return LazyNoise(reads, bounded=bounded, **more)


def _step(
    model: TrainableModel,
    lazy: LazyNoise | None,
    method: str = "dp-sgd",
    workers: Any = None,
) -> Step:
    adaptive = AdaptiveClip(0.9) if method == AUTO_CLIP else None
    gradient_sum = (
        bam_sum(model, l2_norm_clip=0.5, radius=0.3)
        if method == "bam"
        else clipped_sum(model, l2_norm_clip=0.5, adaptive=adaptive)
    )
    bounded = OnGrid(GRID, 4) if lazy is None else lazy.bounded
    assert isinstance(bounded, OnGrid)
    bounded.set(function=gradient_sum, adaptive=adaptive)
    optimizer = keras.optimizers.SGD(_rate())
    return Step(model.variables, bounded, optimizer, lazy=lazy, workers=workers)


def _units(noise: list[np.ndarray]) -> list[np.ndarray]:
    return [np.rint(values / GRID.unit).astype(np.int64) for values in noise]


def _weights(model: TrainableModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def _eager(
    steps: list[list[Any]], noise: list[list[np.ndarray]], method: str, *, dense: bool
) -> list[Any]:
    """The weights after each step."""
    model = _model(dense=dense)
    step, found = _step(model, None, method), []
    for parts, values in zip(steps, noise, strict=True):
        step.begin(_units(values))
        for part in parts:
            step.add(*part)
        step.finish()
        found.append(_weights(model))
    return found


@pytest.mark.parametrize(
    ("sizes", "method", "dense"),
    [
        ((4, 0, 2), "dp-sgd", True),
        ((3,), "bam", True),
        ((3,), "dp-sgd", False),
        ((4, 0, 2), AUTO_CLIP, True),
    ],
)
def test_flushed_weights_are_those_of_noise_at_every_step(
    sizes: tuple[int, ...],
    method: str,
    dense: bool,
    rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2 * DIM)
    monkeypatch.setattr(module, "_FLUSH_BLOCKS", 4)  # rows do not fill the last chunk
    monkeypatch.setattr(module, "_DRAW_THREADS", 1)  # the replay counts what it gave
    num_steps, random = 8, np.random.default_rng(0)
    steps = [
        [_batch(rows(size, 10 * s + p)[:size]) for p, size in enumerate(sizes)]
        for s in range(num_steps)
    ]
    model = _model(dense=dense)
    shapes = [v.shape for v in model.variables]
    shapes += [COUNT_SHAPE] if method == AUTO_CLIP else []
    noise = [[random.normal(0, 2, s).astype("f4") for s in shapes] for _ in steps]
    wanted = _eager(steps, noise, method, dense=dense)
    reads = table_reads(model)
    assert reads is not None
    lazy = _lazy(reads)
    replay = _Replay(
        reads, np.stack([n[0] for n in noise]), [float(_rate()(s)) for s in range(8)]
    )
    step, differed = _step(model, lazy, method), 0
    for index, parts in enumerate(steps):
        replay.step = index
        later = SimpleNamespace(of_read=replay.read_by(parts))
        step.begin(_units(noise[index]), later)  # type: ignore[arg-type]
        for part in parts:
            step.add(*part)
        step.finish()
        differed += not np.allclose(_weights(model)[0], wanted[index][0], atol=1e-3)
        if index in (1, 4, 7):
            replay.step = index + 1
            lazy.flush(replay.of_flush)
            for left, right in zip(_weights(model), wanted[index], strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    # Otherwise there would have been nothing to flush.
    assert differed == num_steps
    assert step.num_traces == (1 if len(sizes) == 1 else 2)


def test_a_step_without_noise_for_its_rows_is_an_error(rows: Any) -> None:
    model = _model()
    reads = table_reads(model)
    assert reads is not None
    step = _step(model, _lazy(reads))
    step.begin(_units([np.zeros(v.shape) for v in model.variables]))
    step.add(*_batch(rows(4)))
    with pytest.raises(ValueError, match="LaterNoise"):
        step.finish()


def _train(model: TrainableModel, worker: Worker) -> list[np.ndarray]:
    """Steps of one, two and three batches, p at worker p mod W, and a flush."""
    reads = table_reads(model)
    assert reads is not None
    step = _step(model, _lazy(reads, workers=worker), workers=worker)
    lazy, share = step._lazy, (worker.rank, worker.count)
    assert lazy is not None
    for index in range(3):
        later = LaterNoise(secret=KEY, step=index, noise_stddev=0.5)
        noise = step_noise(KEY, index, step.shapes, 0.5, step.bounded.unit, share)
        step.begin(noise, later)
        data = make_rows(12, index)
        parts = np.split(data, index + 1)
        for part in parts[worker.rank :: worker.count]:
            step.add(*_batch(part, 12))
        step.finish()
    lazy.flush(LaterNoise(secret=KEY, step=3, noise_stddev=0.5).of_flush)
    assert lazy.num_pending == 0
    return _weights(model)


def test_weights_are_the_same_bits_on_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 3 * DIM)
    monkeypatch.setattr(module, "_FLUSH_BLOCKS", 2)
    alone = _train(_model(), Together(1).one(0))
    models = [_model() for _ in range(3)]
    # In the first step one worker has a batch, in the second two of them.
    for weights in outcomes(3, lambda worker: _train(models[worker.rank], worker)):
        assert all(map(np.array_equal, weights, alone))


# -- the law of what is read, and of what leaves ---------------------------------------


def _direct_reads(table: Any) -> TableReads:
    return TableReads(
        tables=(table,), num_ids=(1,), ids=lambda columns, weight: [columns["ids"]]
    )


def _read_and_final(num_rows: int, rates: list[float], read_at: int) -> np.ndarray:
    """Noise of all rows when one step reads them, and after a flush: (2, values)."""
    table = tf.Variable(tf.zeros((num_rows, 8)))
    lazy = _lazy(_direct_reads(table))
    random, read = np.random.default_rng(0), np.zeros(0)
    for step, rate in enumerate(rates):
        # Some rows are read at many steps, and more than once in a batch.
        ids = random.integers(0, num_rows // 2, num_rows // 3)
        if step == read_at:
            ids = random.permutation(num_rows)
        later = LaterNoise(secret=KEY, step=step, noise_stddev=3.0)
        batch = {"ids": tf.constant(ids, tf.int32)}, tf.constant(1.0)
        lazy.complete_reads([batch], later.of_read)
        if step == read_at:
            read = table.numpy().ravel()
        lazy.count_step(tf.constant(rate))
        assert lazy.num_pending == num_rows
    later = LaterNoise(secret=KEY, step=len(rates), noise_stddev=3.0)
    lazy.flush(later.of_flush)
    assert lazy.num_pending == 0
    return np.stack([read, table.numpy().ravel()])


def test_reads_and_flushed_weights_have_the_joint_law_of_noise_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 1_000)
    rates, read_at, num_rows = [0.5, 2.0, 0.1, 1.0, 1.0, 0.7, 0.3], 4, 5_000
    values = _read_and_final(num_rows, rates, read_at)
    scale = (3.0 / 4) ** 2
    before = scale * sum(rate**2 for rate in rates[:read_at])
    end = scale * sum(rate**2 for rate in rates)
    found, n = np.cov(values, bias=True), values.shape[1]
    # An entry of the covariance of n pairs of normals has a deviation of at most
    # sqrt(2/n) times the larger variance.  Five of them are 3.5 %: the test fails by
    # chance with probability < 1e-5, and on a variance off by 10 % with one > 0.999.
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
        later = LaterNoise(secret=KEY, step=step, noise_stddev=1.0)
        for table in range(2):
            found.append(grid_normal(KEY, step, table, shape, stddev=2.0**30) / 2**30)
            found += [later.of_read(table, block, shape) for block in (0, 1, 2)]
            found += [later.of_flush(table, block, shape) for block in (0, 1, 2)]
    assert len({values.astype("f4").tobytes() for values in found}) == 3 * 2 * 7


def test_integers_and_noise_of_a_row_meet_before_its_weight_does() -> None:
    table = tf.Variable(tf.ones((4, 2)))
    lazy = _lazy(_direct_reads(table), expected_batch_size=1)
    # One batch moves the weight by half the distance to the next float32.
    half = round(2.0**-25 / GRID.unit)
    later = LaterNoise(secret=KEY, step=0, noise_stddev=0.0)
    batch = {"ids": tf.constant([2], tf.int32)}, tf.constant(1.0)
    lazy.complete_reads([batch], later.of_read)
    for _ in range(2):
        units = tf.constant([[half, half]], tf.int64)
        lazy.add(0, tf.IndexedSlices(units, tf.constant([2])))
    lazy.count_step(tf.constant(1.0))
    assert np.array_equal(table, np.ones((4, 2)))
    lazy.flush(later.of_flush)
    assert table.numpy()[2].tolist() == [1 - 2.0**-24] * 2


def _moves(rates: list[float], reads: list[int], flushes: set[int]) -> list[float]:
    """Row 2 of a table after each step, in units over the batch size.

    Args:
      rates: Learning rate of each step.
      reads: Row that each step reads, with a gradient of -10^(its number) units.
      flushes: Steps after which the table is flushed.
    """
    table, found = tf.Variable(tf.zeros((4, 1))), []
    lazy = _lazy(_direct_reads(table), expected_batch_size=1)
    for step, (rate, row) in enumerate(zip(rates, reads, strict=True)):
        later = LaterNoise(secret=KEY, step=step, noise_stddev=0.0)
        batch = {"ids": tf.constant([row], tf.int32)}, tf.constant(1.0)
        lazy.complete_reads([batch], later.of_read)
        units = tf.constant([[-(10**step)]], tf.int64)
        lazy.add(0, tf.IndexedSlices(units, tf.constant([row])))
        lazy.count_step(tf.constant(rate))
        if step in flushes:
            lazy.flush(later.of_flush)
        found.append(float(table[2, 0]) / GRID.unit)
    return found


def test_a_gradient_moves_its_row_at_the_rate_of_its_own_step() -> None:
    # Seen to fail if rows take the rate of the last step.
    rates = [0.5, 2.0, 4.0]
    assert _moves(rates, [2, 1, 2], {2}) == [0, 0, 0.5 * 1 + 4 * 100]
    assert _moves(rates, [2, 1, 1], {2}) == [0, 0, 0.5 * 1]


def test_a_gradient_moves_its_row_once() -> None:
    # After a flush the integers of row 2 are still in the array: a step that reads row
    # 1, and then one that reads row 2, may not add them again.
    assert _moves([1.0] * 4, [2, 1, 2, 1], {0, 3}) == [1, 1, 1, 1 + 100]
    # A step of rate 0 leaves what an earlier step put there.
    assert _moves([1.0, 0.0, 1.0], [2, 2, 2], {2}) == [0, 1, 1 + 100]


def test_every_chunk_of_a_block_gets_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks are of three rows, and the last is shorter; a factor is of its row.
    monkeypatch.setattr(module, "_CHUNK", 6)
    units = np.arange(14).reshape(7, 2)
    noise, factors = np.full((7, 2), 1000.0), np.arange(1.0, 8.0)
    wanted = units + 1000 * np.arange(1, 8)[:, None]
    module._add_rounded(units, noise, factors)
    assert np.array_equal(units, wanted)


def test_rates_that_integers_have_no_room_for_are_refused() -> None:
    table = tf.Variable(tf.zeros((4, 2)))
    lazy = _lazy(_direct_reads(table))
    lazy.count_step(tf.constant(1.0))
    with pytest.raises(InputError, match="differ by less than 65,536 times"):
        lazy.count_step(tf.constant(1e-9))


def test_rates_that_differ_most_lack_no_variance() -> None:
    """Seen to fail: sums of squares that differ by 2^40 lost 9e-5 of the smaller."""
    rates = np.linspace(1.001, 1.002, 9, dtype="f4") * np.float32(2**-16)
    for rate in rates:
        lazy = _lazy(_direct_reads(tf.Variable(tf.zeros((4, 2)))))
        lazy.count_step(1.0)
        for _ in range(100):
            lazy.count_step(rate)
        lacked = (lazy._total - 1) / (100 * float(rate) ** 2)
        assert lacked == pytest.approx(1, rel=5e-7)


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


def _choose(model: TrainableModel, manifest: Any, **changes: Any) -> Any:
    fields = {"optimizer": "sgd", **PRIVATE, **changes}
    settings = TrainSettings(**fields)
    optimizer = keras.optimizers.SGD(0.1)
    return choose(model, optimizer, settings, manifest=manifest)


def test_large_tables_are_lazy_by_themselves_and_small_ones_are_not(
    small_batches: Any,
) -> None:
    manifest = small_batches.manifest  # a step reads at most 16 * 26 rows
    assert _choose(_model(831), manifest) is None
    reads, flush_every = _choose(_model(832), manifest)
    assert [table.shape[0] for table in reads.tables] == [832]
    # 16 flushes' worth: 16 * 832 * 2 / (416 * 2 + 53 dense values).
    assert flush_every == math.ceil(16 * 1664 / (832 + 53))
    assert _choose(_model(831), manifest, embedding_noise="lazy") is not None
    assert _choose(_model(10**4), manifest, embedding_noise="dense") is None


@pytest.mark.parametrize("weight", [0, 1])
def test_constraints_of_any_weight_are_refused(weight: int, small_batches: Any) -> None:
    """Seen to fail: that of a kernel read a table, and wrote what it held there.

    A row that no example had read was found in the released kernel without any noise.
    """
    model = _model()
    table = model.variables[0]
    model.optimized[weight]._constraint = lambda value: value * 0 + table[7, 0]
    with pytest.raises(InputError, match="has a constraint, which may read"):
        _choose(model, small_batches.manifest, embedding_noise="lazy")
