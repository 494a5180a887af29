"""One architecture of the list: its columns, network and loss, and what is decided.

An architecture is a function of its inputs:

    @architecture(image=real(8, 8, 1), label=ids(3), loss=SPARSE)
    def convnet(image):
        return layers.Dense(3)(layers.Flatten()(layers.Conv2D(4, 3)(image)))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from accounting.core.plan import POISSON, DpSgdPlan
from pipelines.core.batches.manifest import BatchFile, Column, Manifest
from pipelines.tables.kinds import LABEL
from pipelines.tables.schema import Schema
from tests.trainer.zoo import arrays
from trainer.core.step.noise import SEEDS, row_seeds
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS
from trainer.model.layers import keyed_layers
from trainer.model.losses import loss_by_name, loss_of_keras
from trainer.model.trainable_model import TrainableModel, Views, nested_inputs
from trainer.models import as_functional, check_model, make_trained

#: Rows of a physical batch.
PHYSICAL = 16
#: Column of the weight of each row's loss.

LOGISTIC = keras.losses.BinaryCrossentropy(from_logits=True)
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SQUARES = keras.losses.MeanSquaredError()
#: What Keras computes for the losses that `dpsgd train` takes by name.
_BY_NAME = {
    "binary_crossentropy": LOGISTIC,
    "sparse_categorical_crossentropy": SPARSE,
    "mean_squared_error": SQUARES,
    "huber": keras.losses.Huber(),
}


@dataclasses.dataclass(frozen=True)
class Values:
    """A column of made-up values: its shape in a row, its type, and its draws."""

    shape: tuple[int, ...]
    dtype: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def real(*shape: int) -> Values:
    """Numbers around 0."""
    return Values(shape, "float32", lambda random, size: random.normal(size=size))


def positive(*shape: int) -> Values:
    """Numbers from 0.5 to 2."""
    return Values(
        shape, "float32", lambda random, size: random.uniform(0.5, 2, size=size)
    )


def ids(below: int, *shape: int) -> Values:
    """Integers from 0."""
    return Values(
        shape, "int32", lambda random, size: random.integers(below, size=size)
    )


def cells(schema: Schema) -> dict[str, Values]:
    """The columns of a table as `dpsgd prepare` writes it by a schema."""
    found = {}
    for output in schema.outputs:
        below = schema.label.num_classes if output.role == LABEL else output.size or 2
        made = ids(below) if output.dtype.startswith("int") and below else real()
        found[output.name] = dataclasses.replace(
            made, shape=output.shape, dtype=output.dtype
        )
    return found


def one_hot(classes: int) -> Values:
    """A class as zeros and a one."""
    return Values(
        (classes,),
        "float32",
        lambda random, size: np.eye(classes)[random.integers(classes, size=size[:-1])],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A network and its loss.

    Attributes:
      make: Gives the outputs of the inputs that its parameters name; or, of the
        manifest or of nothing, a model.
      decision: What the check of the model decides: ``ONE_PASS``, ``SINGLE_EXAMPLES``
        or words of the reason for which it is refused.
      columns: Inputs and labels.
      loss: A loss for ``compile``; a name for ``dpsgd train``.
      loss_weights: Factors of the losses of several outputs.
      dataset: The description of the data in the manifest.
    """

    make: Callable[..., Any]
    decision: str
    columns: Mapping[str, Values]
    loss: Any
    loss_weights: Mapping[str, float] | None
    dataset: Mapping[str, Any]

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The manifest of batches of these columns."""
        columns = [
            Column(name=name, dtype=values.dtype, shape=values.shape)
            for name, values in self.columns.items()
        ]
        return Manifest(
            plan=DpSgdPlan(
                sampler=POISSON, num_examples=100, expected_batch_size=8, num_steps=1
            ),
            columns=tuple(columns),
            physical_batch_size=PHYSICAL,
            batches_id="0" * 32,
            files=(
                BatchFile(name="batches-00000000.tfrecord", first_step=0, num_steps=1),
            ),
            dataset=dict(self.dataset),
        )

    def rows(self, num_rows: int, seed: int = 0) -> np.ndarray:
        """Made-up rows, by column."""
        random = np.random.default_rng(seed)
        columns = self.manifest.columns
        rows = np.zeros(num_rows, [(c.name, c.dtype, c.shape) for c in columns])
        for name, values in self.columns.items():
            rows[name] = values.draw(random, rows[name].shape)
        return rows

    def network(self) -> Any:
        """A network with weights near their initial values, none of them 0."""
        keras.utils.set_random_seed(0)
        manifest = self.manifest
        parameters = inspect.signature(self.make).parameters.values()
        names = [one.name for one in parameters if one.default is one.empty]
        inputs = {
            column.name: keras.Input(column.shape, dtype=column.dtype, name=column.name)
            for column in manifest.columns
            if column.name in names
        }
        if inputs:
            network = keras.Model(inputs, self.make(**inputs))
        else:
            network = self.make(*[manifest][: len(names)])
        network, random = as_functional(network, manifest), np.random.default_rng(0)
        for variable in network.trainable_variables:
            variable.assign_add(random.normal(0, 0.1, variable.shape).astype("f4"))
        return network

    def plain(self) -> TrainableModel:
        """The model of one row, before any check."""
        network = self.network()
        if isinstance(self.loss, str):
            loss = loss_by_name(self.loss)
        else:
            loss = loss_of_keras(self.loss, self.loss_weights, network.output)
        columns = self.manifest.columns
        return TrainableModel(
            network=network, description={}, loss=loss, columns=columns
        )

    def trained(self) -> TrainableModel:
        """The model as a step of ``make_private`` and `dpsgd train` trains it."""
        model = self.plain()
        check_model(model, self.manifest)
        return make_trained(model, self.manifest, Views())

    def with_seeds(self, rows: np.ndarray, model: TrainableModel) -> np.ndarray:
        """The rows with the seeds of their dropout, if the model has any."""
        if model.seeds is None:
            return rows
        found = np.zeros(len(rows), [*rows.dtype.descr, (SEEDS, "u4", model.seeds)])
        for name in rows.dtype.names:
            found[name] = rows[name]
        found[SEEDS] = row_seeds(bytes(32), 0, 0, (len(rows), *model.seeds))
        return found

    def gradients(self, network: Any, rows: np.ndarray) -> list[list[np.ndarray]]:
        """Each row's gradient by a tape, and by Keras's own loss with its masks."""
        loss = _BY_NAME[self.loss] if isinstance(self.loss, str) else self.loss
        network.compile(loss=loss, loss_weights=self.loss_weights)
        variables, found = network.trainable_variables, []
        for index in range(len(rows)):
            row = {name: rows[name][[index]] for name in rows.dtype.names}
            with tf.GradientTape() as tape:
                total = _loss_of_row(network, row)
            gradients = tape.gradient(
                total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            found.append(arrays(gradients))
        return found


def _loss_of_row(network: Any, row: Mapping[str, np.ndarray]) -> Any:
    """Keras's loss of the outputs in training, by the row's dropout."""
    inputs = nested_inputs(network, row)
    labels: Any = row["label"]
    if isinstance(network.output, dict):
        labels = {name: row[name] for name in network.output}
    dropped = keyed_layers(network, row[SEEDS]) if SEEDS in row else None
    with dropped or contextlib.nullcontext():
        outputs = network(inputs, training=True)
    return network.compute_loss(inputs, labels, outputs)


#: Name -> architecture, in the order of the modules.
Architectures = dict[str, Architecture]


def registers(into: Architectures) -> Callable[..., Any]:
    """Returns the decorator that adds architectures to a list."""

    def architecture(
        decision: str = ONE_PASS,
        *,
        name: str = "",
        loss: Any = LOGISTIC,
        loss_weights: Mapping[str, float] | None = None,
        schema: Schema | None = None,
        **columns: Values,
    ) -> Callable[[Any], Any]:
        if schema is not None:
            columns |= cells(schema)

        def add(make: Any) -> Any:
            into[name or make.__name__] = Architecture(
                make=make,
                decision=decision,
                columns={"label": ids(2), **columns},
                loss=loss,
                loss_weights=loss_weights,
                dataset={} if schema is None else schema.description,
            )
            return make

        return add

    return architecture
