"""Views: K versions of an example; the gradient of their mean loss is clipped.

Views are columns (K, ...) of the batches, or a random augmentation makes them in each
step, ``--augment module:name``:

    def flip(columns, seed):           # of one example, without the batch axis
        return {"image": tf.image.stateless_random_flip_left_right(
            columns["image"], seed)}

    flip = keras.Sequential([keras.layers.RandomFlip("horizontal")])     # or layers

The seed is an int64 tensor of two words.  It is a function of the secret key of the
run, the step, the example's place in the batch, and the view.

An example has one gradient, the mean over its K views, which changes the sum by at most
the clip norm: epsilon is that without views.  Seeds belong to places in the batch, and
without one example others may move to other places.  This does not matter: the seeds of
all places are secret, independent and identically distributed, hence so are those of
the examples, whatever their places.  Given the seeds, a view is a function of its
example alone.

Formal guarantees:
  - A view is a function of its example and its seed: the augmentation is computed for
    one view at a time, and one with a random state of its own is refused.
  - Evaluation, export and prediction see one view: the first of columns (K, ...), or
    the example without augmentation.

Public: names and numbers.  Sensitive: columns, seeds and views.

References:
  De et al. (2022), arXiv:2204.13650, Section 3.2 ("augmentation multiplicity").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from pipelines.core.batches.columns import Column
from trainer.core.step.noise import SEEDS
from trainer.core.step.pure_graph import check_pure
from trainer.core.tf_compat import keras, tf
from trainer.model.layers import SEED_WORDS, has_dropout, seeded_layers
from trainer.model.trainable_model import GroupedModel, TrainableModel, named_inputs
from trainer.model.user_code import load_function, one_line_errors

#: (columns of one example, seed) -> the columns that a view changes.
Augment = Callable[[Mapping[str, Any], Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """The views of an example.

    Attributes:
      number: K, at least 1.
      augment: Function or Keras layers, as above; None for columns, or one view.
      name: Name of ``augment`` for the run record; None without it.
    """

    number: int = 1
    augment: Any = None
    name: str | None = None

    @property
    def columns(self) -> int:
        """Number of views in the columns of the batches; 1 without an axis of views."""
        return 1 if self.augment is not None else self.number

    def describe(self) -> dict[str, Any]:
        """Returns the entries of the run record; none for one unchanged view."""
        if self.number == 1 and self.augment is None:
            return {}
        return {"views": self.number, "augment": self.name}


ONE_VIEW = Views()


def load_views(number: int, augment: str | None) -> Views:
    """Returns ``number`` views; ``augment`` is "module:name", as for `load_function`.

    Raises:
      InputError: no such function or layers.
    """
    found = load_function(augment, "augment") if augment is not None else None
    return Views(number=number, augment=found, name=augment)


def of_one_view(
    columns: Sequence[Column], network: Any, views: Views
) -> tuple[Column, ...]:
    """Returns the columns of one view.

    Args:
      columns: Columns of the batches.
      network: Functional Keras model of one view.
      views: Views of an example.

    Raises:
      InputError: the columns should hold views, and none does.
    """
    by_view = _view_columns(columns, network, views)
    if views.columns > 1 and not by_view:
        shapes = ", ".join(
            f"{name} {(views.number, *shape)}"
            for name, shape in _input_shapes(network).items()
        )
        raise InputError(
            f"Expected views={views.number} of an example in the batches: a column "
            f"such as {shapes}, for a model of one view. Give --augment "
            "module:function to make views of one, or write the views into a column."
        )
    return tuple(
        dataclasses.replace(column, shape=column.shape[1:])
        if column.name in by_view
        else column
        for column in columns
    )


def first_view(columns: Mapping[str, Any], model: TrainableModel) -> dict[str, Any]:
    """Returns the columns of the first view.

    Args:
      columns: Name -> (rows, ...), with or without an axis of views.
      model: Model of one view.
    """
    ranks = {name: len(spec.shape) for name, spec in model.column_specs.items()}
    return {
        name: value[:, 0] if len(value.shape) > ranks[name] else value
        for name, value in columns.items()
        if name in ranks
    }


def trained_model(
    model: TrainableModel, columns: Sequence[Column], views: Views
) -> TrainableModel:
    """Returns the model that a step trains: over views, with dropout.

    Other arguments as for `of_one_view`.

    Args:
      model: Model of one view, which ``check_model`` accepted.

    Raises:
      InputError: the augmentation has a random state of its own, or does not return a
        view.
    """
    draws = has_dropout(model.network)
    seeds = (Column(name=SEEDS, dtype="uint32", shape=(SEED_WORDS,)),) if draws else ()
    of_row = dataclasses.replace(model, columns=(*model.columns, *seeds))
    if not views.describe():
        return dataclasses.replace(of_row, seeds=(SEED_WORDS,)) if draws else model
    augment = None
    if views.augment is not None:
        augment = _checked(model, views)
    by_view = _view_columns(columns, model.network, views)
    if augment is not None:
        by_view = frozenset(model.input_names)
    by_view |= {column.name for column in seeds}
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
        seeds=(views.number, SEED_WORDS) if draws or augment else None,
        prepare=_preparation(model, augment, views.number, draws) if augment else None,
        of_row=of_row,
        size=views.number,
        by_row=by_view,
    )


def _input_shapes(network: Any) -> dict[str, tuple[int | None, ...]]:
    return {
        name: tuple(value.shape[1:]) for name, value in named_inputs(network).items()
    }


def _view_columns(
    columns: Sequence[Column], network: Any, views: Views
) -> frozenset[str]:
    """Returns the names of the columns of the batches with an axis of views."""
    if views.columns == 1:
        return frozenset()
    shapes = _input_shapes(network)
    return frozenset(
        column.name
        for column in columns
        if column.name in shapes
        and column.shape == (views.number, *shapes[column.name])
    )


# -- augmentation ------------------------------------------------------------------


def _checked(model: TrainableModel, views: Views) -> Augment:
    """Returns the augmentation as a function, which depends only on its arguments."""
    what, augment = f"augment={views.name!r}", views.augment
    is_layer = isinstance(augment, keras.layers.Layer)
    function = tf.function(_of_layers(augment, model, what) if is_layer else augment)
    specs = {name: model.column_specs[name] for name in model.input_names}
    one = {n: tf.TensorSpec(s.shape[1:], s.dtype) for n, s in specs.items()}
    with one_line_errors(what):
        traced = function.get_concrete_function(one, tf.TensorSpec((2,), tf.int64))
    check_pure(traced.graph, what)
    _check_view(traced.structured_outputs, one, what)
    return traced


def _of_layers(layers: Any, model: TrainableModel, what: str) -> Augment:
    if len(model.input_names) != 1:
        raise InputError(
            f"Expected {what} to be a function: of {len(model.input_names)} "
            "inputs it is not known which the layers are for. Give a function "
            "(columns, seed) that calls tf.image.stateless_random_... on one of them."
        )

    def augment(columns: Mapping[str, Any], seed: Any) -> Mapping[str, Any]:
        ((name, value),) = columns.items()
        with seeded_layers(seed):
            changed = layers(value[tf.newaxis], training=True)[0]
        if layers.weights:
            raise InputError(
                f"Expected {what} without weights: what they learned is not private. "
                "Give constants as arguments."
            )
        return {name: changed}

    return tf.autograph.experimental.do_not_convert(augment)


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
