"""Models: the click model for Criteo-format columns, and models that users bring.

A model maps a dict of columns to outputs: for the default loss one logit per example,
whose binary cross-entropy with the column ``label`` is minimised; see ``losses`` for
others.  Preprocessing is part of the model, so that the exported model takes columns as
they are.

A model of one's own is ``--model module:function``, where ``function(manifest)``
returns such a Keras model, functional or subclassed (then of all columns but
``label``):

    def small(manifest):
        integers = keras.Input((13,), name="integers")
        return keras.Model(integers, keras.layers.Dense(1)(integers))

Formal guarantees:
  - ``check_model`` refuses a model in which the output of one example depends on
    another example, which draws random numbers, or which changes in a forward pass,
    and such a loss; the clipping of per-example gradients would mean nothing for it.
  - Any column value gives a finite logit of the click model with finite weights:
    missing, negative and infinite integers and ids out of range included.

References:
  Chua et al. (2024), arXiv:2411.04205, section 5: embeddings, log of the integers,
  fully connected layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.validation import InputError, check_int
from pipelines.manifest import Manifest
from trainer.losses import (
    BINARY_CROSS_ENTROPY,
    Loss,
    check_shapes,
    loss_by_name,
    loss_of_ones_own,
)
from trainer.settings import LABEL
from trainer.tf_privacy import keras, tf
from trainer.user_code import load_function, one_line_errors

INTEGERS = "integers"
CATEGORIES = "categories"
NUM_INTEGERS = 13
NUM_CATEGORIES = 26

#: Layers whose output for one example depends on the others, or on chance.
_MIXING = ("BatchNormalization", "SyncBatchNormalization", "Normalization")
_RANDOM = ("Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout")

#: Rows of the batch on which ``check_model`` tries a model.
_PROBE_ROWS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """A Keras model, its loss, and what is public about it.

    Attributes:
      network: The functional Keras model, from a dict of columns to outputs.
      description: Name and sizes, for the run record.
      loss: What is minimised.
    """

    network: Any
    description: dict[str, Any]
    loss: Loss = BINARY_CROSS_ENTROPY

    def outputs(self, columns: Mapping[str, Any], *, training: bool = False) -> Any:
        """Returns what the network gives: a tensor (batch, ...), or a dict of them."""
        return self.network(self.inputs(columns), training=training)

    def losses(self, columns: Mapping[str, Any], outputs: Any = None) -> Any:
        """Returns the loss of each example, of shape (batch,).

        Args:
          columns: All columns of some rows.
          outputs: Of the network for these rows; computed if None.
        """
        if outputs is None:
            outputs = self.outputs(columns)
        return self.loss.per_example(self.labels(columns), outputs)

    def labels(self, columns: Mapping[str, Any]) -> Any:
        """Returns what outputs are held against: a column, or a dict of columns."""
        if isinstance(self.network.output, Mapping):
            return {name: columns[name] for name in self.label_names}
        return columns[LABEL]

    def accepts(self, columns: Mapping[str, Any]) -> Any:
        """Returns of which rows the loss takes the labels, bool of shape (batch,)."""
        return self.loss.accepts(self.labels(columns), self._num_classes)

    @property
    def label_names(self) -> list[str]:
        """The columns that outputs are held against."""
        output = self.network.output
        return list(output) if isinstance(output, Mapping) else [LABEL]

    @property
    def allowed_labels(self) -> str:
        """The labels that the loss takes, in words."""
        return self.loss.allowed.format(last=self._num_classes - 1)

    @property
    def _num_classes(self) -> int:
        # Of several outputs or one without axes there are no classes to count.
        shape: Sequence[int] = getattr(self.network.output, "shape", ())
        return shape[-1] if len(shape) > 1 else 1

    def inputs(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns that the network takes."""
        return {name: columns[name] for name in self.network.input_names}

    @property
    def needs_autograph(self) -> bool:
        """Whether layers or loss are not Keras's: they may branch on tensors."""
        layers = self.network._flatten_layers(include_self=False)
        modules = {type(layer).__module__.split(".")[0] for layer in layers}
        if self.loss.ones_own:
            return True
        functional = type(self.network).__module__.split(".")[0] == "tf_keras"
        return not (functional and modules <= {"tf_keras"})

    @property
    def variables(self) -> list[Any]:
        """The trainable variables, in the order that noise and gradients have."""
        return list(self.network.trainable_variables)


#: Brings the logarithms of counts to the size of the other inputs.
_LOG_SCALE = 0.25


def criteo_model(
    manifest: Manifest, *, embedding_dim: int, hidden: Sequence[int]
) -> Any:
    """Returns the click model: embeddings, logarithms, and fully connected layers.

    One table holds the embeddings of all features, each feature in rows of its own:
    one gather instead of 26.

    Raises:
      InputError: batches of other columns, or impossible sizes.
    """
    num_buckets = criteo_num_buckets(manifest)
    check_int("embedding_dim", embedding_dim, at_least=1)
    for size in hidden:
        check_int("hidden", size, at_least=1)
    integers = keras.Input((NUM_INTEGERS,), dtype="float32", name=INTEGERS)
    categories = keras.Input((NUM_CATEGORIES,), dtype="int32", name=CATEGORIES)
    values = keras.layers.Concatenate(name="features")(
        [*_encode_integers(integers), _embed(categories, num_buckets, embedding_dim)]
    )
    for index, size in enumerate(hidden):
        layer = keras.layers.Dense(size, activation="relu", name=f"hidden_{index}")
        values = layer(values)
    # Zero logits at first: the clipped steps are not spent on undoing a random start.
    logit = keras.layers.Dense(1, kernel_initializer="zeros", name="logit")(values)
    return keras.Model({INTEGERS: integers, CATEGORIES: categories}, logit, name="pctr")


def _encode_integers(integers: Any) -> list[Any]:
    """Returns signed log1p of the integers, scaled, and which of them are missing."""
    missing = tf.math.is_nan(integers)
    limit = np.finfo(np.float32).max
    known = tf.clip_by_value(tf.where(missing, 0.0, integers), -limit, limit)
    logarithm = tf.sign(known) * tf.math.log1p(tf.abs(known))
    # A constant scale, no statistic of the data: counts of thousands come out near 2,
    # so that no input dominates the norm that is clipped.
    return [_LOG_SCALE * logarithm, tf.cast(missing, tf.float32)]


def _embed(categories: Any, num_buckets: Sequence[int], dim: int) -> Any:
    last = [count - 1 for count in num_buckets]
    offsets = np.cumsum([0, *num_buckets[:-1]]).tolist()
    ids = tf.minimum(tf.maximum(categories, 0), last) + offsets
    table = keras.layers.Embedding(sum(num_buckets), dim, name="embeddings")
    return keras.layers.Reshape((len(last) * dim,), name="embedded")(table(ids))


def criteo_num_buckets(manifest: Manifest) -> list[int]:
    """Returns the number of buckets of each categorical column.

    Raises:
      InputError: the batches are not of Criteo-format data.
    """
    num_buckets = manifest.dataset.get("num_buckets")
    if (
        manifest.dataset.get("name") != "criteo"
        or not isinstance(num_buckets, list)
        or len(num_buckets) != NUM_CATEGORIES
    ):
        raise InputError(
            "Expected batches of data that `dpsgd prepare --format criteo-tsv` wrote. "
            "For other data give --model module:function."
        )
    for count in num_buckets:
        check_int("num_buckets", count, at_least=1)
    found = {column.name: (column.dtype, column.shape) for column in manifest.columns}
    wanted = {
        LABEL: ("int8", ()),
        INTEGERS: ("float32", (NUM_INTEGERS,)),
        CATEGORIES: ("int32", (NUM_CATEGORIES,)),
    }
    for name, kind in wanted.items():
        if found.get(name) != kind:
            raise InputError(
                f"Expected column {name} of type {kind[0]} and shape {kind[1]}. "
                "Make the batches from what `dpsgd prepare` wrote."
            )
    return num_buckets


def make_loss(name: str) -> Loss:
    """Returns the loss with a Keras name, or the one that ``module:function`` computes.

    Raises:
      InputError: no such loss.
    """
    if ":" in name:
        return loss_of_ones_own(name, load_function(name, "loss"))
    return loss_by_name(name)


def make_model(
    manifest: Manifest,
    *,
    model: str = "criteo",
    embedding_dim: int,
    hidden: Sequence[int],
    loss: Loss = BINARY_CROSS_ENTROPY,
) -> TrainableModel:
    """Returns the model that ``model`` names, checked.

    Args:
      manifest: What the batches hold.
      model: "criteo", or "module:function".
      embedding_dim: Size of an embedding of the click model.
      hidden: Sizes of the hidden layers of the click model.
      loss: What is minimised.

    Raises:
      InputError: no such model, or one that cannot be trained privately.
    """
    description: dict[str, Any] = {"name": model, "loss": loss.name}
    if model == "criteo":
        network = criteo_model(manifest, embedding_dim=embedding_dim, hidden=hidden)
        description |= {"embedding_dim": embedding_dim, "hidden": list(hidden)}
    else:
        network = _call(model, manifest)
    sizes = [int(np.prod(v.shape)) for v in network.trainable_variables]
    description["num_parameters"] = sum(sizes)
    trainable = TrainableModel(network=network, description=description, loss=loss)
    check_model(trainable, manifest)
    return trainable


def _call(spec: str, manifest: Manifest) -> Any:
    """Returns the model that a function of the user's makes, as a functional one."""
    function = load_function(spec)
    with one_line_errors(f"model={spec!r}"):
        network = function(manifest)
        if not isinstance(network, keras.Model):
            raise InputError(f"Expected model={spec!r} to return a tf_keras.Model.")
        return as_functional(network, manifest)


def as_functional(network: Any, manifest: Manifest) -> Any:
    """Returns a model with named inputs: itself, or what takes all but ``label``."""
    if network.inputs is not None:
        return network
    inputs = {
        column.name: keras.Input(column.shape, dtype=column.dtype, name=column.name)
        for column in manifest.columns
        if column.name != LABEL
    }
    return keras.Model(inputs, network(inputs), name=network.name)


def check_model(model: TrainableModel, manifest: Manifest) -> None:
    """Accepts a model whose per-example gradients mean what clipping needs.

    Raises:
      InputError: examples are mixed, chance is used, state changes, the outputs do not
        suit the loss, or an example of zeros has no finite gradient.
    """
    _check_inputs(model, manifest)
    _check_layers(model.network)
    with one_line_errors(f"the model with loss={model.loss.name!r}"):
        _check_behaviour(model, manifest)


def _check_inputs(model: TrainableModel, manifest: Manifest) -> None:
    names = {column.name for column in manifest.columns}
    labels = set(model.label_names)
    for name in model.label_names:
        if name not in names:
            raise InputError(
                f"Expected a column {name!r} among the batches' columns, to hold the "
                "model's output against."
            )
    for name in model.network.input_names:
        if name not in names or name in labels:
            raise InputError(
                f"Expected input {name!r} of the model to be a column of the batches: "
                f"{', '.join(sorted(names - labels))}."
            )
    if not model.variables:
        raise InputError("Expected the model to have trainable variables.")


def _check_layers(network: Any) -> None:
    for layer in network._flatten_layers():
        kinds = {kind.__name__ for kind in type(layer).__mro__}
        if kinds & set(_MIXING):
            raise InputError(
                f"Expected no layer that mixes examples; {layer.name} is a "
                f"{type(layer).__name__}. Use LayerNormalization, or none."
            )
        if any(name in kind for kind in kinds for name in _RANDOM):
            raise InputError(
                f"Expected no layer that draws random numbers; {layer.name} is a "
                f"{type(layer).__name__}. Remove it: the noise regularises."
            )
    if network.losses:
        raise InputError(
            "Expected no regularisation losses in the model. Remove regularisers and "
            "add_loss; they are not part of the clipped gradient."
        )


def _probe_columns(manifest: Manifest, *, seed: int) -> dict[str, Any]:
    # Made-up values: small non-negative integers are valid for ids and numbers alike.
    random = np.random.default_rng(seed)
    return {
        column.name: tf.constant(
            random.integers(0, 2, (_PROBE_ROWS, *column.shape)).astype(column.dtype)
        )
        for column in manifest.columns
    }


@contextlib.contextmanager
def _random_weights(model: TrainableModel) -> Iterator[None]:
    """Weights that hide nothing: behind a last layer of zeros all models look alike."""
    saved = [variable.numpy() for variable in model.variables]
    random = np.random.default_rng(0)
    for variable, value in zip(model.variables, saved, strict=True):
        variable.assign(random.normal(0, 0.3, value.shape).astype(value.dtype))
    try:
        yield
    finally:
        for variable, value in zip(model.variables, saved, strict=True):
            variable.assign(value)


def _check_behaviour(model: TrainableModel, manifest: Manifest) -> None:
    columns = _probe_columns(manifest, seed=0)
    others = _probe_columns(manifest, seed=1)
    mixed = {
        name: tf.concat([columns[name][:1], others[name][1:]], 0) for name in columns
    }
    before = [v.numpy() for v in model.network.non_trainable_variables]
    with _random_weights(model):
        found = [_behaviour(model, probe) for probe in (columns, mixed, columns)]
    if not all(map(_equal, found[0], found[2])):
        raise InputError(
            "Expected the model and its loss to give the same for the same examples "
            "twice. Remove what draws random numbers or keeps state."
        )
    if not all(_close(a[0], b[0]) for a, b in zip(found[0], found[1], strict=True)):
        raise InputError(
            "Expected the output and the loss of one example not to depend on the "
            "others. Remove what mixes examples, such as a mean over the batch."
        )
    after = [v.numpy() for v in model.network.non_trainable_variables]
    if not all(map(np.array_equal, before, after)):
        raise InputError("Expected a forward pass to change no variable of the model.")
    _check_zero_row(model, columns)


def _behaviour(model: TrainableModel, columns: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns outputs and losses of some rows, of the shapes that they should have."""
    outputs = model.outputs(columns, training=True)
    found = tf.nest.flatten(outputs)
    if isinstance(outputs, (list, tuple)):
        raise InputError(
            "Expected several outputs of the model as a dict, whose names are those of "
            "the columns that they are held against."
        )
    if any(value.shape[:1] != (_PROBE_ROWS,) for value in found):
        raise InputError("Expected the model to give one output per example.")
    if not model.loss.ones_own:
        check_shapes(model.loss, model.labels(columns), outputs)
    of_rows = model.losses(columns, outputs)
    if tuple(of_rows.shape) != (_PROBE_ROWS,):
        raise InputError(
            f"Expected loss={model.loss.name!r} to give one number per example: shape "
            f"(batch,), not {tuple(of_rows.shape)} for a batch of {_PROBE_ROWS}."
        )
    return [np.asarray(value) for value in (*found, of_rows)]


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left, right, equal_nan=True)


def _close(left: np.ndarray, right: np.ndarray) -> bool:
    return np.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


def _check_zero_row(model: TrainableModel, columns: Mapping[str, Any]) -> None:
    # Rows that may not contribute are replaced by zeros; 0 times their gradient must
    # be 0.
    zeros = {name: tf.zeros_like(value) for name, value in columns.items()}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.losses(zeros))
    for gradient in tape.gradient(loss, model.variables):
        if (
            gradient is not None
            and not np.isfinite(tf.convert_to_tensor(gradient)).all()
        ):
            raise InputError(
                "Expected a finite gradient of the model for an example of zeros, "
                "which stands for a padded row."
            )


def identity(model: TrainableModel) -> str:
    """Returns a text that differs between models of other layers or other weights.

    The code of a layer of one's own is not looked at.
    """
    shapes = [(v.dtype.name, tuple(v.shape)) for v in model.network.variables]
    try:
        config = model.network.to_json()
    except (NotImplementedError, TypeError, ValueError):  # without a config
        config = type(model.network).__qualname__
    weights = hashlib.sha256()
    for variable in model.network.variables:
        weights.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return f"{model.description} {shapes} {config} {weights.hexdigest()}"
