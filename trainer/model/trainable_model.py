"""A Keras model with its loss, the input of every gradient computation; and views.

``GroupedModel`` takes groups of rows: the loss of a group is the mean loss of its rows.
A group is the views of one example (augmentation multiplicity).  The network computes
all rows of all groups at once.  Gradients are summed over the rows of a group before
they are clipped.

Views are K versions of an example; the gradient of their mean loss is clipped.  They
are made in each step by a random augmentation, ``--augment module:name``:

    def flip(columns, seed):           # of one example, without the batch axis
        return {"image": tf.image.stateless_random_flip_left_right(
            columns["image"], seed)}

The seed is an int64 tensor of two words.  It is a function of the secret key of the
run, the step, the example's place in the batch, and the view.

An example has one gradient, the mean over its K views, which changes the sum by at most
the clip norm: epsilon is that without views.  Seeds belong to places in the batch, and
without one example others may move to other places.  This does not matter: the seeds of
all places are secret, independent and identically distributed, hence so are those of
the examples, whatever their places.  Given the seeds, a view is a function of its
example alone.

Formal guarantees:
  - The loss of a group is a function of its own rows.
  - A view is a function of its example and its seed: the augmentation is computed for
    one view at a time, and one with a random state of its own is refused.
  - Evaluation, export and prediction see the example without augmentation.

Public: sizes, names and numbers.  Sensitive: everything else.

References:
  De et al. (2022), arXiv:2204.13650, Section 3.2 ("augmentation multiplicity"); Sander,
  Stock and Sablayrolles (2023), arXiv:2210.03403, for views.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column
from trainer.core.step.noise import SEEDS
from trainer.core.step.pure_graph import check_pure
from trainer.core.tf_compat import raw_variable, tf
from trainer.model.layers import (
    SEED_WORDS,
    has_dropout,
    keyed_layers,
    plain_layers,
    still_layers,
)
from trainer.model.losses import BINARY_CROSS_ENTROPY, Loss
from trainer.model.metrics import LABEL
from trainer.model.user_code import check_views, load_function, one_line_errors

Kept = TypeVar("Kept")


def named_inputs(network: Any) -> dict[str, Any]:
    """Returns the inputs of a functional model by the names of their columns.

    Keras calls an input of a dict by its key, and any other by the name of its tensor.
    """
    if isinstance(network.input, Mapping):
        return dict(network.input)
    return {value.name: value for value in network.inputs}


def nested_inputs(network: Any, columns: Mapping[str, Any]) -> Any:
    """Returns the columns that a network takes, nested as it takes them.

    Args:
      network: A functional Keras model.
      columns: Name -> (batch, ...); others than the network's inputs are ignored.
    """
    names = {id(value): name for name, value in named_inputs(network).items()}
    return tf.nest.map_structure(lambda v: columns[names[id(v)]], network.input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """A Keras model, its loss and its public description.

    Attributes:
      network: Functional Keras model, from a dict of columns to outputs.
      description: Name and sizes, for the run record.
      loss: The minimised loss.
      columns: Columns that the losses take; empty for the network's inputs and an int8
        label.
      seeds: Shape of one example's seeds, a further column of a batch; None if only
        the noise of a step is random.
      prepare: Maps the columns of a batch to those that the losses take; None for the
        same columns.
    """

    network: Any
    description: dict[str, Any]
    loss: Loss = BINARY_CROSS_ENTROPY
    columns: tuple[Column, ...] = ()
    seeds: tuple[int, ...] | None = None
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        # Keras creates the weights of an activation that is a layer in its first call.
        if not all(layer.built for layer in self.network._flatten_layers()):
            specs = tf.nest.map_structure(_spec_of, self.network.input)
            tf.function(self.network, autograph=False).get_concrete_function(specs)

    @property
    def column_specs(self) -> dict[str, Any]:
        """Shapes and types of the columns of a batch of any size."""
        columns = self.columns or self._columns_of_network
        return {
            column.name: tf.TensorSpec((None, *column.shape), column.dtype)
            for column in columns
        }

    @property
    def _columns_of_network(self) -> tuple[Column, ...]:
        found = [
            Column(name=name, dtype=value.dtype, shape=tuple(value.shape[1:]))
            for name, value in named_inputs(self.network).items()
        ]
        labels = [Column(name=name, dtype="int8") for name in self.label_names]
        return (*found, *labels)

    def outputs(self, columns: Mapping[str, Any], *, training: bool = False) -> Any:
        """Returns the outputs: a tensor (batch, ...), or a dict of tensors.

        Args:
          columns: Name -> (batch, ...).  With seeds among them, dropout is on.
          training: Keras's argument ``training`` of the layers, if there are no seeds;
            dropout is off.
        """
        if SEEDS in columns:
            with keyed_layers(self.network, columns[SEEDS]):
                return self.network(self.inputs(columns), training=True)
        with still_layers(self.network):
            return self.network(self.inputs(columns), training=training)

    def unrolled(self) -> contextlib.AbstractContextManager[list[int]]:
        """Returns a context in which gradients per example support every layer.

        It yields a list, to which each recurrent layer appends its time steps.
        """
        return plain_layers(self.network)

    def columns_of(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of the columns that the losses take."""
        return {name: columns[name] for name in self.column_specs if name in columns}

    def losses(self, columns: Mapping[str, Any], outputs: Any = None) -> Any:
        """Returns the loss of each example, of shape (batch,).

        Args:
          columns: All columns of the rows, name -> (batch, ...).
          outputs: Outputs of the network for these rows; computed if None.
        """
        if outputs is None:
            outputs = self.outputs(columns)
        return self.loss.per_example(self.labels(columns), outputs)

    def labels(self, columns: Mapping[str, Any]) -> Any:
        """Returns the labels: a column, or a dict of columns for several outputs."""
        if isinstance(self.network.output, Mapping):
            return {name: columns[name] for name in self.label_names}
        return columns[LABEL]

    def accepts(self, columns: Mapping[str, Any]) -> Any:
        """Returns whether the loss takes the label of each row, bool (batch,)."""
        return self.loss.accepts(self.labels(columns), self._num_classes)

    @property
    def label_names(self) -> list[str]:
        """Names of the label columns."""
        output = self.network.output
        return list(output) if isinstance(output, Mapping) else [LABEL]

    @property
    def input_names(self) -> list[str]:
        """Names of the columns that the network takes."""
        return list(named_inputs(self.network))

    @property
    def allowed_labels(self) -> str:
        """The labels that the loss takes, in words."""
        classes = self._num_classes
        last = classes - 1 if isinstance(classes, int) else "the last class"
        return self.loss.allowed.format(last=last)

    @property
    def _num_classes(self) -> Any:
        """Length of the last axis, 1 without any; a dict for several outputs."""
        return tf.nest.map_structure(
            lambda value: value.shape[-1] if len(value.shape) > 1 else 1,
            self.network.output,
        )

    def inputs(self, columns: Mapping[str, Any]) -> Any:
        """Returns the columns that the network takes, nested as it takes them."""
        return nested_inputs(self.network, columns)

    @property
    def variables(self) -> list[Any]:
        """The trainable ``tf.Variable``s, in the order of gradients and noise."""
        return [raw_variable(variable) for variable in self.optimized]

    def kept(self, make: Callable[[TrainableModel], Kept]) -> Kept:
        """Returns ``make(self)``, which is kept while the variables are the same.

        Args:
          make: Function or class of a module.
        """
        kept = vars(self).setdefault("_kept", {})  # within the model, and gone with it
        before, found = kept.get(make, (None, None))
        variables = self.variables
        if before is None or [*map(id, before)] != [*map(id, variables)]:
            found = make(self)
            kept[make] = variables, found
        return found

    def described(self, more: Mapping[str, Any]) -> Self:
        """Returns the same model with more in its description.

        What is kept of the one is kept of the other: a step computes by the graph that
        was checked, which is traced once.
        """
        description = {**self.description, **more}
        found = dataclasses.replace(self, description=description)
        vars(found)["_kept"] = vars(self).setdefault("_kept", {})
        return found

    @property
    def optimized(self) -> list[Any]:
        """The same variables as an optimizer takes them, which knows constraints."""
        return list(self.network.trainable_variables)


def _spec_of(value: Any) -> Any:
    """Returns the shape and type of an input of a network, for any number of rows."""
    return tf.TensorSpec((None, *value.shape[1:]), value.dtype, name=value.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedModel(TrainableModel):
    """A model of groups of rows.

    Attributes:
      of_row: The model of one row.
      size: Rows of a group.
      by_row: Columns (batch, size, ...) with one value per row; the rows of a group
        share the values of all other columns.
    """

    of_row: TrainableModel
    size: int
    by_row: frozenset[str]

    def outputs(self, columns: Mapping[str, Any], *, training: bool = False) -> Any:
        """Returns the outputs for all rows; see `TrainableModel.outputs`."""
        return self.of_row.outputs(self._rows(columns), training=training)

    def losses(self, columns: Mapping[str, Any], outputs: Any = None) -> Any:
        """Returns the mean loss of each group, of shape (batch,).

        Args:
          columns: All columns of the groups.
          outputs: Outputs of the network for their rows; computed if None.
        """
        losses = self.of_row.losses(self._rows(columns), outputs)
        return tf.reduce_sum(tf.reshape(losses, (-1, self.size)), 1) / self.size

    def accepts(self, columns: Mapping[str, Any]) -> Any:
        """Returns whether the loss takes all labels of a group, (batch,)."""
        accepted = self.of_row.accepts(self._rows(columns))
        return tf.reduce_all(tf.reshape(accepted, (-1, self.size)), 1)

    def _rows(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns of all rows, (batch * size, ...)."""
        rows = {}
        for name, value in columns.items():
            if name not in self.by_row:
                value = tf.expand_dims(value, 1)
                value = tf.tile(value, [1, self.size] + [1] * (len(value.shape) - 2))
            rows[name] = tf.reshape(value, (-1, *value.shape[2:]))
        return rows


#: (columns of one example, seed) -> the columns that a view changes.
Augment = Callable[[Mapping[str, Any], Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """The views of an example.

    Attributes:
      number: K, at least 1.
      augment: Function, as above; None for one view.
      name: Name of ``augment`` for the run record; None without it.
    """

    number: int = 1
    augment: Any = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_views(self.number, self.augment)

    def describe(self) -> dict[str, Any]:
        """Returns the entries of the run record; none for one unchanged view."""
        if self.number == 1 and self.augment is None:
            return {}
        return {"views": self.number, "augment": self.name}


def load_views(number: int, augment: str | None) -> Views:
    """Returns how views of an example are made.

    Args:
      number: Number of views.
      augment: The augmentation as "module:name"; None for none.

    Raises:
      InputError: there is no such function.
    """
    found = load_function(augment, "augment") if augment is not None else None
    return Views(number=number, augment=found, name=augment)


def trained_model(model: TrainableModel, views: Views) -> TrainableModel:
    """Returns the model that a step trains: over views, with dropout.

    Args:
      model: Model of one view, which ``check_model`` accepted.
      views: Views of an example.

    Raises:
      InputError: the augmentation has a random state of its own, or does not return a
        view.
    """
    draws = has_dropout(model.network)
    seeds = (Column(name=SEEDS, dtype="uint32", shape=(SEED_WORDS,)),) if draws else ()
    of_row = dataclasses.replace(model, columns=(*model.columns, *seeds))
    if not views.describe():
        return dataclasses.replace(of_row, seeds=(SEED_WORDS,)) if draws else model
    augment = _checked(model, views)
    by_view = frozenset((*model.input_names, *(column.name for column in seeds)))
    return GroupedModel(
        network=model.network,
        description={**model.description, **views.describe()},
        loss=model.loss,
        columns=tuple(
            dataclasses.replace(column, shape=(views.number, *column.shape))
            if column.name in by_view
            else column
            for column in of_row.columns
        ),
        seeds=(views.number, SEED_WORDS),
        prepare=_preparation(model, augment, views.number, draws),
        of_row=of_row,
        size=views.number,
        by_row=by_view,
    )


# -- augmentation ------------------------------------------------------------------


def _checked(model: TrainableModel, views: Views) -> Augment:
    """Returns the augmentation as a function, which depends only on its arguments."""
    what, function = f"augment={views.name!r}", tf.function(views.augment)
    specs = {name: model.column_specs[name] for name in model.input_names}
    one = {n: tf.TensorSpec(s.shape[1:], s.dtype) for n, s in specs.items()}
    with one_line_errors(what):
        traced = function.get_concrete_function(one, tf.TensorSpec((2,), tf.int64))
    check_pure(traced.graph, what)
    _check_view(traced.structured_outputs, one, what)
    return traced


def _check_view(outputs: Any, inputs: Mapping[str, Any], what: str) -> None:
    if not isinstance(outputs, Mapping) or not set(outputs) <= set(inputs):
        raise InputError(
            f"Expected {what} to return a dict of the inputs that it changes: "
            f"{', '.join(inputs)}."
        )
    for name, value in outputs.items():
        wanted = inputs[name]
        if (str(value.shape), value.dtype) != (str(wanted.shape), wanted.dtype):
            raise InputError(
                f"Expected {what} to give {name} of shape {wanted.shape} and type "
                f"{wanted.dtype.name}, as the model takes it; it gives {value.shape}, "
                f"{value.dtype.name}. End in tf.ensure_shape where it is right."
            )


def _preparation(
    model: TrainableModel, augment: Augment, number: int, draws: bool
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns the function that maps the columns of a batch to those of its views."""

    def prepare(columns: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {name: columns[name] for name in model.input_names}
        seeds = columns[SEEDS]
        num_rows = seeds.shape[0]

        def view(place: Any) -> dict[str, Any]:
            row = {name: value[place // number] for name, value in inputs.items()}
            seed = seeds[place // number, place % number, :2]
            changed = augment(row, tf.cast(seed, tf.int64))
            return {
                name: tf.ensure_shape(changed.get(name, value), value.shape)
                for name, value in row.items()
            }

        # One view at a time, so that no view affects another.
        views = tf.map_fn(
            view,
            tf.range(num_rows * number),
            fn_output_signature={
                name: tf.TensorSpec(value.shape[1:], value.dtype)
                for name, value in inputs.items()
            },
        )
        shaped = {
            name: tf.reshape(value, (num_rows, number, *value.shape[1:]))
            for name, value in views.items()
        }
        kept = {n: v for n, v in columns.items() if draws or n != SEEDS}
        return {**kept, **shaped}

    return prepare
