"""Attacks on whole runs: the weights that they release.

The learning rate of the first steps is 0, and there is no noise.  Hence the weights
after the run are a function of the last batch and of the first weights: rows of earlier
steps leave no trace, and a row of the last step moves them by C over the divisor.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.conftest import write_batches
from tests.trainer.gradients.attacks import honest, keras_parts
from tests.trainer.gradients.attacks.catalogue import Case
from tests.trainer.gradients.attacks.harness import (
    CLIP,
    COLUMNS,
    ROUNDING,
    SIZE,
    outcome_of,
    plain_rows,
    rare_rows,
)
from tests.trainer.gradients.attacks.keras_parts import keras
from tests.trainer.gradients.attacks.test_attacks import CASES
from trainer.core.tf_compat import tf
from trainer.gradients.paths import ONE_PASS
from trainer.keras_model import make_private

pytestmark = pytest.mark.usefixtures("lean_results")

DIVISOR = 4

#: What a run is tried with.  No views or masks depend on the key: runs have their own.
ATTACKS = (
    "write: moving mean of a trainable weight",
    "write: largest id so far gates",
    "hidden write: cond on a rare id",
    "state: size of a table",
    "python: rows mix in batches of the step",
    "python: rows kept in a list",
    "loss: rare outputs in a weight",
    "view: rare rows in a variable",
    "keras: metric of rare ids that keras does not know",
    "gradient: writes backward if rare",
)
#: Of these the plain suite has the first one: a whole run is slow.
HONEST = ("honest: weights of its own", "loss: focal", "view: branch of its own row")

#: Steps of a run.
Steps = list[np.ndarray]
Run = Callable[[str, Steps, pathlib.Path], list[np.ndarray]]


def runs() -> dict[str, tuple[Steps, float]]:
    """Returns the steps of runs, and by how much weights may differ from the first's.

    In units of C over the divisor.
    """
    early, middle = np.concatenate([rare_rows()[:3], plain_rows(3)]), plain_rows(6, 5)
    last = np.concatenate([plain_rows(5, 6), rare_rows()[:1]])
    return {
        "all rows": ([early, middle, last], 0.0),
        "fewer early rows": ([early[3:], middle, last], 0.0),
        "one last row less": ([early, middle, last[:-1]], 1.0),
    }


def _rate() -> Any:
    return keras_parts.rate_of_steps([1], [0.0, 1.0])


def make_network(case: Case) -> Any:
    """Returns the model of a case, with the same weights at every call."""
    keras_parts.clear_session()
    network = case.model(ONE_PASS)
    keras_parts.draw_weights(network)
    return network


def _batches(steps: Steps, folder: pathlib.Path) -> pathlib.Path:
    made = write_batches(
        folder / "batches", steps, columns=COLUMNS, physical_batch_size=SIZE,
        truncated_batch_size=SIZE, expected_batch_size=DIVISOR,
        dataset={"name": "attacks"},
    )  # fmt: skip
    return made.path


def _of_flat_labels(loss: Any) -> Any:
    """Keras gives labels (batch, 1) beside outputs (batch, 1)."""
    return lambda labels, outputs: loss(tf.reshape(labels, (-1,)), outputs)


def by_make_private(
    name: str, steps: Steps, folder: pathlib.Path, **more: Any
) -> list[np.ndarray]:
    """Trains by Keras's ``fit``; returns all variables of the model."""
    case = CASES[name]
    network = make_network(case)
    augment = None if case.augment is None else case.augment()
    model = make_private(
        network, batches=_batches(steps, folder), run=folder / "run",
        noise_multiplier=0.0, l2_norm_clip=CLIP, augment=augment,
        views=1 if augment is None else 2,
    )  # fmt: skip
    loss: Any = keras.losses.BinaryCrossentropy(from_logits=True)
    if case.loss is not None:
        loss = _of_flat_labels(case.loss(network))
    metrics = more.pop("metrics", lambda model: None)(model)
    optimizer = keras.optimizers.SGD(_rate(), momentum=more.pop("momentum", 0.0))
    model.compile(optimizer, loss, metrics)
    more.pop("change", lambda network: None)(model.network)
    model.fit(verbose=0, **more)
    return [v.numpy() for v in keras_parts.model_variables(model.network)]


def faults_of_runs(run: Run, name: str, folder: pathlib.Path) -> list[str]:
    """Returns by how much runs differ, where it is more than they may."""
    faults: list[str] = []
    first: list[np.ndarray] = []
    for label, (steps, allowed) in runs().items():
        released = run(name, steps, folder / label.replace(" ", "_"))
        first = first or released
        pairs = zip(first, released, strict=True)
        squares = sum(float(np.sum(np.square(a - b, dtype="f8"))) for a, b in pairs)
        size = np.sqrt(squares) * DIVISOR / CLIP
        if not size <= allowed + ROUNDING:
            faults.append(f"{label}: {size:.4g} C")
    return faults


def assert_refused_or_bounded(run: Run, name: str, folder: pathlib.Path) -> None:
    """A refusal is one line; the weights of accepted models are within the bound."""
    refusal, faults = outcome_of(lambda: faults_of_runs(run, name, folder))
    assert not faults
    if refusal is not None:
        assert name not in HONEST, refusal
        assert "\n" not in refusal, refusal


def _mostly_thorough(names: Sequence[str], plain: int) -> list[Any]:
    return [
        pytest.param(name, marks=() if i < plain else pytest.mark.thorough)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", [*ATTACKS, *_mostly_thorough(HONEST, 1)])
def test_weights_of_make_private_show_one_row_within_the_bound(
    name: str, tmp_path: pathlib.Path
) -> None:
    assert_refused_or_bounded(by_make_private, name, tmp_path)


class _Thief(keras.metrics.Mean):
    """A metric that keeps what it sees in a variable that a later step reads."""

    def __init__(self, find: Callable[[], Any]) -> None:
        super().__init__(name="thief")
        self._find = find

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> Any:
        variable = self._find()
        most = tf.reduce_max(tf.tanh(outputs))
        variable.assign(tf.fill(variable.shape, tf.cast(most, variable.dtype)))
        return super().update_state(outputs)


#: Where a thief puts what it saw -> the variable.
_PLACES: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda model: model.network.trainable_variables[-1],
    "the optimizer": lambda model: model.optimizer.variables[-1],
    "a variable that keras does not know": lambda model: honest.SHARED,
}


@pytest.mark.parametrize("place", _PLACES)
def test_metrics_of_training_rows_leave_all_state_alone(
    place: str, tmp_path: pathlib.Path
) -> None:
    def run(name: str, steps: Steps, folder: pathlib.Path) -> list[np.ndarray]:
        return by_make_private(
            name, steps, folder, non_private_training_metrics=True, momentum=0.9,
            metrics=lambda model: [_Thief(lambda: _PLACES[place](model))],
        )  # fmt: skip

    name = "honest: variable of the module"
    with pytest.raises(InputError, match="change no variable"):
        faults_of_runs(run, name, tmp_path)


def _mixes(network: Any) -> None:
    layer = network.layers[-1]
    layer.call = lambda x, training=None: (x - x[:1]) @ layer.kernel


#: What a user may change once a model is compiled.
_LATE: dict[str, Callable[[Any], Any]] = {
    "call": _mixes,
    "frozen": lambda network: setattr(network.layers[-1], "trainable", False),
    "lora": lambda network: network.layers[-1].enable_lora(2),
    "float8": lambda network: network.layers[-1].quantize("float8"),
}


@pytest.mark.parametrize(
    "late", [n if n == "call" else pytest.param(n, marks=pytest.mark.thorough)
             for n in _LATE],
)  # fmt: skip
def test_what_changes_after_compile_moves_no_weight_further(
    late: str, tmp_path: pathlib.Path
) -> None:
    def run(name: str, steps: Steps, folder: pathlib.Path) -> list[np.ndarray]:
        return by_make_private(name, steps, folder, change=_LATE[late])

    refusal, faults = outcome_of(lambda: faults_of_runs(run, "honest: same", tmp_path))
    assert not faults
    assert refusal is None or "\n" not in refusal
