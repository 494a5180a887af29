"""ModelMix against Algorithm 1 in NumPy, and what its theorem requires of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.core.validation import InputError
from pipelines.files.key_sources import insecure_key
from tests.trainer.bounded import float_noise, unbounded
from tests.trainer.flat_settings import train_settings
from tests.trainer.zoo import arrays, batch, both_inputs, make_model
from trainer.claims.dp_sat import SharpnessAwareOptimizer
from trainer.claims.model_mix import HOOKS, MixingOptimizer, separated_gap
from trainer.core.step.dp_step import Step
from trainer.core.step.noise import mixing_coefficients
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import clipped_sum
from trainer.model.trainable_model import TrainableModel
from trainer.run.optimizers import learning_rate, make_optimizer
from trainer.settings.train_settings import TrainSettings

pytestmark = pytest.mark.usefixtures("lean_results")

CLIP, DIVISOR, WIDTH, NUM_STEPS = 0.5, 8, 0.3, 5


def _settings(**changes: Any) -> TrainSettings:
    fields = {
        "method": "model-mix", "mix_width": WIDTH, "optimizer": "sgd",
        "learning_rate": 0.4, "noise_multiplier": 0.0, "l2_norm_clip": CLIP,
    }  # fmt: skip
    return train_settings(**{**fields, **changes})


def _optimizer(model: TrainableModel, settings: TrainSettings) -> MixingOptimizer:
    assert HOOKS.optimizer is not None
    plain = make_optimizer(settings, NUM_STEPS)
    made = HOOKS.optimizer(settings, plain, model.variables)
    assert isinstance(made, MixingOptimizer)
    return made


def _drawn(model: TrainableModel, step: int, stddev: float) -> list[np.ndarray]:
    shapes = [tuple(variable.shape) for variable in model.variables]
    key = insecure_key(1)
    noise = float_noise(key, step, shapes, stddev)
    return [*noise, *mixing_coefficients(key, step, shapes)]


def _cap(settings: TrainSettings) -> float | None:
    factor = settings.method_settings["linf_factor"]
    return CLIP / factor**0.5 if factor > 1 else None


def _weights(model: TrainableModel) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def _train(
    rows: Any, settings: TrainSettings, stddev: float, num_parts: int = 1
) -> list[np.ndarray]:
    model = make_model(both_inputs)
    optimizer = _optimizer(model, settings)
    gradient_sum = clipped_sum(model, l2_norm_clip=CLIP, linf_norm_clip=_cap(settings))
    step = Step(model.variables, unbounded(gradient_sum, DIVISOR), optimizer)
    for t in range(NUM_STEPS):
        drawn = _drawn(model, t, stddev)
        optimizer.before_step(drawn[len(model.variables) :])
        step.begin(drawn[: len(model.variables)])
        for part in np.array_split(rows(12, seed=t), num_parts):
            step.add(*batch(part, padding=12 - len(part)))
        step.finish()
    return _weights(model)


def _train_in_numpy(rows: Any, settings: TrainSettings, stddev: float) -> list[Any]:
    """Algorithm 1 of the paper, line by line, in double precision."""
    model = make_model(both_inputs)
    cap = _cap(settings)
    gradient_sum = clipped_sum(model, l2_norm_clip=CLIP, linf_norm_clip=cap)
    rate_of = learning_rate(settings, NUM_STEPS)
    steps = range(NUM_STEPS)
    rates = [float(rate_of(t)) if callable(rate_of) else rate_of for t in steps]
    latest = [w.astype("f8") for w in _weights(model)]
    start = _optimizer(model, settings).variables[-len(latest) :]
    previous = [v.numpy().astype("f8") for v in start]
    for t, rate in enumerate(rates):
        sums = arrays(gradient_sum(*batch(rows(12, seed=t))))  # at the unmixed w_{k-1}
        drawn = _drawn(model, t, stddev)
        tau = settings.method_settings["mix_width"] * rate
        following = []
        for j, (near, far) in enumerate(zip(latest, previous, strict=True)):
            gap = near - far
            sign = np.where(gap >= 0, 1.0, -1.0)
            # To a distance of tau, as the authors' code does.
            short = np.where(np.abs(gap) < tau, (tau - np.abs(gap)) / 2, 0.0)
            near_apart, far_apart = near + sign * short, far - sign * short
            alpha = drawn[len(latest) + j]
            gradient = (sums[j] + drawn[j]) / DIVISOR
            mixture = alpha * near_apart + (1 - alpha) * far_apart
            following.append(mixture - rate * gradient)
        previous, latest = latest, following
        for variable, value in zip(model.variables, latest, strict=True):
            variable.assign(value)
    return latest


@pytest.mark.parametrize(
    ("changes", "stddev", "num_parts"),
    [
        ({}, 0.0, 1),
        ({"linf_factor": 9}, 0.2, 3),
        ({"mix_width": 1e-5}, 0.0, 1),
        ({"learning_rate_schedule": "cosine", "warmup_steps": 2}, 0.2, 1),
    ],
)
def test_it_is_algorithm_1(
    changes: dict[str, Any], stddev: float, num_parts: int, rows: Any
) -> None:
    settings = _settings(**changes)
    found = _train(rows, settings, stddev, num_parts)
    for left, right in zip(found, _train_in_numpy(rows, settings, stddev), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(
    latest=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=9),
    width=st.floats(2**-20, 1, width=32),
    data=st.data(),
)
def test_what_is_mixed_is_at_least_tau_apart_in_every_coordinate_ties_included(
    latest: list[float], width: float, data: Any
) -> None:
    here = np.array(latest, "f4")
    moves = st.sampled_from([0.0, width / 2, -width / 2, width, -width, 3.0, -3.0])
    before = here + np.array([data.draw(moves) for _ in latest], "f4")
    found = separated_gap(tf.constant(here), tf.constant(before), width).numpy()
    gap = here - before
    assert (np.abs(found) >= np.float32(width)).all()
    assert (np.abs(found) == np.maximum(np.abs(gap), np.float32(width))).all()
    assert (found[gap == 0] > 0).all(), "sign(0) is 1"
    assert (np.sign(found) == np.where(gap >= 0, 1, -1)).all()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_iterate_before_the_first_is_tau_away_in_every_coordinate(
    seed: int,
) -> None:
    model = make_model(both_inputs)
    settings = _settings(init_seed=seed, warmup_steps=4)
    first, second = (_optimizer(model, settings).variables for _ in range(2))
    tau = WIDTH * 0.4 / 4  # at the rate of the first step of the rise
    signs = []
    for weights, before, again in zip(
        _weights(model), first[-len(model.variables) :],
        second[-len(model.variables) :], strict=True,
    ):  # fmt: skip
        move = before.numpy() - weights
        assert (move != 0).all()
        np.testing.assert_allclose(np.abs(move), tau, rtol=1e-4)
        assert np.array_equal(before.numpy(), again.numpy()), "public"
        signs.append(np.sign(move).ravel())
    found = np.concatenate(signs)
    # n fair signs: their mean is N(0, 1/n); five deviations.
    assert abs(found.mean()) < 5 / np.sqrt(len(found))


def test_mixture_and_noise_are_rounded_once_where_tau_is_below_the_precision() -> None:
    weights = tf.Variable(tf.ones(100))
    optimizer = MixingOptimizer(
        keras.optimizers.SGD(2.0**-30), [weights], mix_width=1.0, init_seed=0
    )
    coefficients = np.linspace(0, 1, 100, dtype=np.float32)
    optimizer.before_step([coefficients])
    # To the middle of two weights of float32: what is added to it decides.
    optimizer.apply_gradients([(tf.fill([100], -(2.0**6)), weights)])
    np.testing.assert_array_equal(weights.numpy() > 1, coefficients > 0.5)


def test_the_state_is_the_last_two_iterates_and_nothing_that_is_hidden() -> None:
    model = make_model(both_inputs)
    optimizer = _optimizer(model, _settings())
    size = len(model.variables)
    for t in range(3):
        before = _weights(model)
        optimizer.before_step(_drawn(model, t, 0.0)[size:])
        optimizer.apply_gradients([(tf.ones_like(v), v) for v in model.variables])
        kept = [v.numpy() for v in optimizer.variables[-size:]]
        assert all(map(np.array_equal, kept, before))
    assert len(optimizer.variables) == size + 2  # SGD's count of steps, and its rate
    assert optimizer.variables[0].numpy() == 3


def test_a_constraint_is_refused_since_no_mixture_would_keep_it() -> None:
    variable = tf.Variable([1.0, 2.0], constraint=tf.nn.relu, name="rates")
    with pytest.raises(InputError, match="no constraint on rates"):
        MixingOptimizer(
            keras.optimizers.SGD(0.1), [variable], mix_width=0.1, init_seed=0
        )


# -- dP-SAT ----------------------------------------------------------------------------


RHO, RATE, STDDEV = 0.7, 0.3, 0.2


def _steps(model: TrainableModel, optimizer: Any) -> Step:
    summed = unbounded(clipped_sum(model, l2_norm_clip=CLIP), DIVISOR)
    return Step(model.variables, summed, optimizer)


def _noise(model: TrainableModel, step: int) -> list[np.ndarray]:
    shapes = [tuple(variable.shape) for variable in model.variables]
    return float_noise(insecure_key(1), step, shapes, STDDEV)


def _train_sat(rows: Any, radius: float, num_parts: int = 1) -> list[np.ndarray]:
    model = make_model(both_inputs)
    optimizer = SharpnessAwareOptimizer(
        keras.optimizers.SGD(RATE), model.variables, radius=radius
    )
    step = _steps(model, optimizer)
    for t in range(4):
        optimizer.before_step()
        step.begin(_noise(model, t))
        for part in np.array_split(rows(12, seed=t), num_parts):
            step.add(*batch(part, padding=12 - len(part)))
        step.finish()
    return _weights(model)


def _sat_in_numpy(rows: Any, radius: float) -> list[np.ndarray]:
    """Algorithm 1 of the paper, line by line."""
    model = make_model(both_inputs)
    gradient_sum = clipped_sum(model, l2_norm_clip=CLIP)
    previous = [np.zeros(v.shape) for v in model.variables]
    for t in range(4):
        weights = _weights(model)
        norm = np.sqrt(sum((g**2).sum() for g in previous))
        for variable, g in zip(model.variables, previous, strict=True):
            variable.assign_add(radius * g / (norm + 1e-16))
        sums = arrays(gradient_sum(*batch(rows(12, seed=t))))
        noise = _noise(model, t)
        previous = [(s + n) / DIVISOR for s, n in zip(sums, noise, strict=True)]
        for v, w, g in zip(model.variables, weights, previous, strict=True):
            v.assign(w - RATE * g)
    return _weights(model)


@pytest.mark.parametrize(("radius", "num_parts"), [(0.0, 1), (RHO, 3)])
def test_it_is_the_algorithm_whatever_the_physical_batches(
    radius: float, num_parts: int, rows: Any
) -> None:
    found = _train_sat(rows, radius, num_parts)
    for left, right in zip(found, _sat_in_numpy(rows, radius), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    plain = _sat_in_numpy(rows, 0.0)
    moved = max(np.abs(a - b).max() for a, b in zip(found, plain, strict=True))
    assert (moved > 1e-3) == (radius > 0)


def test_the_move_has_the_radius_and_is_undone_bit_for_bit(rows: Any) -> None:
    model = make_model(both_inputs)
    # Rate 0: after the step the weights must be those from before it.
    optimizer = SharpnessAwareOptimizer(
        keras.optimizers.SGD(0.0), model.variables, radius=RHO
    )
    step, before = _steps(model, optimizer), _weights(model)
    for t in range(3):
        optimizer.before_step()
        moves = [a - b for a, b in zip(_weights(model), before, strict=True)]
        length = np.sqrt(sum(float((move**2).sum()) for move in moves))
        assert length == pytest.approx(RHO if t else 0.0, rel=1e-5)
        step.begin(_noise(model, t))
        step.add(*batch(rows(5)))
        step.finish()
        assert all(map(np.array_equal, _weights(model), before))
