"""What TF Privacy is used for, and why its registry of layers is not (docs/your_model).

That its ``DPModel`` and its registry agree where they are right is in test_clipping;
that its models and optimizers are refused, in test_keras_model.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.zoo import (
    NUM_ROWS,
    arrays,
    batch,
    layer_used_twice,
    make_model,
    masked_ids,
    one_id,
    registry_sum,
)
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
    assert importing == {"trainer/tf_compat.py": ["clip_grads"]}
    assert called == {"compute_clip_weights"}


def largest_contribution(gradient_sum: GradientSum, rows: np.ndarray) -> float:
    """The largest norm of what one row adds, over the clip."""
    norms = []
    for index in range(len(rows)):
        gradients = arrays(gradient_sum(*batch(rows[index : index + 1])))
        norms.append(sum(float((g.astype("f8") ** 2).sum()) for g in gradients) ** 0.5)
    return max(norms) / CLIP


@pytest.mark.parametrize("make", [masked_ids, layer_used_twice])
def test_the_registry_lets_rows_exceed_the_clip_in_silence(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    assert largest_contribution(registry_sum(model, CLIP), data) > 1.01
    assert largest_contribution(clipped_sum(model, l2_norm_clip=CLIP), data) <= 1.0001


def test_the_registry_is_right_without_masks(rows: Any) -> None:
    model, data = make_model(one_id), rows(NUM_ROWS)
    assert largest_contribution(registry_sum(model, CLIP), data) <= 1.0001
