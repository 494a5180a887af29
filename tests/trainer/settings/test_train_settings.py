"""Accepted training settings, kept iterates, learning rates and optimizers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.bands import best_bands
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from tests.trainer.flat_settings import train_settings
from trainer.core.tf_compat import tf
from trainer.run.optimizers import make_optimizer
from trainer.settings.train_settings import (
    SCHEDULES,
    AggregationSettings,
    TrainSettings,
)

PRIVATE = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0}
MIXED = {"method": "model-mix", "mix_width": 0.1, "optimizer": "sgd"}
PLAN = DpSgdPlan(
    sampler="poisson", num_examples=9000, expected_batch_size=500, num_steps=100
)


@pytest.mark.parametrize(
    ("changes", "clip"),
    [
        ({}, ("auto", 0.9)),
        ({"clip_quantile": 0.8}, ("auto", 0.8)),
        ({"l2_norm_clip": "auto"}, ("auto", 0.9)),
        ({"l2_norm_clip": 0.5}, (0.5, None)),
        ({"method": "non-private", "noise_multiplier": None}, (None, None)),
    ],
)
def test_the_clip_adapts_where_none_is_given(
    changes: dict[str, Any], clip: tuple[Any, Any]
) -> None:
    settings = TrainSettings(**{"noise_multiplier": 1.0, **changes})
    assert (settings.l2_norm_clip, settings.clip_quantile) == clip


#: Over the noise of a mean: noise multiplier 1, at most one clip, 500 examples.
NOISE = 1 / 500
TRAPEZOID = "trapezoid"
NOT_PRIVATE = {"method": "non-private", "noise_multiplier": None, "l2_norm_clip": None}


@pytest.mark.parametrize(
    ("changes", "floor", "rate", "schedule"),
    [
        ({}, 3 * NOISE, 0.015 * 10**0.5, TRAPEZOID),
        ({"l2_norm_clip": None}, 3 * NOISE, 0.015 * 10**0.5, TRAPEZOID),
        ({"l2_norm_clip": 8.0}, 24 * NOISE, 0.015 * 10**0.5, TRAPEZOID),
        ({"noise_multiplier": 0.1}, 1.5 * NOISE, 0.015 * 10**0.5, TRAPEZOID),
        ({"adam_floor": 0.0}, 0.0, 0.015, TRAPEZOID),
        ({"adam_floor": 2 * NOISE}, 2 * NOISE, 0.015 * 5**0.5, TRAPEZOID),
        ({"learning_rate": 0.5}, None, 0.5, "constant"),
        ({"optimizer": "adamw"}, None, 0.015, TRAPEZOID),
        ({"optimizer": "momentum"}, None, 0.1, "constant"),
        ({"optimizer": "sgd", "l2_norm_clip": None}, None, 5.0, TRAPEZOID),
        ({"optimizer": "momentum", "l2_norm_clip": None}, None, 0.5, TRAPEZOID),
        (
            {"optimizer": "sgd", "l2_norm_clip": None, "noise_multiplier": 0.1},
            None, 10.0, TRAPEZOID,
        ),
        (NOT_PRIVATE, 0.001, 0.01, "constant"),
    ],
)  # fmt: skip
def test_rate_and_floor_are_those_of_the_plan_where_none_is_given(
    changes: dict[str, Any], floor: float | None, rate: float, schedule: str
) -> None:
    found = TrainSettings(**{**PRIVATE, **changes})
    found = found.for_plan(PLAN, found.noise_multiplier)
    assert found.adam_floor == pytest.approx(floor)
    assert found.learning_rate == pytest.approx(rate)
    assert found.learning_rate_schedule == schedule
    assert found.describe_optimizer().get("adam_floor") == found.adam_floor
    # Settled settings are those of any plan.
    assert found.for_plan(PLAN, 9.0) == found


def test_the_rate_with_bands_grows_by_what_the_noise_of_iterates_falls() -> None:
    """Independent noise has the floor and the rate of its own plan."""
    plain = DpSgdPlan(
        sampler="poisson", num_examples=54_000, expected_batch_size=1024, num_steps=53
    )
    asked = {"num_examples": 54_000, "expected_batch_size": 1024, "num_steps": 53}
    best = best_bands(**asked, epsilon=1.0, delta=0.1 / 54_000)
    assert best.bands > 1
    banded = dataclasses.replace(
        plain, sampler="truncated-cyclic-poisson", bands=best.bands,
        truncated_batch_size=1400,
    )  # fmt: skip
    settings = TrainSettings(target_epsilon=1.0, target_delta=1e-6)
    found = settings.for_plan(banded, best.noise_multiplier)
    alone = settings.for_plan(plain, best.independent)
    assert found.adam_floor == pytest.approx(alone.adam_floor, rel=1e-3)
    assert found.learning_rate is not None
    assert alone.learning_rate is not None
    steps = math.hypot(best.of_step / best.independent, 3) / math.hypot(1, 3)
    wanted = alone.learning_rate * steps / math.sqrt(best.noise)
    assert found.learning_rate == pytest.approx(wanted, rel=1e-3)
    assert found.learning_rate > alone.learning_rate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adam_floor": 0.1, "optimizer": "sgd"}, "of --optimizer adam, not sgd. Omit"),
        ({"l2_norm_clip": "automatic"}, "l2_norm_clip='automatic'"),
        ({"clip_quantile": 0.9}, "--l2-norm-clip 1.0 is fixed. Omit"),
        ({"l2_norm_clip": None, "clip_quantile": 0.4}, "clip_quantile=0.4 >= 0.5"),
        ({**MIXED, "l2_norm_clip": None}, "of one clip norm. Give --l2-norm-clip 1"),
        ({"l2_norm_clip": float("inf")}, "finite"),
        ({"method": "dp-sat", "sat_radius": 0.1, "bam_radius": 0.1}, "--method bam"),
        ({**MIXED, "linf_factor": 2.5}, "linf_factor=2.5"),
        ({**MIXED, "optimizer": "momentum"}, "--optimizer sgd.*not momentum"),
        ({**MIXED, "tail": 3, "train_over": "uta"}, "no train_over='uta'"),
        ({**MIXED, "embedding_noise": "lazy"}, "mixes every row"),
        ({"train_over": "uta"}, "--tail"),
        ({"train_over": "ema", "tail": 3}, "--ema-decay"),
        ({"train_over": "upa", "tail": 3}, "train_over='upa'"),
        ({"keep_every": 3}, "--keep-last"),
        ({"export": ("upa",)}, "--keep-last"),
        ({"export": ("opa",), "keep_last": 2}, "export='opa'"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as found:
        train_settings(**{**PRIVATE, **changes})
    assert "\n" not in str(found.value)


def test_what_does_not_fit_into_the_run_is_refused() -> None:
    settings = AggregationSettings(keep_last=5, keep_every=20)
    settings.check_steps(81)
    with pytest.raises(InputError, match="keep_last=5 iterates, 20 steps apart"):
        settings.check_steps(80)
    with pytest.raises(InputError, match="keep_last=5"):
        AggregationSettings(keep_last=5).check_steps(4)
    late = AggregationSettings(tail=2, train_over="uta", aggregate_from=10)
    late.check_steps(11)
    with pytest.raises(InputError, match="aggregate_from=10 <= 9"):
        late.check_steps(10)


@given(st.integers(1, 10_000), st.integers(1, 50), st.none() | st.integers(1, 100))
def test_kept_steps_are_evenly_apart_and_end_with_the_run(
    num_steps: int, keep_last: int, keep_every: int | None
) -> None:
    settings = AggregationSettings(keep_last=keep_last, keep_every=keep_every)
    try:
        steps = settings.kept_steps(num_steps)
    except InputError:
        assert (keep_last - 1) * (keep_every or 1) >= num_steps
        return
    assert len(steps) == keep_last
    assert steps[-1] == num_steps
    assert steps[0] >= 1
    gaps = {b - a for a, b in itertools.pairwise(steps)}
    assert len(gaps) <= 1
    if keep_every is not None:
        assert gaps <= {keep_every}
    elif num_steps >= 2 * keep_last:
        assert steps[0] > num_steps / 2


# -- optimizers ------------------------------------------------------------------------


def _settings(**changes: Any) -> TrainSettings:
    fields = {"noise_multiplier": 1.0, "l2_norm_clip": 1.0, "learning_rate": 0.5}
    return TrainSettings(**{**fields, **changes})


def _falling(schedule: str) -> list[float]:
    """Rates from 0.5 to a tenth of it over 8 steps."""
    part = np.arange(8) / 8
    return {
        "constant": np.full(8, 0.5),
        "cosine": 0.05 + 0.45 * (1 + np.cos(np.pi * part)) / 2,
        "linear": 0.5 - 0.45 * part,
        "exponential": 0.5 * 0.1**part,
        "trapezoid": 0.5 * (0.1 + 0.9 * np.minimum(1, 2 * (1 - part))),
    }[schedule].tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "first_step"), [(0, 0), (4, 3)])
def test_rates_by_hand_are_those_that_the_optimizer_uses_also_after_a_restart(
    schedule: str, warmup: int, first_step: int
) -> None:
    settings = _settings(
        optimizer="sgd",
        learning_rate_schedule=schedule,
        warmup_steps=warmup,
        final_learning_rate_fraction=0.1,
    )
    wanted = [*[0.125, 0.25, 0.375, 0.5][:warmup], *_falling(schedule)][first_step:]
    optimizer = make_optimizer(settings, 8 + warmup)
    weight = tf.Variable(0.0)
    optimizer.build([weight])
    optimizer.iterations.assign(first_step)  # as a checkpoint does

    @tf.function
    def step() -> None:
        optimizer.apply_gradients([(tf.constant(1.0), weight)])

    used = []
    for _ in wanted:
        used.append(float(optimizer.learning_rate))
        step()
    # A compiled step may round in another order.
    np.testing.assert_allclose(used, wanted, rtol=1e-5)
    assert float(weight) == pytest.approx(-sum(used), rel=1e-5)


def _steps(optimizer: Any, gradients: np.ndarray) -> np.ndarray:
    """The weights after each of the gradients, from zero."""
    weight = tf.Variable(tf.zeros(gradients.shape[1]))
    optimizer.build([weight])
    step = tf.function(lambda g: optimizer.apply_gradients([(g, weight)]))
    seen = []
    for one in gradients:
        step(tf.constant(one, tf.float32))
        seen.append(weight.numpy())
    return np.array(seen)


def test_the_steps_of_adam_with_a_floor_by_hand() -> None:
    floor, rate = 0.3, 0.5
    gradients = np.random.default_rng(0).normal(0, [0.1, 1.0, 10.0, 0.0], (40, 4))
    optimizer = make_optimizer(_settings(adam_floor=floor), 40)
    first, second, weights = np.zeros(4), np.zeros(4), [np.zeros(4)]
    for t, g in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g**2
        unbiased = first / (1 - 0.9**t), second / (1 - 0.999**t)
        weights.append(
            weights[-1] - rate * unbiased[0] / np.hypot(unbiased[1] ** 0.5, floor)
        )
    np.testing.assert_allclose(
        _steps(optimizer, gradients), weights[1:], rtol=1e-4, atol=1e-5
    )


def test_the_plans_rate_gives_weights_the_same_noise_with_any_floor() -> None:
    """Of noise alone, the root of the steps times 0.15 over it."""
    gradients = np.random.default_rng(0).normal(0, 1 / 500, (100, 4000))
    moved = []
    for floor in (0.0, 1 / 500, None, 1.0):
        settings = TrainSettings(
            noise_multiplier=1.0, adam_floor=floor, learning_rate_schedule="constant"
        ).for_plan(PLAN, 1.0)
        moved.append(_steps(make_optimizer(settings, 100), gradients)[-1].std())
    # Without a floor the first steps, of which chance decides, are larger.
    np.testing.assert_allclose(moved, 0.15, rtol=0.1)


def test_an_optimizer_of_ones_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizers.py").write_text(
        "import keras\n"
        "def nesterov(rate):\n"
        "    return keras.optimizers.SGD(rate, momentum=0.5, nesterov=True)\n"
        "def nothing(rate):\n"
        "    return rate\n"
        "def fails(rate):\n"
        "    return rate['no']\n"
        "def named(rate):\n"
        "    return 'adam'\n"
        "def legacy(rate):\n"
        "    import tf_keras\n"
        "    return tf_keras.optimizers.SGD(0.1)\n"
    )
    monkeypatch.chdir(tmp_path)
    own = _settings(optimizer="own_optimizers:nesterov", warmup_steps=3)
    assert make_optimizer(own, 9).nesterov
    for name, message in (
        ("nothing", "to return a Keras optimizer"),
        ("named", "to return a Keras optimizer"),  # without the rate
        ("legacy", r"to return a Keras optimizer.*none of tf_keras.*SGD"),
        ("fails", r"TypeError: .*own_optimizers.py, line 7\)"),
        ("absent", "to name a function"),
    ):
        settings = _settings(optimizer=f"own_optimizers:{name}")
        with pytest.raises(InputError, match=message):
            make_optimizer(settings, 9)
