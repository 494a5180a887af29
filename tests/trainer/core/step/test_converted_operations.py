"""Random operations: ``tf.vectorized_map`` computes each example as if it were alone.

The operations that steps let it convert are called with one example, constants and
sizes of random shapes, and with random attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.architectures import ARCHITECTURES
from tests.trainer.gradients.test_clipping import naive_sum
from tests.trainer.gradients.test_random_operations import ERRORS, SHAPE, Call, called
from tests.trainer.zoo import arrays, assert_close, batch
from trainer.core.step import clipping
from trainer.core.step.kernels import KNOWN, is_safe_together
from trainer.core.tf_compat import tf
from trainer.gradients import row_independence
from trainer.gradients.paths import SINGLE_EXAMPLES, clipped_sum

pytestmark = pytest.mark.thorough

NUM_EXAMPLES = 3
#: No chance finds their arguments, or they are of gradients alone.
OF_MODELS = set("""
    AvgPoolGrad BatchToSpaceND Conv2D Conv2DBackpropFilter Conv2DBackpropInput
    Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum
    LookupTableFindV2 MaxPool MaxPoolGrad SpaceToBatchND StridedSliceGrad
    """.split())  # noqa: SIM905  # fmt: skip


MODELS = (
    "convolution_of_clips", "llama_block", "mnist_convnet", "mixture_of_experts",
    "mobile_blocks", "opacus_cifar", "preprocessing", "wavenet",
)  # fmt: skip


def _numbers(results: list[Any]) -> list[Any]:
    """Returns results as numbers, texts by their hashes."""
    return [
        tf.strings.to_hash_bucket_fast(x, 1 << 20) if x.dtype == tf.string else x
        for x in results
    ]


def _apart(kind: str) -> list[bool]:
    """Returns of some calls whether all results are those of each example alone."""
    found: list[bool] = []
    for seed in range(100):
        if len(found) == (2 if kind in row_independence._ELEMENTWISE else 5):
            break
        random = np.random.default_rng([seed, *kind.encode()])
        examples = random.normal(0, 2, (NUM_EXAMPLES, 2, *SHAPE)).astype("f4")
        try:
            one = tf.function(_call(kind, seed), autograph=False).get_concrete_function(
                tf.TensorSpec(examples.shape[1:])
            )
            if not (one.outputs and _is_converted(one, kind)):
                continue
            alone = [one(tf.constant(example)) for example in examples]
            together = _vectorized(one)(tf.constant(examples))
        except ERRORS:  # an impossible call
            continue
        pairs = zip(zip(*alone, strict=True), together, strict=True)
        found.append(all(_equal(each, whole) for each, whole in pairs))
    return found


def _call(kind: str, seed: int) -> Callable[[Any], list[Any]]:
    def call(example: Any) -> list[Any]:
        random = np.random.default_rng([seed, *kind.encode()])
        return _numbers(called(kind, Call(kind, random, example)))

    return call


def _vectorized(one: Any) -> Any:
    return tf.function(lambda given: tf.vectorized_map(one, given), autograph=False)


def _is_converted(one: Any, kind: str) -> bool:
    """Whether an operation of the kind depends on the example."""
    of_example, kinds = {one.inputs[0].op.name}, set[str]()
    for op in one.graph.get_operations():
        if any(value.op.name in of_example for value in op.inputs):
            of_example.add(op.name)
            kinds.add(op.type)
    return kind in kinds


def _equal(alone: Any, together: Any) -> bool:
    stacked = np.stack([value.numpy() for value in alone])
    return stacked.shape == together.shape and np.allclose(
        stacked, together.numpy(), 1e-3, 1e-4, equal_nan=True
    )


@pytest.mark.parametrize("kind", sorted(KNOWN - OF_MODELS))
def test_each_example_is_computed_as_if_it_were_alone(kind: str) -> None:
    found = _apart(kind)
    assert found
    assert all(found)


def test_so_it_is_in_models(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set[str]()

    def is_safe(graph: Any, columns: Any) -> bool:
        kinds.update(op.type for op in graph.get_operations())
        return is_safe_together(graph, columns)

    monkeypatch.setattr(clipping, "is_safe_together", is_safe)
    for name in MODELS:
        model, data = ARCHITECTURES[name].plain(), ARCHITECTURES[name].rows(5)
        step = clipped_sum(model, l2_norm_clip=0.3, path=SINGLE_EXAMPLES)
        step = tf.function(step, autograph=False)
        assert_close(arrays(step(*batch(data))), naive_sum(model, data, 0.3))
    assert kinds >= OF_MODELS


def test_a_wrong_conversion_is_found() -> None:
    """TensorFlow's own fault: along axis -1 it rolls to the next example."""
    assert not all(_apart("Roll"))
