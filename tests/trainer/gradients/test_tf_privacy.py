"""What TF Privacy is used for, and why its registry of layers is not (docs/your_model).

test_clipping compares with its ``DPModel``, and with its registry for models where that
is right; test_keras_model has the refusal of its models and optimizers.
"""

from __future__ import annotations

import ast
import pathlib

import numpy as np
import pytest

from trainer.core.step import per_example
from trainer.core.tf_compat import tf


def test_one_function_of_tf_privacy_is_called(root: pathlib.Path) -> None:
    importing, called = {}, set()
    for package in ("accounting", "dpsgd", "pipelines", "trainer"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                    "tensorflow_privacy"
                ):
                    names = [alias.name for alias in node.names]
                    importing[path.relative_to(root).as_posix()] = names
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "clip_grads"
                ):
                    called.add(node.attr)
    assert importing == {"trainer/core/tf_compat.py": ["clip_grads"]}
    assert called == {"compute_clip_weights"}


@pytest.mark.parametrize("clip", [1e-3, 0.3, 1.0, 7e5])
def test_clip_weights_gives_the_same_bits_with_and_without_tf_privacy(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(5).lognormal(0, 8, 10_000)
    norms = tf.constant([0.0, 1e-45, clip, *drawn], tf.float32)
    with_it = per_example.clip_weights(clip, norms)
    monkeypatch.setattr(per_example, "clip_grads", None)
    without = per_example.clip_weights(clip, norms)
    assert with_it.numpy().tobytes() == without.numpy().tobytes()
