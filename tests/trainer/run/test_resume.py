"""A run resumes under the code and on the machine that it began with, or not at all.

A step that is repeated is the same release only if every bit of it is the same.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.run.whole_runs import ONE_ID, KillAt, Planted, child_of
from tests.warm_processes import warm_python
from trainer.core.run import origin
from trainer.core.step.dp_step import Step
from trainer.model.user_sources import digests
from trainer.run import preflight
from trainer.run.preflight import Request
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")

#: A package of a user, file by file.
USERS = {
    "mine/__init__.py": "",
    "mine/model.py": """
        import keras
        from mine.layers import Twice

        def make(manifest):
            inputs = keras.Input((13,), name="integers")
            known = keras.layers.Lambda(finite)(inputs)
            return keras.Model(inputs, keras.layers.Dense(1)(Twice()(known)))

        def finite(values):
            import tensorflow as tf
            return keras.ops.nan_to_num(values) / 8
    """,
    "mine/layers.py": """
        import keras
        from . import factors as known

        class Twice(keras.layers.Layer):
            def call(self, inputs):
                return known.TWO * inputs
    """,
    "mine/factors.py": "TWO = 2.0",
    "mine/loss.py": """
        import tensorflow as tf

        def loss(labels, outputs):
            from mine import distances
            labels = tf.cast(labels, tf.float32)
            return 1.5 * distances.squared(labels, tf.reshape(outputs, (-1,)))
    """,
    "mine/distances.py": """
        def squared(left, right):
            return (left - right) ** 2
    """,
    "mine/optimizer.py": """
        import importlib
        import keras

        def make(rate):
            return keras.optimizers.SGD(importlib.import_module("rates").RATE * rate)
    """,
    "rates.py": "RATE = 1.0",
    "mine/metric.py": """
        def share(labels, predictions):
            return float((predictions > 0).mean())
    """,
    "unused.py": "X = 1",
}

#: What a person may edit, and how.
EDITS = {
    "the loss": ("mine/loss.py", "1.5 *", "2 *"),
    "what the loss imports when it is called": ("mine/distances.py", "** 2", "** 4"),
    "the model": ("mine/model.py", "/ 8", "/ 9"),
    "a layer": ("mine/layers.py", "known.TWO", "-known.TWO"),
    "what a layer imports": ("mine/factors.py", "2.0", "3.0"),
    "the optimizer": ("mine/optimizer.py", "RATE * rate", "RATE * rate / 2"),
    "what the optimizer imports by a call": ("rates.py", "1.0", "0.5"),
    "the metric": ("mine/metric.py", "> 0", "> 1"),
    "the package": ("mine/__init__.py", "", "X = 1"),
}


def _settings(**changes: Any) -> TrainSettings:
    fields: dict[str, Any] = {
        "noise_multiplier": 0.8,
        "l2_norm_clip": 1.0,
        "target_delta": 1e-3,
        "model": "mine.model:make",
        "loss": "mine.loss:loss",
        "optimizer": "mine.optimizer:make",
        "metric": "mine.metric:share",
        "learning_rate": 0.1,
    }
    return TrainSettings(**{**fields, **changes})


def _forget() -> None:
    """Unloads the user's modules, as a new process has none."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("mine", "rates", "unused"):
            del sys.modules[name]


@pytest.fixture
def users(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``users(file, old, new)`` edits a file of the user's package."""
    for name, text in USERS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # Two edits within a second leave a file's time as it was.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def edit(file: str, old: str, new: str) -> None:
        path = tmp_path / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new) if old else new)

    _forget()
    yield edit
    _forget()


@pytest.fixture
def request_for(request_for: Any) -> Any:
    def make(name: str = "run", **changes: Any) -> Request:
        fields = {"settings": _settings(), "checkpoint_every": 2, **changes}
        found: Request = request_for(name, run_id=ONE_ID, **fields)
        return found

    return make


def _kill(request: Request, step: int = 5) -> None:
    with pytest.raises(Planted):
        train(request, KillAt(step))
    _forget()


# -- code ------------------------------------------------------------------------------


def test_a_run_does_not_go_on_with_edited_code(
    users: Any, request_for: Any, tmp_path: pathlib.Path
) -> None:
    request = request_for()
    _kill(request)
    for file, old, new in EDITS.values():
        before = (tmp_path / file).read_text()
        users(file, old, new)
        # Before TensorFlow is needed.
        with pytest.raises(InputError, match=rf"code in \S*{file}.*edited") as caught:
            preflight.check(request)
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError, match=rf"code in \S*{file}.*edited"):
            train(request)
        (tmp_path / file).write_text(before)
        preflight.check(request)
    # Code that is gone is edited code.
    gone = tmp_path / "mine" / "distances.py"
    before = gone.read_text()
    gone.unlink()
    with pytest.raises(InputError, match=r"mine\.distances"):
        train(request)
    gone.write_text(before)
    # A session of Python trains with what it loaded, whatever the file says.
    users("mine/factors.py", "2.0", "3.0")
    _forget()
    __import__("mine.factors")
    users("mine/factors.py", "3.0", "2.0")
    preflight.check(request)
    with pytest.raises(InputError, match="step to compute what it did"):
        train(request)
    _forget()
    users("unused.py", "X = 1", "X = 2")  # which has no part in the run
    train(request)


#: Ways in which code of the step holds the values of a file, and what a refusal names.
#: No line of code differs.  Neither Keras nor the checkpoint knows the values; the
#: captures of the trace do.
_OF_LOSS = {
    "a variable of a module": (
        "tf.Variable({values}, False, name='known')",
        "tf.gather({held}, labels)",
        r"variable known \(float32, shape \(2,\)\) of the step to hold",
    ),
    "a variable that an inner function reads": (
        "tf.Variable({values}, name='inner', trainable=False)",
        "tf.function(lambda ids: tf.gather({held}, ids))(labels)",
        "variable inner .* to hold",
    ),
}
_OF_LAYER = {  # whose variables are the network's
    "a lookup table": (
        "tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer("
        "tf.constant([0, 1], tf.int64), {values}), 1.0)",
        "{held}.lookup(tf.cast(labels, tf.int64))",
        "lookup table 0 of the step to hold",
    ),
    "a tensor": (
        "tf.constant({values})",
        "tf.gather({held}, labels)",
        "step to compute what it did",
    ),
}
_HOLDING = """
import pathlib
import numpy as np
import tensorflow as tf
import keras

def load(number):
    return np.load(pathlib.Path(__file__).with_name(f"known{number}.npy"))

"""
_LOSS = """
def loss(labels, outputs):
    labels = tf.cast(labels, tf.int32)
    error = tf.reshape(outputs, (-1,)) - tf.cast(labels, tf.float32)
    return read(labels) * error**2
"""
_LAYER = """
class Twice(keras.layers.Layer):
    def build(self, shape):
        for number, held in enumerate(HELD):
            setattr(self, f"held{number}", held)  # as the export of the model needs it

    def call(self, inputs):
        labels = tf.cast(inputs[:, 0] > 0, tf.int32)
        return tf.expand_dims(read(labels), 1) * inputs
"""


def _holding(held: dict[str, tuple[str, str, str]], first: int, code: str) -> str:
    """Code that holds the values of a file each in all the ways."""
    made = [
        way[0].format(values=f"load({n})") for n, way in enumerate(held.values(), first)
    ]
    read = [way[1].format(held=f"HELD[{n}]") for n, way in enumerate(held.values())]
    text = f"HELD = [{', '.join(made)}]\n\ndef read(labels):\n"
    return f"{_HOLDING}{text}    return {' + '.join(read)}\n{code}"


def test_values_that_the_step_holds_are_part_of_the_run(
    users: Any, request_for: Any, tmp_path: pathlib.Path
) -> None:
    for file, *holding in (
        ("loss.py", _OF_LOSS, 0, _LOSS),
        ("layers.py", _OF_LAYER, len(_OF_LOSS), _LAYER),
    ):
        (tmp_path / "mine" / file).write_text(_holding(*holding))
    named = [way[2] for way in (*_OF_LOSS.values(), *_OF_LAYER.values())]
    paths = [tmp_path / "mine" / f"known{number}.npy" for number in range(len(named))]
    known = np.array([1.0, 1.5], "f4")
    for path in paths:
        np.save(path, known)
    request = request_for()
    _kill(request)
    for message, path in zip(named, paths, strict=True):
        np.save(path, known + np.array([0, 2**-20], "f4"))
        with pytest.raises(InputError, match=message) as caught:
            train(request)
        assert "\n" not in str(caught.value)
        _forget()
        np.save(path, known)


def test_the_step_that_is_compared_is_the_one_that_is_executed(
    users: Any, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Step] = []
    traced = Step.traced

    def remember(self: Step, *spec: Any) -> Any:
        made.append(self)
        return traced(self, *spec)

    monkeypatch.setattr(Step, "traced", remember)
    train(request_for())
    assert [step.num_traces for step in made] == [1]


# -- machine ---------------------------------------------------------------------------


def test_a_run_does_not_go_on_under_another_machine(
    users: Any, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for()
    _kill(request)
    path = request.run / "private" / origin.ORIGIN_NAME
    recorded = json.loads(path.read_text())
    for part, changes, message in (
        ("versions", {"tensorflow": "2.1.0"}, r"pip install tensorflow==2\.1\.0"),
        ("variables", {"TF_ENABLE_ONEDNN_OPTS": "0"}, "export TF_ENABLE_ONEDNN_OPTS=0"),
        ("processor", {"model": "an abacus"}, "a processor like that"),
        ("release", "0" * 64, "release of dpsgd"),
    ):
        found = recorded[part]
        other = {**found, **changes} if isinstance(changes, dict) else changes
        path.write_text(json.dumps({**recorded, part: other}))
        with pytest.raises(InputError, match=message) as caught:
            preflight.check(request)
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps(recorded))
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    with pytest.raises(InputError, match="unset TF_ENABLE_ONEDNN_OPTS"):
        preflight.check(request)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS")
    preflight.check(request)
    # TensorFlow runs in this process already: it cannot take the number of the run.
    recorded["threads"]["intra_op"] += 1
    path.write_text(json.dumps(recorded))
    with pytest.raises(InputError, match="new process") as caught:
        train(request)
    assert "\n" not in str(caught.value)
    recorded["threads"]["intra_op"] -= 1
    # The record is what the refusal says; what refuses is the key of the run.
    path.unlink()
    with pytest.raises(InputError, match=r"origin\.json"):
        train(request)
    users("mine/factors.py", "2.0", "3.0")
    _forget()
    path.write_text(json.dumps({**recorded, "code": digests(recorded["code"])}))
    with pytest.raises(InputError, match="step to compute"):
        train(request)


_IN_CHILD = """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])
    from trainer.run.preflight import check
    # As the command does: before TensorFlow is loaded.
    checked = check(request)
    assert {warm} or "tensorflow" not in sys.modules
    from tests.trainer.run.whole_runs import KillAt, Planted
    from trainer.train import run_checked
    try:
        run_checked(checked, KillAt({step}))
    except Planted:
        sys.exit(9)
"""

#: A product over 8,192 places, which TensorFlow splits by its number of threads.
_FACTORED = """
    import tensorflow as tf
    import keras

    class Factored(keras.layers.Layer):
        def build(self, shape):
            self.left = self.add_weight(name="left", shape=(8192, shape[-1]))
            self.right = self.add_weight(name="right", shape=(8192, 16))

        def call(self, inputs):
            kernel = tf.einsum("ki,ko->io", self.left, self.right)
            return tf.matmul(inputs, kernel)

    def make(manifest):
        inputs = keras.Input((13,), name="integers")
        known = keras.ops.nan_to_num(inputs) / 8
        return keras.Model(inputs, keras.layers.Dense(1)(Factored()(known)))
"""


@pytest.fixture
def child(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``child(request, cores=, step=)`` trains in a separate process."""
    (tmp_path / "factored.py").write_text(textwrap.dedent(_FACTORED))

    def run(
        request: Request,
        *,
        cores: int,
        step: int = -1,
        python: str | os.PathLike[str] = sys.executable,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        code = _IN_CHILD.format(cores=cores, step=step, warm=python != sys.executable)
        return subprocess.run(
            child_of(request, code, python),
            cwd=tmp_path, capture_output=True, check=False, text=True,
            env={**os.environ, **variables},
        )  # fmt: skip

    return run


def _last_iterate(request: Request) -> list[np.ndarray]:
    file = np.load(request.run / "iterates" / "step-00000010.npz")
    return [file[name] for name in sorted(file.files)]


def _same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@pytest.mark.thorough
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_run_that_goes_on_on_another_number_of_cores_ends_bit_identical(
    request_for: Any, child: Any
) -> None:
    settings = _settings(
        model="factored:make", loss="binary_crossentropy", optimizer="adam",
        metric=None, keep_last=1,
    )  # fmt: skip
    ends = {}
    for name, cores in (
        ("two", (2,)),
        ("one", (1,)),
        ("less", (2, 1)),
        ("more", (1, 2)),
    ):
        request = request_for(name, settings=settings, checkpoint_every=3)
        for index, count in enumerate(cores):
            last = index == len(cores) - 1
            step = -1 if last else 5
            done = child(request, cores=count, step=step, python=warm_python())
            assert (done.returncode, done.stderr) == (0 if last else 9, "")
        ends[name] = _last_iterate(request)
    # The test is about something: the number of threads does change the bits.
    assert not _same(ends["one"], ends["two"])
    assert _same(ends["less"], ends["two"])
    assert _same(ends["more"], ends["one"])


@pytest.mark.thorough
def test_the_same_code_in_another_process_is_the_same_step(
    users: Any, request_for: Any, child: Any
) -> None:
    # Hashes of strings, and so the order of sets, differ between processes.
    request = request_for()
    for step, seed in ((5, "1"), (-1, "2")):
        done = child(request, cores=1, step=step, PYTHONHASHSEED=seed)
        assert (done.returncode, done.stderr) == (0 if step < 0 else 9, "")
