"""Attacks on whole runs: the weights that they release.

The learning rate of the first steps is 0, and there is no noise.  Hence the weights
after the run are a function of the last batch and of the first weights: rows of earlier
steps leave no trace, and a row of the last step moves them by C over the divisor.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.trainer.conftest import write_batches
from tests.trainer.gradients.attacks.cases import CASES
from tests.trainer.gradients.attacks.harness import (
    CLIP,
    COLUMNS,
    ROUNDING,
    SIZE,
    network_of,
    outcome_of,
    plain_rows,
    rare_rows,
    variables_of,
)
from trainer.core.tf_compat import keras, tf
from trainer.keras_model import make_private

pytestmark = pytest.mark.usefixtures("lean_results")

DIVISOR = 4

Steps = list[np.ndarray]


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


def released(
    name: str,
    steps: Steps,
    folder: pathlib.Path,
) -> list[np.ndarray]:
    """Trains by Keras's ``fit``; returns all variables of the model."""
    case = CASES[name]
    network = network_of(case)
    made = write_batches(
        folder / "batches", steps, columns=COLUMNS, physical_batch_size=SIZE,
        truncated_batch_size=SIZE, expected_batch_size=DIVISOR,
        dataset={"name": "attacks"},
    )  # fmt: skip
    augment = None if case.augment is None else case.augment()
    model = make_private(
        network, batches=made.path, run=folder / "run", noise_multiplier=0.0,
        l2_norm_clip=CLIP, augment=augment, views=1 if augment is None else 2,
    )  # fmt: skip
    loss: Any = keras.losses.BinaryCrossentropy(from_logits=True)
    if case.loss is not None:
        # Keras gives labels (batch, 1) beside outputs (batch, 1).
        own = case.loss(network)
        loss = lambda y, z: own(tf.reshape(y, (-1,)), z)  # noqa: E731
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.0, 1.0])
    model.compile(keras.optimizers.SGD(rates), loss)
    model.fit(verbose=0)
    return [variable.numpy() for variable in variables_of(model.network)]


def faults_of_runs(name: str, folder: pathlib.Path) -> list[str]:
    """Returns by how much runs differ, where it is more than they may."""
    faults: list[str] = []
    first: list[np.ndarray] = []
    for label, (steps, allowed) in runs().items():
        found = released(name, steps, folder / label.replace(" ", "_"))
        first = first or found
        pairs = zip(first, found, strict=True)
        squares = sum(float(np.sum(np.square(a - b, dtype="f8"))) for a, b in pairs)
        size = np.sqrt(squares) * DIVISOR / CLIP
        if not size <= allowed + ROUNDING:
            faults.append(f"{label}: {size:.4g} C")
    return faults


@pytest.mark.parametrize(
    "name",
    [
        "write: cond on a rare id",
        "python: rows mix in batches of the step",
        "loss: rare outputs in a weight",
        "view: rare rows in a variable",
        "gradient: writes backward if rare",
        "honest: weights of its own",
        pytest.param("loss: focal", marks=pytest.mark.thorough),
        pytest.param("view: branch of its own row", marks=pytest.mark.thorough),
    ],
)
def test_weights_of_make_private_show_one_row_within_the_bound(
    name: str, tmp_path: pathlib.Path
) -> None:
    refusal, faults = outcome_of(lambda: faults_of_runs(name, tmp_path))
    assert not faults
    if refusal is not None:
        assert not CASES[name].honest, refusal
        assert "\n" not in refusal, refusal
