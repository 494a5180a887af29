"""All that an optimizer keeps between steps is saved, or the optimizer is refused."""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.run.whole_runs import LINEAR, private_settings, same_results
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results", "one_secret")

#: What makes an optimizer keep the most state.
_MOST: dict[str, str] = {
    "Adam": "amsgrad=True, use_ema=True, ema_overwrite_frequency=3",
    "AdamW": "amsgrad=True, weight_decay=0.1",
    "RMSprop": "centered=True, momentum=0.9, rho=0.7",
    "SGD": "momentum=0.9, nesterov=True, global_clipnorm=0.5",
    "Adafactor": "clipnorm=0.5",
    "Nadam": "",  # it has state that it does not declare
}


#: What Keras's own ``fit`` does for an optimizer, and a step does not.
_OF_FIT = {
    "scale": "keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate))",
    "inner": """keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(
        keras.optimizers.Adam(rate, use_ema=True)))""",
}

#: State in variables without a declaration, and in Keras's generators.
_OWN = """
    class Own(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            if not hasattr(self, "sums"):
                self.sums = [tf.Variable(tf.zeros_like(v)) for v in variables]
                self.seeds = keras.random.SeedGenerator(3)

        def update_step(self, gradient, variable, rate):
            gradient += keras.random.normal(gradient.shape, seed=self.seeds)
            gradient += keras.random.normal(gradient.shape)
            total = self.sums[self._get_variable_index(variable)]
            total.assign_add(tf.abs(gradient))
            variable.assign_sub(rate * gradient / (1 + total))
"""

_WITH_A_TABLE = """
    class Own(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.table = tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.float32, 0.0)

        def apply_gradients(self, pairs):
            self.table.insert(self.iterations[None], tf.ones(1))
            return super().apply_gradients(pairs)
"""

#: A rate that the step reads, and an evaluation sets.
_SET_BY_A_METRIC = """
    RATE = tf.Variable(0.5, trainable=False, name="falling")

    class Falling(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 1.0 * RATE

        def get_config(self):
            return {}

    def start():
        RATE.assign(0.5)  # of an earlier run of the process
        return keras.optimizers.SGD(Falling())

    def halve(labels, predictions):
        RATE.assign(RATE / 2)
        return 0.0
"""


@pytest.fixture
def own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``own(code, call)`` names a function that returns ``call``."""
    monkeypatch.chdir(tmp_path)
    number = iter(range(9))

    def write(code: str, call: str) -> str:
        module = f"own_optimizer_{tmp_path.name}_{next(number)}"
        imports = "import numpy as np, tensorflow as tf, keras\n"
        make = f"\ndef make(rate):\n    return {call}\n"
        text = imports + textwrap.dedent(code) + make
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:make"

    return write


def _check_resumes(
    optimizer: str, request_for: Any, crash: Any, tmp_path: pathlib.Path, **changes: Any
) -> None:
    fields = {"learning_rate": 0.05, "learning_rate_schedule": "cosine", **changes}
    settings = private_settings(optimizer=optimizer, model=LINEAR, **fields)
    given = {"settings": settings}
    if settings.metric is None:  # it is a function of the weights, and takes time
        given["held_out"] = None
    train(request_for("whole", **given))
    request = request_for("broken", checkpoint_every=2, **given)
    crash(request, 7)
    train(request)
    assert same_results(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.thorough
@pytest.mark.parametrize("name", _MOST)
def test_a_killed_run_of_an_optimizer_of_keras_goes_on_with_its_state(
    name: str, own: Any, request_for: Any, crash: Any, tmp_path: pathlib.Path
) -> None:
    call = f"keras.optimizers.{name}(rate, {_MOST[name]})"
    _check_resumes(own("", call), request_for, crash, tmp_path)


@pytest.mark.parametrize("what", _OF_FIT)
def test_an_optimizer_that_needs_the_fit_of_keras_is_refused(
    what: str, own: Any, request_for: Any
) -> None:
    request = request_for(
        settings=private_settings(optimizer=own("", _OF_FIT[what]), model=LINEAR)
    )
    with pytest.raises(InputError, match="beside use_ema") as caught:
        train(request)
    assert "\n" not in str(caught.value)
    assert not request.run.exists()


def test_state_that_an_optimizer_does_not_declare_is_saved(
    own: Any, request_for: Any, crash: Any, tmp_path: pathlib.Path
) -> None:
    _check_resumes(own(_OWN, "Own(rate)"), request_for, crash, tmp_path)


def test_state_that_no_checkpoint_holds_is_refused_before_the_run_has_a_folder(
    own: Any, request_for: Any
) -> None:
    optimizer = own(_WITH_A_TABLE, "Own(rate)")
    request = request_for(settings=private_settings(optimizer=optimizer, model=LINEAR))
    with pytest.raises(InputError, match=r"InsertV2 .* has state elsewhere"):
        train(request)
    assert not request.run.exists()


def test_what_a_metric_changes_for_the_next_steps_is_saved(
    own: Any, request_for: Any, crash: Any, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: a killed run repeated steps at the rate from the beginning."""
    optimizer = own(_SET_BY_A_METRIC, "start()")
    more = {"metric": optimizer.replace(":make", ":halve"), "eval_every": 2}
    more |= {"learning_rate": None, "learning_rate_schedule": None}
    _check_resumes(optimizer, request_for, crash, tmp_path, **more)
