"""Learning rates against formulas and the optimizer's; and users' own optimizers."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from trainer.core.tf_compat import tf
from trainer.run.optimizers import make_optimizer
from trainer.settings.train_settings import SCHEDULES, TrainSettings


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
    plan = DpSgdPlan(
        sampler="poisson", num_examples=9000, expected_batch_size=500, num_steps=100
    )
    gradients = np.random.default_rng(0).normal(0, 1 / 500, (100, 4000))
    moved = []
    for floor in (0.0, 1 / 500, None, 1.0):
        settings = TrainSettings(
            noise_multiplier=1.0, adam_floor=floor, learning_rate_schedule="constant"
        ).for_plan(plan, 1.0)
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
