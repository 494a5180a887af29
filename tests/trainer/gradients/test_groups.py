"""Groups of rows: views of an example, or the rows of a user.

The oracle is a tape per example over the mean loss of its rows, each computed alone by
the plain model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column
from tests.trainer.bounded import bam_sum
from tests.trainer.conftest import COLUMNS, make_rows
from tests.trainer.gradients.test_clipping import CLIP
from tests.trainer.zoo import (
    arrays,
    assert_close,
    both_inputs,
    clipped_total,
    dense_per_position,
    layer_normalization,
    make_model,
    norm_of,
)
from trainer.core.step.noise import SEEDS, row_seeds
from trainer.core.tf_compat import keras, tf
from trainer.gradients import paths
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, clipped_sum
from trainer.model.layers import SEED_WORDS
from trainer.model.trainable_model import (
    GroupedModel,
    TrainableModel,
    Views,
    trained_model,
)
from trainer.run import hooks
from trainer.settings.train_settings import TrainSettings

NUM, SIZE = 5, 3


MODELS = (both_inputs, dense_per_position, layer_normalization)
INPUTS = ("integers", "categories")


def grouped(make: Callable[[], Any]) -> GroupedModel:
    """A model of views with one label."""
    # Of other weights a gradient may be rounding alone, which has no direction.
    plain = dataclasses.replace(make_model(make, seed=1), columns=COLUMNS)
    columns = [
        dataclasses.replace(c, shape=(SIZE, *c.shape)) if c.name in INPUTS else c
        for c in COLUMNS
    ]
    return GroupedModel(
        network=plain.network,
        description=plain.description,
        columns=tuple(columns),
        of_row=plain,
        size=SIZE,
        by_row=frozenset(INPUTS),
    )


def data_of(model: GroupedModel, padding: int = 2) -> tuple[dict[str, Any], Any]:
    """Groups, and padding after them that holds NaN."""
    rows = make_rows((NUM + padding) * SIZE, seed=3)
    rows["integers"] = np.nan_to_num(rows["integers"])
    by_group = rows.reshape(NUM + padding, SIZE)
    columns = {name: by_group[name].copy() for name in rows.dtype.names}
    columns["label"] = columns["label"][:, 0]
    columns["integers"][NUM:] = np.nan
    weight = np.repeat([1.0, 0.0], [NUM, padding]).astype("f4")
    return {k: tf.constant(v) for k, v in columns.items()}, tf.constant(weight)


def mean_loss(model: GroupedModel, columns: dict[str, Any], group: int) -> Any:
    """The mean over the rows of a group, each computed alone."""
    total = 0.0
    for row in range(SIZE):
        one = {
            name: (value[group, row] if name in model.by_row else value[group])[None]
            for name, value in columns.items()
        }
        total += model.of_row.losses(one)[0]
    return total / SIZE


def gradients_of(model: GroupedModel, columns: dict[str, Any]) -> list[list[Any]]:
    found = []
    for group in range(NUM):
        with tf.GradientTape() as tape:
            loss = mean_loss(model, columns, group)
        found.append(arrays(tape.gradient(loss, model.variables)))
    return found


@pytest.mark.parametrize("make", MODELS)
def test_the_mean_of_a_group_is_clipped_as_a_whole_on_every_path(
    make: Callable[[], Any],
) -> None:
    """Seen to fail where each row of a group was clipped by itself."""
    model = grouped(make)
    columns, weight = data_of(model)
    assert paths.choose_path(model) == ONE_PASS
    gradients = gradients_of(model, columns)
    # Some groups are clipped and some are not: a clip hides errors of scale.
    clip = float(np.median([norm_of(of_group) for of_group in gradients]))
    wanted = clipped_total(gradients, clip, clip / 3)
    for path in (ONE_PASS, SINGLE_EXAMPLES):
        gradient_sum = paths.clipped_sum(
            model, l2_norm_clip=clip, linf_norm_clip=clip / 3, path=path
        )
        found = tf.function(gradient_sum, autograph=False)(columns, weight)
        assert_close(arrays(found), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("path", [ONE_PASS, SINGLE_EXAMPLES])
def test_bam_moves_the_weights_once_for_all_views(path: str) -> None:
    model = grouped(dense_per_position if path == ONE_PASS else both_inputs)
    columns, weight = data_of(model)
    radius, before = 0.5, [v.numpy() for v in model.variables]
    uphill = []
    for group, here in enumerate(gradients_of(model, columns)):
        for v, old, g in zip(model.variables, before, here, strict=True):
            v.assign(old + radius / norm_of(here) * g)
        with tf.GradientTape() as tape:
            loss = mean_loss(model, columns, group)
        uphill.append(arrays(tape.gradient(loss, model.variables)))
        for v, old in zip(model.variables, before, strict=True):
            v.assign(old)
    gradient_sum = bam_sum(model, l2_norm_clip=CLIP, radius=radius, path=path)
    found = tf.function(gradient_sum, autograph=False)(columns, weight)
    assert_close(arrays(found), clipped_total(uphill, CLIP), 1e-4)


def test_a_clip_holds_where_views_cancel() -> None:
    """Opposite views of time stamps: the norm is far below that of each term."""
    x = keras.Input((2,), name="x")
    model = make_model(lambda: keras.Model(x, keras.layers.Dense(1)(x)))
    loss = dataclasses.replace(
        model.loss,
        per_example=lambda labels, z: tf.cast(labels, tf.float32) * z[:, 0],
        accepts=lambda labels, _: tf.ones_like(labels, tf.bool),
    )
    plain = dataclasses.replace(model, loss=loss)
    both = GroupedModel(
        network=model.network, description={}, loss=loss, of_row=plain, size=2,
        by_row=frozenset({"x", "label"}),
        columns=(
            dataclasses.replace(COLUMNS[1], name="x", shape=(2, 2)),
            dataclasses.replace(COLUMNS[0], shape=(2,)),
        ),
    )  # fmt: skip
    random = np.random.default_rng(0)
    stamps = (1.7e9 + random.normal(0, 300, (6, 2, 2))).astype("f4")
    columns = {"x": stamps, "label": np.tile(np.array([[1, -1]], "i1"), (6, 1))}
    for path in (ONE_PASS, SINGLE_EXAMPLES):
        gradient_sum = paths.clipped_sum(both, l2_norm_clip=1.0, path=path)
        for row in range(6):
            one = {k: tf.constant(v[[row]]) for k, v in columns.items()}
            found = arrays(gradient_sum(one, tf.ones(1)))
            assert norm_of(found) <= 1 + 1e-4


# -- views of a row, and functions of users that make them -----------------------------


SIDE, EXAMPLES = 6, 4
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


def _batch(seed: int = 0, num: int = EXAMPLES) -> dict[str, Any]:
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
    assert first.shape == (EXAMPLES, SIZE, *IMAGE.shape)
    np.testing.assert_array_equal(first, prepare(_batch())["image"])
    # Every view by its own seed.
    assert len({view.tobytes() for view in first.reshape(EXAMPLES * SIZE, -1)}) > 9
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
