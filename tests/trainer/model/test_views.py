"""Views of a row, and functions of users that make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column
from trainer.core.step.noise import SEEDS, row_seeds
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import clipped_sum
from trainer.model.layers import SEED_WORDS
from trainer.model.trainable_model import TrainableModel, Views, trained_model
from trainer.run import hooks
from trainer.settings.train_settings import TrainSettings

SIDE, NUM, SIZE = 6, 4, 3
LABEL = Column(name="label", dtype="int8")
IMAGE = Column(name="image", dtype="float32", shape=(SIDE, SIDE, 1))
SETTINGS = TrainSettings(noise_multiplier=0.0, l2_norm_clip=0.3)

layers = keras.layers


@pytest.fixture(scope="module")
def model() -> TrainableModel:
    keras.utils.set_random_seed(0)
    image = keras.Input((SIDE, SIDE, 1), name="image")
    hidden = layers.Dense(4, activation="tanh")(layers.Flatten()(image))
    network = keras.Model(image, layers.Dense(1)(hidden))
    return TrainableModel(network=network, description={}, columns=(LABEL, IMAGE))


def flip_and_shift(columns: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    image = tf.image.stateless_random_flip_left_right(columns["image"], seed)
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    return {"image": tf.image.stateless_random_crop(padded, image.shape, seed)}


def _batch(seed: int = 0, num: int = NUM) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "label": tf.constant(random.integers(0, 2, num).astype("i1")),
        "image": tf.constant(random.normal(size=(num, *IMAGE.shape)).astype("f4")),
        SEEDS: tf.constant(row_seeds(bytes(32), 0, 0, (num, SIZE, SEED_WORDS))),
    }


def test_a_view_is_a_function_of_its_example_and_its_seed(
    model: TrainableModel,
) -> None:
    views = Views(number=SIZE, augment=flip_and_shift, name="m:augment")
    trained = trained_model(model, views)
    assert trained.prepare is not None
    prepare = tf.function(trained.prepare)
    first = prepare(_batch())["image"].numpy()
    assert first.shape == (NUM, SIZE, *IMAGE.shape)
    np.testing.assert_array_equal(first, prepare(_batch())["image"])
    # Every view by its own seed.
    assert len({view.tobytes() for view in first.reshape(NUM * SIZE, -1)}) > 9
    # Other examples beside it, at other places, change no view.
    columns, others = _batch(), _batch(1)
    order = [2, 0, 3, 1]
    mixed = {
        name: tf.concat([tf.gather(value, order)[:2], others[name][2:]], 0)
        for name, value in columns.items()
    }
    np.testing.assert_array_equal(prepare(mixed)["image"][:2], first[order[:2]])


def test_the_sum_is_that_of_the_views(model: TrainableModel) -> None:
    views = Views(number=SIZE, augment=flip_and_shift, name="m:augment")
    trained = trained_model(model, views)
    weight = tf.constant([1.0, 1, 1, 0])
    found = hooks.gradient_sum(trained, SETTINGS)(_batch(), weight)
    # Of the same views, made before.
    assert trained.prepare is not None
    prepared = trained.prepare(_batch())
    wanted = clipped_sum(trained, l2_norm_clip=0.3)(prepared, weight)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def _stateful(columns: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    if tf.reduce_sum(seed) > 0:  # AutoGraph makes a branch of it
        return {"image": columns["image"] + tf.random.uniform(IMAGE.shape)}
    return dict(columns)


def _python(columns: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    def twice(value: Any) -> Any:
        return 2 * value

    return {"image": tf.numpy_function(twice, [columns["image"]], tf.float32)}


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (_stateful, "RandomUniform.*draws random numbers"),
        (_python, "PyFunc.*calls Python"),
        (lambda columns, seed: columns["image"], "dict of the inputs"),
        (lambda columns, seed: {"x": columns["image"]}, "dict of the inputs"),
        (lambda columns, seed: {"image": columns["image"][1:]}, r"\(5, 6, 1\)"),
        (lambda columns: columns, "it raised TypeError"),
        (layers.RandomFlip("horizontal"), "it raised"),
    ],
)
def test_what_is_no_view_is_refused(
    augment: Any, message: str, model: TrainableModel
) -> None:
    views = Views(number=2, augment=augment, name="m:augment")
    with pytest.raises(InputError, match=message) as caught:
        trained_model(model, views)
    assert "\n" not in str(caught.value)
    assert "m:augment" in str(caught.value)
