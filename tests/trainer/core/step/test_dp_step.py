"""The private step: noise once, constant divisor, and SGD as its limit."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.files.key_sources import insecure_key
from tests.trainer import zoo
from tests.trainer.bounded import OnGrid, bounded, unbounded
from tests.trainer.conftest import make_rows
from tests.trainer.thread_workers import Together, Worker, outcomes
from trainer.claims.bam import bam_gradients
from trainer.claims.dp_sat import SharpnessAwareOptimizer
from trainer.claims.model_mix import MixingOptimizer
from trainer.core.step.clipping import clipped
from trainer.core.step.dp_step import Step
from trainer.core.step.grid import AdaptiveClip, Grid
from trainer.core.step.noise import mixing_coefficients, step_noise
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import clipped_sum, example_gradients
from trainer.model.trainable_model import TrainableModel

CLIP = 0.5


def _model(seed: int = 0) -> TrainableModel:
    keras.utils.set_random_seed(seed)
    integers = keras.Input((13,), name="integers")
    values = keras.ops.nan_to_num(integers)
    values = keras.layers.Dense(5, activation="tanh")(values)
    network = keras.Model(integers, keras.layers.Dense(1)(values))
    return TrainableModel(network=network, description={})


def _batch(rows: np.ndarray, size: int = 16) -> tuple[dict[str, Any], Any]:
    return zoo.batch(rows, padding=size - len(rows))


def _step(
    model: TrainableModel,
    divisor: int = 8,
    clip: float | AdaptiveClip = CLIP,
    **more: Any,
) -> Step:
    optimizer = more.pop("optimizer", None) or keras.optimizers.SGD(1.0)
    gradients = more.pop("gradients", example_gradients)(model)
    if clip == math.inf:
        summed = unbounded(clipped(gradients, l2_norm_clip=clip), divisor)
    else:
        summed = bounded(gradients, clip, divisor, noise_multiplier=100)
    return Step(model.variables, summed, optimizer, **more)


def _noise(step: Step, key: int, index: int, stddev: float) -> list[np.ndarray]:
    return step_noise(insecure_key(key), index, step.shapes, stddev, step.bounded.unit)


def _run(step: Step, noise: list[np.ndarray], batches: list[Any]) -> None:
    step.begin(noise)
    for columns, weight in batches:
        step.add(columns, weight)
    step.finish()


def _change(model: TrainableModel, act: Any) -> list[np.ndarray]:
    """By how much it lowers the weights, which are as before then."""
    before = [v.numpy() for v in model.variables]
    act()
    after = [v.numpy() for v in model.variables]
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    return [b - a for b, a in zip(before, after, strict=True)]


def test_sum_and_noise_have_a_constant_divisor_whatever_the_step_holds(
    rows: Any,
) -> None:
    model = _model()
    step, sum_of = _step(model, divisor=8), clipped_sum(model, l2_norm_clip=CLIP)
    unit = step.bounded.unit
    assert unit is not None
    zeros, noise = (_noise(step, 3, 5, stddev) for stddev in (0.0, 100.0))
    for batch in map(_batch, (rows(0), rows(16))):
        plain, noisy = (
            _change(model, lambda n=added, b=batch: _run(step, n, [b]))
            for added in (zeros, noise)
        )
        for left, right in zip(plain, sum_of(*batch), strict=True):
            np.testing.assert_allclose(left, right / 8, atol=2e-7)
        for with_noise, without, units in zip(noisy, plain, noise, strict=True):
            found = (with_noise - without) * 8
            np.testing.assert_allclose(found, units * unit, rtol=1e-4, atol=1e-3)


def test_noise_of_another_step_is_never_repeated_to_fit(rows: Any) -> None:
    """Seen to fail: of fewer weights, 13 had one noise, after a compile in a fit."""
    model, batch = _model(), _batch(rows(4))
    step = _step(model)
    noise = _noise(step, 3, 5, 100.0)
    for wrong in (
        [one[:1] for one in noise],
        [*noise, noise[-1]],
        noise[:-1],
        [noise[0].T, *noise[1:]],
    ):
        with pytest.raises(InputError, match="noise for each trainable weight"):
            _run(step, wrong, [batch])
    assert not step.num_traces


def test_noise_is_added_once_per_step_whatever_the_number_of_batches(rows: Any) -> None:
    data = rows(16)
    parts = [_batch(part, size=16) for part in np.array_split(data, 4)]
    model = _model()
    step = _step(model)
    noise = _noise(step, 4, 0, 30.0)
    results = [
        _change(model, lambda b=batches: _run(step, noise, b))
        for batches in ([_batch(data)], parts, [*parts, _batch(data[:0])])
    ]
    for left, right in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    # A batch of padding adds exactly nothing.
    assert all(map(np.array_equal, results[2], results[1]))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_row_of_a_table_gets_noise_whichever_rows_are_read(
    num_parts: int,
) -> None:
    # Seen to fail if gradients of rows replace the noise, or are added to zeros.
    def gradient_sum(columns: Any, weight: Any) -> list[Any]:
        values = tf.constant([[1.0, 2.0], [3.0, 4.0], [-5.0, 0.0]])
        return [tf.IndexedSlices(values, tf.constant([1, 1, 4]), (6, 2))]

    table = tf.Variable(tf.zeros((6, 2)))
    summed = OnGrid(Grid(exponent=-2, clip=9.0), 4, gradient_sum)
    step = Step([table], summed, keras.optimizers.SGD(1.0))
    noise = np.random.default_rng(0).integers(-1000, 1000, (6, 2))
    _run(step, [noise], [({}, tf.ones(1))] * num_parts)
    sums = np.zeros((6, 2))
    sums[1], sums[4] = [4, 6], [-5, 0]
    np.testing.assert_array_equal(table, -(noise / 4 + num_parts * sums) / 4)


def test_nothing_is_compiled_again_after_the_first_steps(rows: Any) -> None:
    step, batches = _step(_model()), [_batch(rows(16, seed)) for seed in range(3)]
    counts = []
    for index in range(4):
        for parts in (1, 2, 3):
            noise = _noise(step, 4, index, 1.0)
            _run(step, noise, batches[:parts])
            counts.append(step.num_traces)
    # The step of one batch; then adding to sums, and applying them.
    assert counts == [1, *[3] * 11]


def test_infinite_clip_and_zero_noise_is_ordinary_training(rows: Any) -> None:
    private, ordinary = _model(), _model()
    batches = [_batch(rows(16, seed)) for seed in range(5)]
    step = _step(
        private, divisor=16, clip=math.inf, optimizer=keras.optimizers.Adam(0.05)
    )
    optimizer = keras.optimizers.Adam(0.05)
    for columns, weight in batches:
        _run(step, _noise(step, 0, 0, 0.0), [(columns, weight)])
        with tf.GradientTape() as tape:
            losses = ordinary.losses(columns)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, ordinary.variables)
        optimizer.apply_gradients(zip(gradients, ordinary.variables, strict=True))
    for left, right in zip(private.variables, ordinary.variables, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-4, atol=1e-5)


# -- several workers -------------------------------------------------------------------


_OPTIMIZERS: dict[str, Any] = {
    "dp-sgd": lambda _: keras.optimizers.Adam(0.1),
    "auto": lambda _: keras.optimizers.Adam(0.1),
    "bam": lambda _: keras.optimizers.SGD(0.1, momentum=0.9),
    "dp-sat": lambda weights: SharpnessAwareOptimizer(
        keras.optimizers.SGD(0.1), weights, radius=0.3
    ),
    "model-mix": lambda weights: MixingOptimizer(
        keras.optimizers.SGD(0.1), weights, mix_width=0.1, init_seed=0
    ),
}


def _train(
    model: TrainableModel, worker: Worker, method: str = "dp-sgd", order: int = 1
) -> list[np.ndarray]:
    """Two steps, of four batches and of one; worker p mod W has batch p."""
    optimizer = _OPTIMIZERS[method](model.variables)
    gradients = example_gradients
    if method == "bam":
        gradients = functools.partial(bam_gradients, radius=0.3)  # type: ignore[assignment]
    clip = AdaptiveClip(0.9) if method == "auto" else CLIP
    step = _step(
        model, clip=clip, optimizer=optimizer, workers=worker, gradients=gradients
    )
    share = worker.rank, worker.count
    for index, num_parts in enumerate((4, 1)):
        data = np.array_split(make_rows(16, index), num_parts)
        noise = step_noise(
            insecure_key(4), index, step.shapes, 0.5, step.bounded.unit, share=share
        )
        if method in ("dp-sat", "model-mix"):
            mixed = mixing_coefficients(insecure_key(4), index, step.shapes)
            optimizer.before_step(mixed)
        step.begin(noise)
        for part in data[worker.rank :: worker.count][::order]:
            step.add(*_batch(part))
        step.finish()
    clips = [clip.norm.numpy()] if isinstance(clip, AdaptiveClip) else []
    return [*(v.numpy() for v in model.variables), *clips]


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    return _train(_model(), Together(1).one(0))


@pytest.mark.parametrize(
    ("method", "count"),
    [
        *(("dp-sgd", 3), ("auto", 2), ("model-mix", 2)),
        *(pytest.param(x, 2, marks=pytest.mark.thorough) for x in ("bam", "dp-sat")),
    ],
)
def test_weights_are_the_same_bits_on_any_number_of_workers(
    method: str, count: int, alone: list[np.ndarray]
) -> None:
    if method != "dp-sgd":
        alone = _train(_model(), Together(1).one(0), method)
    models = [_model() for _ in range(count)]
    # In the second step all workers but the first have no batch.
    for weights in outcomes(count, lambda w: _train(models[w.rank], w, method)):
        assert all(map(np.array_equal, weights, alone))


def test_several_workers_are_refused_where_sums_have_no_grid() -> None:
    model, worker = _model(), Together(2).one(0)
    with pytest.raises(InputError, match="private method on 2 workers"):
        _step(model, clip=math.inf, workers=worker)


def test_what_values_may_make_fail_is_computed_before_a_step_is_settled(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the last batch of a worker was computed when others had left."""

    class SettledError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise ValueError

    def settle(compute: Any) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            compute()
        raise SettledError

    step = _step(_model(), workers=Together(2).one(0))
    monkeypatch.setattr(step, "_add", fail)
    step.begin([np.zeros(shape, np.int64) for shape in step.shapes])
    step.add(*_batch(rows(4)))
    with pytest.raises(SettledError):
        step.finish(settle)
