"""What TF Privacy is used for, and why its registry of layers is not (docs/your_model).

test_clipping compares with its ``DPModel``, and with its registry for models where that
is right; test_keras_model has the refusal of its models and optimizers.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.tf_privacy import registry_sum
from tests.trainer.zoo import (
    NUM_ROWS,
    arrays,
    batch,
    layer_used_twice,
    make_model,
    masked_ids,
    one_id,
)
from trainer.core.step import per_example
from trainer.core.tf_compat import tf
from trainer.gradients.clipping import GradientSum, clipped_sum

CLIP = 1e-3  # below every norm: each row is clipped


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


def largest_contribution(gradient_sum: GradientSum, rows: np.ndarray) -> float:
    """The largest norm that a single row contributes, over the clip."""
    norms = []
    for index in range(len(rows)):
        gradients = arrays(gradient_sum(*batch(rows[index : index + 1])))
        norms.append(sum(float((g.astype("f8") ** 2).sum()) for g in gradients) ** 0.5)
    return max(norms) / CLIP


@pytest.mark.parametrize("make", [masked_ids, layer_used_twice])
def test_the_registry_lets_rows_exceed_the_clip_in_silence(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make, seed=1), rows(NUM_ROWS)
    assert largest_contribution(registry_sum(model, CLIP), data) > 1.01
    assert largest_contribution(clipped_sum(model, l2_norm_clip=CLIP), data) <= 1.0001


def test_the_registry_is_right_without_masks(rows: Any) -> None:
    model, data = make_model(one_id), rows(NUM_ROWS)
    assert largest_contribution(registry_sum(model, CLIP), data) <= 1.0001
