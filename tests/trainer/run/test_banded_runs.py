"""Runs whose steps are more than clipped gradients and independent noise.

Noise of bands, its border after a kill, and refusals; views, and dropout.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from accounting.core import accountant
from accounting.core.samplers.cyclic_poisson import coefficients
from accounting.core.validation import InputError
from tests.trainer.conftest import make_rows
from tests.trainer.run.whole_runs import (
    LINEAR,
    ONE_SECRET,
    Said,
    linear,
    private_model,
    private_settings,
    same_results,
)
from trainer.core.run.run_record import read_run
from trainer.core.step.dp_step import Step
from trainer.core.step.noise import SEEDS, NoiseStream
from trainer.core.tf_compat import keras, tf
from trainer.keras_model import make_private
from trainer.run.preflight import Request
from trainer.train import train

BANDS, STEPS = 4, 10

pytestmark = pytest.mark.usefixtures("one_secret")


@pytest.fixture
def banded(batch_folder: Any) -> Any:
    """Ten steps of batches of four groups."""
    sizes = np.random.default_rng(1).binomial(40, 0.2, STEPS).tolist()
    return batch_folder(
        [make_rows(size, seed) for seed, size in enumerate(sizes)], "banded",
        bands=BANDS, num_examples=400,
    )  # fmt: skip


@pytest.fixture
def asked(banded: Any, tmp_path: pathlib.Path) -> Any:
    def make(**changes: Any) -> Request:
        given = {"model": LINEAR, "l2_norm_clip": None, "eval_every": STEPS, **changes}
        settings = private_settings(**given)
        return Request(
            settings=settings, batches=banded.path, held_out=None, checkpoint_every=3,
            run=tmp_path / "run",
        )  # fmt: skip

    return make


def of_stream(steps: range, shapes: list[tuple[int, ...]], exponent: int) -> Any:
    """The noise of a stream of the plan's bands, noise 0.8 and a clip of 1."""
    c = coefficients(BANDS)
    with NoiseStream(
        ONE_SECRET, steps=steps, shapes=shapes, bands=c.tolist(),
        noise_stddev=0.8 * math.hypot(*c), unit=2.0**exponent,
    ) as stream:  # fmt: skip
        return [[one.copy() for one in step] for step in stream]


def test_noise_has_bands_and_begins_anew_after_a_kill(
    asked: Any, drawn: Any, crash: Any
) -> None:
    """Weights, and the count of the automatic clip, which is one more coordinate."""
    crash(asked(), 5)  # the last checkpoint is after step 3
    before = len(drawn)
    said = Said()
    train(asked(), said)
    assert "continuing after step 3" in said.lines
    shapes = [one.shape for one in drawn[0]]
    assert shapes == [(13, 1), (1,), (1,)]
    wanted = of_stream(range(STEPS), shapes, -30)[:before]
    wanted += of_stream(range(3, STEPS), shapes, -30)
    assert len(drawn) == len(wanted) == before + STEPS - 3
    for found, step in zip(drawn, wanted, strict=True):
        for one, other in zip(found, step, strict=True):
            np.testing.assert_array_equal(one, other)
    # The first step of a block takes off nothing, as if there were no bands.
    independent = of_stream(range(3, 4), shapes, -30)[0]
    np.testing.assert_array_equal(drawn[before][0], independent[0])
    assert (drawn[3][0] != independent[0]).any()


def test_noise_of_earlier_steps_is_in_no_file(
    asked: Any, drawn: Any, crash: Any
) -> None:
    request = asked()
    crash(request, 5)
    known = {one.tobytes() for step in drawn for one in step if one.size > 1}
    known |= {one.astype(np.float64).tobytes() for step in drawn for one in step}
    for path in request.run.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not any(each in data for each in known if len(each) > 64)
    [arrays, *_] = sorted(request.run.rglob("*.npz"))
    assert len(np.load(arrays).files) < 12  # weights, clip and Adam's state


def test_record_statement_and_epsilon_are_those_of_the_theorem(asked: Any) -> None:
    said = Said()
    request = asked()
    train(request, said)
    record = json.loads((request.run / "run_record.json").read_text())
    assert "banded noise" in record["relies_on"]
    assert record["noise_multiplier"] == 0.8
    text = (request.run / "privacy.txt").read_text()
    assert "  relies on   the banded noise: each step took off a part" in text
    assert "noise of 4 bands added once per step" in text
    assert "of one of 4 groups in turn" in text
    assert "(BandMF, Choquette-Choo et al. 2023, Theorem 4): " in text
    assert any("4 bands" in line and "MiB" in line for line in said.lines)


METHODS: list[dict[str, Any]] = [
    {"method": "bam", "bam_radius": 0.1},
    {"method": "dp-sat", "sat_radius": 0.1},
    {"method": "model-mix", "mix_width": 0.1, "optimizer": "sgd"},
    {"embedding_noise": "lazy", "optimizer": "sgd"},
]


@pytest.mark.parametrize("changes", METHODS)
def test_what_is_not_proven_with_bands_is_refused_before_any_work(
    changes: dict[str, Any], banded: Any, tmp_path: pathlib.Path
) -> None:
    settings = private_settings(l2_norm_clip=1.0, **changes)
    run = tmp_path / "run"
    request = Request(settings=settings, batches=banded.path, held_out=None, run=run)
    own = {n: v for n, v in changes.items() if n != "optimizer"}
    for refused in (
        lambda: train(request),
        lambda: make_private(
            linear(), batches=banded.path, run=run, noise_multiplier=1.0,
            l2_norm_clip=1.0, **own,
        ),
    ):  # fmt: skip
        with pytest.raises(InputError, match="these have bands=4") as error:
            refused()
        assert not run.exists()
    [command] = re.findall("`dpsgd (.*)`", str(error.value))
    assert (
        "--sampler truncated-poisson --bands 1 --batch-size 8 --num-steps 10" in command
    )


def test_noise_that_does_not_fit_into_memory_is_refused(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 8)
    with pytest.raises(InputError, match="bands=4 of the batches to leave room"):
        train(asked())
    assert not asked().run.exists()


# -- views and dropout -----------------------------------------------------------------


def network(manifest: Any = None) -> Any:
    """A model with dropout."""
    keras.utils.set_random_seed(0)
    numbers = keras.Input((13,), name="integers")
    known = keras.ops.nan_to_num(numbers) / 8
    dropped = keras.layers.Dropout(0.5)(keras.layers.Dense(4, "relu")(known))
    return keras.Model(numbers, keras.layers.Dense(1)(dropped))


def jitter(columns: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """A view of an example."""
    numbers = columns["integers"]
    return {"integers": numbers + tf.random.stateless_normal((13,), seed)}


RANDOM = {
    "model": f"{__name__}:network",
    "views": 2,
    "augment": f"{__name__}:jitter",
    "optimizer": "sgd",
}


@pytest.mark.thorough
def test_a_run_of_random_views_and_dropout_goes_on_with_the_same_bits(
    request_for: Any, tmp_path: pathlib.Path, crash: Any
) -> None:
    settings = private_settings(**RANDOM)
    given = {"settings": settings, "held_out": None}
    summary = train(request_for("whole", **given))
    request = request_for("broken", checkpoint_every=3, **given)
    crash(request, 5)
    train(request)
    assert same_results(tmp_path / "whole", tmp_path / "broken")
    # The record and the statement say what a gradient is of; epsilon is the same.
    record, manifest = read_run(request.run)
    assert record.model["views"] == 2
    assert record.model["augment"].endswith(":jitter")
    assert "mean loss over 2 views" in summary.statement["mechanism"]
    plain = accountant.epsilon(manifest.plan, noise_multiplier=0.8, delta=1e-3)
    assert summary.statement["epsilon"] == plain.guarantee


def test_seeds_are_of_the_place_and_never_repeat(
    small_batches: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    add = Step.add

    def spy(self: Step, columns: Any, weight: Any) -> None:
        seen.append(np.asarray(columns[SEEDS]))
        add(self, columns, weight)

    monkeypatch.setattr(Step, "add", spy)
    given = {"views": 2, "augment": jitter}
    model = private_model(small_batches, tmp_path / "run", network(), **given)
    rows = np.zeros((3, 13), "f4")
    before = model.predict({"integers": rows}, verbose=0)
    model.fit(verbose=0)
    assert not np.array_equal(before, model.predict({"integers": rows}, verbose=0))
    assert len(seen) == 10  # steps of one physical batch
    words = np.concatenate(seen).reshape(-1, 4)
    assert len(np.unique(words, axis=0)) == len(words) == 10 * 16 * 2
    assert "over 2 views" in model.privacy_statement().to_text().replace("\n", " ")
    model.export()
    assert read_run(tmp_path / "run")[0].model["augment"] == "jitter"
