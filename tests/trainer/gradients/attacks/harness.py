"""What no accepted model may do, tried on the step's own sum of clipped gradients.

``step_of`` builds a case as ``dpsgd train`` and ``make_private`` do, and traces the sum
for a physical batch of constant size.  ``faults_of`` calls it on batches and on their
neighbours, and returns what is wrong:

  - one row more or less moves the sum by more than C, another row by more than 2 C;
  - the sum is not that of its rows, each in a batch of its own;
  - the same batch has another sum later, after other batches;
  - a variable of the model has another value than before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.plan import POISSON, DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import BatchFile, Column, Manifest
from trainer import models
from trainer.core.step.noise import SEEDS, row_seeds
from trainer.core.tf_compat import keras, raw_variable, tf
from trainer.gradients.paths import ONE_PASS
from trainer.model.losses import BINARY_CROSS_ENTROPY, Loss, loss_of_ones_own
from trainer.model.trainable_model import TrainableModel, Views
from trainer.run import hooks
from trainer.settings.train_settings import TrainSettings

#: As every run of `train`.
tf.config.experimental.enable_op_determinism()

SIZE = 8
#: Gradients of some rows are longer, and of some shorter.
CLIP = 1.0
#: Bound on the change of a sum over its rows' true contributions, in units of C: what
#: rounding adds.
ROUNDING = 1e-3
NUM_VALUES, NUM_IDS, VOCABULARY = 6, 4, 16

COLUMNS = (
    Column(name="label", dtype="int8"),
    Column(name="values", dtype="float32", shape=(NUM_VALUES,)),
    Column(name="ids", dtype="int32", shape=(NUM_IDS,)),
)
MANIFEST = Manifest(
    plan=DpSgdPlan(
        sampler=POISSON, num_examples=100, expected_batch_size=4, num_steps=3
    ),
    columns=COLUMNS,
    physical_batch_size=SIZE,
    batches_id="0" * 32,
    files=(BatchFile(name="batches.tfrecord", first_step=0, num_steps=3),),
    dataset={"name": "attacks"},
)
ROW = np.dtype([(column.name, column.numpy_dtype) for column in COLUMNS])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attack, or an honest neighbour of one.

    Attributes:
      network: Makes the Keras model; its argument chooses what follows the attack, and
        so the path.
      loss: Makes the function (labels, outputs) -> losses from the model; None for the
        default.
      augment: Makes the augmentation; None for one view.
      leaks: Whether it must be refused, even if the sum of gradients is right.
      honest: Whether it must be accepted.
    """

    network: Callable[[str], Any]
    loss: Callable[[Any], Callable[[Any, Any], Any]] | None = None
    augment: Callable[[], Any] | None = None
    leaks: bool = False
    honest: bool = False


# -- rows and batches --------------------------------------------------------------


def plain_rows(num: int, seed: int = 0) -> np.ndarray:
    """Ordinary rows: values of size one, ids below 8."""
    random = np.random.default_rng(seed)
    rows = np.zeros(num, ROW)
    rows["values"] = random.normal(size=rows["values"].shape)
    rows["ids"] = random.integers(0, 8, rows["ids"].shape)
    rows["label"] = random.integers(0, 2, num)
    return rows


def rare_rows() -> np.ndarray:
    """Rows that a probe may not hold: rare ids, huge, infinite and missing values."""
    rows = plain_rows(5, seed=9)
    rows["ids"][0] = [9, 15, 12, 8]
    rows["values"][1] = 3e6
    rows["values"][2] = [-1e9, 1e9, 7, 8, 0, 0]
    rows["values"][3] = np.nan
    rows["values"][4] = [np.inf, -np.inf, 1, 2, 3, 4]
    rows["ids"][4] = 14
    return rows


def batch_of(rows: np.ndarray, weight: Sequence[float] | None = None) -> Any:
    """Returns the columns and weights of rows, and of padding after them."""
    columns = np.zeros(SIZE, ROW)
    columns[: len(rows)] = rows
    of_rows = np.zeros(SIZE, "f4")
    of_rows[: len(rows)] = 1.0 if weight is None else weight
    return {name: columns[name] for name in ROW.names}, of_rows


def compositions() -> list[np.ndarray]:
    """Rows of batches: ordinary, with rare rows at any place, and few."""
    plain, rare = plain_rows(SIZE), rare_rows()
    return [
        plain,
        np.concatenate([rare[:1], plain_rows(7, 1)]),
        np.concatenate([plain_rows(4, 2), rare[1:]]),
        np.concatenate([plain_rows(2, 4), rare[:1]]),
    ]


# -- the step ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A case that was accepted.

    Attributes:
      sum_of: (columns, weight) -> the clipped sum, as one vector.
      variables: All variables that were made with the model.
      before: Their values before the model was checked.
    """

    sum_of: Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]
    variables: list[Any]
    before: list[Any]


def network_of(case: Case, base: str = ONE_PASS) -> Any:
    """Returns the network of a case, with the same weights at every call.

    They are no zeros, which would hide what others do.
    """
    # Forgets other models, so that each is the same whichever was made before.
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    network = models.as_functional(case.network(base), MANIFEST)
    for i, variable in enumerate(network.trainable_variables):
        drawn = tf.random.stateless_normal(variable.shape, (1, i), stddev=0.7)
        variable.assign(drawn)
    return network


def variables_of(network: Any) -> list[Any]:
    """Returns all variables of a model that Keras knows, with its random states."""
    return [raw_variable(variable) for variable in network.variables]


def step_of(case: Case, base: str = ONE_PASS) -> Built:
    """Returns the step's sum for a case, traced for batches of ``SIZE`` rows.

    The calls are those of ``make_private`` and of ``dpsgd train``.

    Raises:
      InputError: the case is refused.
    """
    created: list[Any] = []

    def note(make: Callable[..., Any], **more: Any) -> Any:
        created.append(make(**more))
        return created[-1]

    with tf.variable_creator_scope(note):
        network = network_of(case, base)
        loss: Loss = BINARY_CROSS_ENTROPY
        if case.loss is not None:
            loss = loss_of_ones_own("attacks:loss", case.loss(network))
        views = Views()
        if case.augment is not None:
            views = Views(number=2, augment=case.augment(), name="attacks:augment")
    created += variables_of(network)
    checked = TrainableModel(
        network=network, description={"name": "attack"}, loss=loss, columns=COLUMNS
    )
    before = [variable.numpy() for variable in created]
    models.check_model(checked, MANIFEST)
    model = models.make_trained(checked, MANIFEST, views)
    settings = TrainSettings(noise_multiplier=1.0, l2_norm_clip=CLIP)
    function = tf.function(hooks.gradient_sum(model, settings), autograph=False)
    specs = {
        column.name: tf.TensorSpec((SIZE, *column.shape), column.dtype)
        for column in COLUMNS
    }
    shape = model.seeds
    if shape is not None:
        specs[SEEDS] = tf.TensorSpec((SIZE, *shape), tf.uint32)
    traced = function.get_concrete_function(specs, tf.TensorSpec((SIZE,)))

    def sum_of(columns: Mapping[str, np.ndarray], weight: np.ndarray) -> np.ndarray:
        given = {name: tf.constant(value) for name, value in columns.items()}
        if shape is not None:
            # Of any place: seeds are independent of the rows.
            seeds = row_seeds(bytes(32), 0, 0, (1, *shape))
            given[SEEDS] = tf.constant(np.repeat(seeds, SIZE, 0))
        found = traced(given, tf.constant(weight))
        dense = [tf.convert_to_tensor(value).numpy().ravel() for value in found]
        return np.concatenate(dense).astype(np.float64)

    return Built(sum_of=sum_of, variables=created, before=before)


# -- what may not happen -----------------------------------------------------------


def neighbours(rows: np.ndarray) -> Iterator[tuple[Any, float]]:
    """Yields batches with one other row, and the most C by which sums may differ."""
    others = rare_rows()
    for i in range(len(rows)):
        yield batch_of(rows, np.arange(len(rows)) != i), 1.0
        yield batch_of(np.delete(rows, i)), 1.0
        replaced = rows.copy()
        replaced[i] = others[i % len(others)]
        yield batch_of(replaced), 2.0


def faults_of(built: Built) -> list[str]:
    """Returns what is wrong with a step, one line each; empty if nothing."""
    found = dict[str, float]()

    def note(text: str, size: float, allowed: float = 0.0) -> None:
        if not size <= allowed * (1 + ROUNDING) + ROUNDING:
            found[text] = max(size, found.get(text, 0.0))

    batches = compositions()
    first = []
    for rows in batches:
        here = built.sum_of(*batch_of(rows))
        first.append(here)
        for batch, allowed in neighbours(rows):
            size = _size(built.sum_of(*batch) - here)
            note("one row moves the sum by {:.4g} C", size, allowed)
        alone = [built.sum_of(*batch_of(rows[[i]])) for i in range(len(rows))]
        note("rows mix: {:.4g} C", _size(here - np.sum(alone, 0)))
    for rows, here in zip(batches, first, strict=True):
        again = built.sum_of(*batch_of(rows))
        note("the sum of a batch changes: {:.4g} C", _size(again - here))
    moved = {
        variable.name
        for variable, old in zip(built.variables, built.before, strict=True)
        if not _same(old, variable.numpy())
    }
    lines = [text.format(size) for text, size in found.items()]
    return lines + [f"{name} has another value" for name in sorted(moved)]


def outcome_of(find: Callable[[], list[str]]) -> tuple[str | None, list[str]]:
    """Returns why a case is refused, or None, and its faults, from ``find``."""
    try:
        return None, find()
    except InputError as error:
        return str(error), []
    except tf.errors.InvalidArgumentError as error:
        # The step ends the run: it releases nothing, though the check let it pass.
        return f"the step of an accepted model raised {type(error).__name__}", []


def _same(old: Any, new: Any) -> bool:
    is_text = np.asarray(old).dtype.kind in "OSU"
    return bool(np.array_equal(old, new, equal_nan=not is_text))


def _size(difference: np.ndarray) -> float:
    """Returns a norm in units of C; infinite if it is not finite."""
    size = float(np.linalg.norm(difference)) / CLIP
    return size if np.isfinite(size) else np.inf
