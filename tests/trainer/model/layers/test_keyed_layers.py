"""Dropout whose masks are functions of the rows' seeds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import COLUMNS, make_rows
from tests.trainer.gradients.test_clipping import CLIP
from tests.trainer.zoo import (
    NUM_ROWS,
    arrays,
    assert_close,
    batch,
    make_model,
    naive_sum,
    numbers,
)
from trainer.core.step.noise import SEEDS, row_seeds
from trainer.core.tf_compat import keras, tf
from trainer.gradients import paths
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES
from trainer.model.layers import SEED_WORDS, has_dropout, keyed_layers
from trainer.model.trainable_model import TrainableModel, Views, trained_model

layers = keras.layers
KEY = bytes(range(32))


def _of_numbers(body: Callable[[Any], Any]) -> Any:
    integers, values = numbers()
    return keras.Model(integers, layers.Dense(1)(body(values)))


def _of_steps(body: Callable[[Any], Any]) -> Any:
    """A model of (batch, 4, 4) values."""
    return _of_numbers(
        lambda v: layers.Flatten()(body(layers.Dense(4)(v[:, :4, None])))
    )


def _dropped() -> Any:
    return _of_numbers(
        lambda v: layers.Dropout(0.5)(layers.Dense(6, activation="tanh")(v))
    )


def _attention() -> Any:
    attention = layers.MultiHeadAttention(2, 3, dropout=0.4)
    return _of_steps(lambda v: attention(v, v))


def _recurrent() -> Any:
    return _of_steps(layers.LSTM(3, dropout=0.3, recurrent_dropout=0.3))


MODELS = {
    _dropped: ONE_PASS,
    _attention: ONE_PASS,
    _recurrent: SINGLE_EXAMPLES,  # such cells cut weights into pieces
}


def _trained(make: Callable[[], Any]) -> TrainableModel:
    plain = dataclasses.replace(make_model(make), columns=COLUMNS)
    return trained_model(plain, Views())


@functools.cache
def _sums(make: Callable[[], Any]) -> tuple[TrainableModel, list[Any]]:
    """A model, and its sum on every path, which is traced once."""
    model = _trained(make)
    sums = [
        paths.clipped_sum(model, l2_norm_clip=CLIP, path=path)
        for path in {MODELS[make], SINGLE_EXAMPLES}
    ]
    return model, [tf.function(one, autograph=False) for one in sums]


def _with_seeds(rows: np.ndarray) -> np.ndarray:
    """The same rows with seeds of their own."""
    dtype = np.dtype([*rows.dtype.descr, (SEEDS, "u4", SEED_WORDS)])
    found = np.zeros(len(rows), dtype)
    for name in rows.dtype.names:
        found[name] = rows[name]
    found[SEEDS] = row_seeds(KEY, 0, 0, (len(rows), SEED_WORDS))
    return found


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=pytest.mark.thorough) if make is _recurrent else make
        for make in MODELS
    ],
)
def test_a_mask_is_a_function_of_the_seed_of_its_row_on_every_path(
    make: Callable[[], Any],
) -> None:
    # The loop computes each example alone: other rows, or places, change no mask.
    rows = make_rows(NUM_ROWS)
    rows["integers"] = np.nan_to_num(rows["integers"])
    (model, sums), data = _sums(make), _with_seeds(rows)
    wanted = naive_sum(model, data, CLIP)
    without = naive_sum(dataclasses.replace(model, columns=COLUMNS), rows, CLIP)
    assert any(np.abs(a - b).max() > 1e-2 for a, b in zip(wanted, without, strict=True))
    assert paths.choose_path(model) == MODELS[make]
    # It does not see a mask that all rows share.  Seen to fail if the seeds are
    # ignored, and if all rows take the seed of the first.
    alike = _with_seeds(np.repeat(rows[:1], NUM_ROWS))
    alone = [naive_sum(model, alike[i : i + 1], CLIP) for i in range(NUM_ROWS)]
    # Of some layers a mask has only a few values.
    assert len({b"".join(g.tobytes() for g in one) for one in alone}) >= 3
    of_alike = [np.sum(of_rows, 0) for of_rows in zip(*alone, strict=True)]
    shared = [NUM_ROWS * first for first in alone[0]]
    pairs = zip(of_alike, shared, strict=True)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in pairs)
    for gradient_sum in sums:
        for each, total in ((data, wanted), (alike, of_alike)):
            assert_close(arrays(gradient_sum(*batch(each, padding=4))), total, 2e-5)


def test_a_mask_drops_each_unit_at_its_rate() -> None:
    # 6 deviations of a mean of n bits at rate p are 6 sqrt(p (1 - p) / n).
    inputs = keras.Input((50,))
    network = keras.Model(inputs, layers.Dropout(0.3)(layers.Dropout(0.3)(inputs)))
    ones, seeds = tf.ones((2000, 50)), row_seeds(KEY, 0, 0, (2000, SEED_WORDS))
    with keyed_layers(network, tf.constant(seeds)):
        kept = network(ones, training=True).numpy() > 0
    # Two calls drop independently: both keep with 0.7 * 0.7.
    rate, spread = 0.49, 6 * np.sqrt(0.49 * 0.51)
    assert abs(kept.mean() - rate) < spread / np.sqrt(kept.size)
    assert np.abs(kept.mean(0) - rate).max() < spread / np.sqrt(2000)
    assert np.abs(kept.mean(1) - rate).max() < spread / np.sqrt(50)
    between = np.corrcoef(kept[:, :20].T)[np.triu_indices(20, 1)]
    assert np.abs(between).max() < 6 / np.sqrt(2000)
    # Nor have rows a mask in common: 50 bits correlate with a deviation of 1/sqrt(50).
    rows = np.corrcoef(kept[:40])[np.triu_indices(40, 1)]
    assert np.abs(rows).max() < 6 / np.sqrt(50)


def test_dropout_is_off_outside_of_steps_and_layers_are_as_they_were() -> None:
    model, data = _trained(_dropped), make_rows(4)
    assert has_dropout(model.network)
    columns, _ = batch(data)
    before = model.outputs(columns)
    model.outputs(batch(_with_seeds(data))[0])
    np.testing.assert_array_equal(model.outputs(columns), before)
    # Keras's own generators were not used, and are again.
    states = [g.state for x in model.network.layers for g in x._seed_generators]
    before = [state.numpy() for state in states]
    model.outputs(batch(_with_seeds(data))[0])
    np.testing.assert_array_equal(before, [state.numpy() for state in states])
    model.network(model.inputs(columns), training=True)
    assert len(states) == 1
    assert (before[0] != states[0].numpy()).any()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: layers.GaussianNoise(0.5), "is a GaussianNoise"),
        (lambda: layers.Dropout(0.5, noise_shape=(1, 13)), "begins with None"),
    ],
)
def test_what_draws_for_the_whole_batch_is_refused(layer: Any, message: str) -> None:
    model = _trained(lambda: _of_numbers(layer()))
    with pytest.raises(InputError, match=message):
        model.outputs(batch(_with_seeds(make_rows(4)))[0])
