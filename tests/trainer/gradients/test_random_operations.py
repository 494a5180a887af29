"""Random raw operations: a result that the proof takes for rows is rows.

The operations of all rules are called with rows, constants and sizes of random shapes,
and with random attributes.  Results of which `classify` says that entry i follows from
row i alone are computed in two batches that share half of their rows, at other places,
and for one row by itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tensorflow.python.framework import op_def_registry

from tests.trainer.architectures import ARCHITECTURES
from tests.trainer.gradients.test_clipping import naive_sum
from tests.trainer.zoo import arrays, assert_close, batch
from trainer.core.step import clipping
from trainer.core.step.kernels import KNOWN, is_safe_together
from trainer.core.tf_compat import tf
from trainer.gradients import row_independence
from trainer.gradients.paths import SINGLE_EXAMPLES, clipped_sum
from trainer.gradients.row_independence import PerRow, classify

pytestmark = pytest.mark.thorough

NUM_ROWS, SHAPE = 4, (2, 3, 4)
_TYPES = [tf.float32, tf.int32, tf.bool, tf.string]
#: Names of arguments that say shapes, axes and numbers, and are rows nowhere.
_VECTORS = {"begin", "dims", "end", "input_sizes", "multiples", "perm", "shape",
            "size_splits", "strides"}  # fmt: skip
_SCALARS = {"axis", "concat_dim", "depth", "dimension", "k", "num_split",
            "reduction_indices", "size", "split_dim"}  # fmt: skip
ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    tf.errors.OpError,
)

#: Operations on images, (rows, ..., channels).
_IMAGES = {"AvgPool", "Conv2D", "DepthwiseConv2dNative", "MaxPool", "ResizeBicubic",
           "ResizeBilinear", "ResizeNearestNeighbor"}  # fmt: skip
#: Of several operations, or of volumes, lists and equations that no chance finds;
#: `Shape` has no rows.
_OTHERS = {"AvgPool3D", "Conv3D", "Einsum", "IdentityN",
           "LookupTableFindV2", "MaxPool3D", "ResourceGather", "Shape",
           "Squeeze"}  # fmt: skip
KINDS = sorted({*row_independence._RULES} - _OTHERS)

#: What makes rows of some rank of the values, (rows, *SHAPE); images of some.
_ROWS = [
    lambda v: v,
    lambda v: v[:, 0],
    lambda v: v[:, 0, 0],
    lambda v: v[:, 0, 0, 0],
    lambda v: v[:, :1, 0],
    lambda v: tf.reshape(v, (-1, 4)),
    lambda v: tf.transpose(v, (1, 0, 2, 3)),
]
_IMAGE_ROWS = [
    lambda v: v,
    lambda v: tf.reshape(v, (-1, 3, 2, 4)),
    lambda v: tf.reshape(v, (-1, 1, 3, 4)),
]
#: Of a multiple of 16 values, or of others: see `kernels`.
_SUMMED_ROWS = [
    lambda v: tf.tile(v, (1, 1, 1, 4)),
    lambda v: tf.tile(v[:, 0, 0], (1, 4)),
]
_ROWS_OF: dict[str, Any] = {
    **dict.fromkeys(_IMAGES, _IMAGE_ROWS),
    "Softmax": [*_SUMMED_ROWS, *_ROWS],
}


def _whole(value: Any, dtype: Any) -> Any:
    found = tf.cast(tf.abs(value), tf.int32)
    return tf.as_string(found) if dtype == tf.string else found


def _converted(value: Any, dtype: Any) -> Any:
    """Returns rows of another type."""
    if dtype == value.dtype:
        return value
    if value.dtype == tf.string:
        value = tf.strings.to_hash_bucket_fast(value, 3)
    value = tf.cast(value, tf.float32)
    if dtype == tf.bool:
        return value > 0
    return value if dtype == tf.float32 else _whole(value, dtype)


class Call:
    """One random call of an operation.

    Args:
      kind: Type of the operation.
      random: What chooses the arguments.
      values: Placeholder of the rows.
    """

    def __init__(self, kind: str, random: np.random.Generator, values: Any) -> None:
        self._kind = kind
        self._random = random
        self._values = values
        self._length = int(random.integers(1, 5))
        self._rows: dict[Any, Any] = {}

    def _chance(self, share: float) -> bool:
        return bool(self._random.random() < share)

    def _some_rows(self, dtype: Any) -> Any:
        """Rows of some rank; mostly the same ones in all places of a call."""
        if dtype in self._rows and self._chance(0.7):
            return self._rows[dtype]
        choices = _ROWS_OF.get(self._kind, _ROWS)
        found = choices[self._random.integers(0, len(choices))](self._values)
        found = self._rows[dtype] = _converted(found, dtype)
        if self._chance(0.5):
            self._length = found.shape.rank
        return found

    def _constant(self, dtype: Any) -> Any:
        rank = self._random.choice([0, 1, 1, 2, 3])
        shape = self._random.choice([0, 1, 3, NUM_ROWS, NUM_ROWS], rank)
        if self._rows and self._chance(0.5):  # a value for each place in the batch
            shape = [d or NUM_ROWS for d in next(iter(self._rows.values())).shape]
            shape = shape[: self._random.integers(1, len(shape) + 1)]
        found = tf.constant(self._random.normal(0, 2, shape).astype("f4"))
        if dtype == tf.bool:
            return found > 0
        return found if dtype == tf.float32 else _whole(found, dtype)

    def _numbers(self) -> Any:
        """Sizes of the batch, or a constant vector."""
        if self._chance(0.3):
            size = tf.shape(self._values)[0]
            sizes = [[size, -1], [size, size], [2 * size, 3], [size, 3]]
            return tf.stack(sizes[self._length % 4])
        low, high = [(0, 2), (1, 2), (0, 4), (-1, 3)][self._random.integers(0, 4)]
        return tf.constant(self._random.integers(low, high, self._length), tf.int32)

    def argument(self, name: str, place: int, dtype: Any) -> Any:
        """Returns a value for an argument of an operation."""
        if name == "filter" and self._rows:
            channels = next(iter(self._rows.values())).shape[-1]
            sizes = (*self._random.integers(1, 3, 2), channels, 2)
            return tf.constant(self._random.normal(size=sizes), tf.float32)
        if name == "size" and self._kind in _IMAGES:
            return tf.constant(self._random.integers(1, 4, 2), tf.int32)
        if self._kind == "Slice" and place and self._rows:
            choices = [0, 1] if name == "begin" else [-1, 1]
            rank = next(iter(self._rows.values())).shape.rank
            return tf.constant(self._random.choice(choices, rank), tf.int32)
        if name in _VECTORS:
            if name == "perm":
                return tf.constant(self._random.permutation(self._length), tf.int32)
            return self._numbers()
        if name in _SCALARS:
            found = int(self._random.integers(-2, 4))
            is_list = name == "reduction_indices" or self._kind == "ReverseV2"
            return tf.constant([found] if is_list else found, tf.int32)
        if name in ("on_value", "off_value"):
            return tf.constant(float(name == "on_value"))
        if name == "paddings":
            rank = next(iter(self._rows.values())).shape.rank if self._rows else 1
            return tf.constant(self._random.integers(0, 2, (rank, 2)), tf.int32)
        if self._chance(0.8 if place == 0 else 0.4):
            return self._some_rows(dtype)
        return self._constant(dtype)

    def attribute(self, definition: Any) -> Any:
        """Returns a value for an attribute; None for its default."""
        random, kind = self._random, definition.type
        if definition.HasField("default_value") and self._chance(0.5):
            return None
        if kind == "int":
            if definition.name == "batch_dims":  # others can end the process
                return int(random.integers(0, 2))
            is_mask = definition.name.endswith("_mask")
            return int(random.integers(0, 8) if is_mask else random.integers(-3, 4))
        if kind == "bool":
            return self._chance(0.5)
        if kind == "string" and definition.allowed_values.list.s:
            return str(random.choice([*definition.allowed_values.list.s]).decode())
        if definition.name == "key":
            return [1, 2]
        if kind == "list(int)":
            return [int(x) for x in random.integers(1, 3, 4)]
        return {"float": 0.5, "list(float)": [0.0, 1.0], "string": ""}.get(kind)


def called(kind: str, call: Call) -> list[Any]:
    """Returns the results of a random call of an operation."""
    definition = op_def_registry.get(kind)
    function = getattr(tf.raw_ops, kind)
    names, of_types, given = list(inspect.signature(function).parameters), {}, {}
    implied = set()
    for place, one in enumerate(definition.input_arg):
        dtype = tf.as_dtype(one.type) if one.type else None
        if dtype is None:
            named = one.type_attr or one.type_list_attr
            allowed = [
                tf.as_dtype(x)
                for a in definition.attr if a.name == named
                for x in a.allowed_values.list.type
            ]  # fmt: skip
            usable = [x for x in _TYPES if not allowed or x in allowed]
            dtype = of_types.setdefault(named, usable[call._length % len(usable)])
        implied |= {one.type_attr, one.type_list_attr, one.number_attr}
        count = 2 if one.number_attr or one.type_list_attr else None
        made = [call.argument(one.name, place, dtype) for _ in range(count or 1)]
        given[names[place]] = made if count else made[0]
    for one in definition.attr:
        value = None if one.name in implied else call.attribute(one)
        if one.type == "type" and one.name not in implied:
            value = tf.float32 if kind == "Cast" else None
        if value is not None:
            given[one.name] = value
    return [v for v in tf.nest.flatten(function(**given)) if isinstance(v, tf.Tensor)]


def is_rows(session: Any, values: Any, result: Any, kind: PerRow, random: Any) -> bool:
    """Whether the entries of each row are those of the row elsewhere, and alone.

    Raises:
      OpError: the operation cannot be computed.
    """
    first, other = random.normal(0, 2, (2, NUM_ROWS, *SHAPE)).astype("f4")
    order = random.permutation(NUM_ROWS)
    mixed = np.concatenate([first[: NUM_ROWS // 2], other[NUM_ROWS // 2 :]])[order]
    found = [session.run(result, {values: batch}) for batch in (first, mixed)]
    with contextlib.suppress(tf.errors.OpError):  # a constant for NUM_ROWS rows
        found.append(session.run(result, {values: first[:1]}))
    sizes = [kind.per_example * n for n in (NUM_ROWS, NUM_ROWS, 1)]
    if any(
        one.ndim <= kind.axis or one.shape[kind.axis] != size
        for one, size in zip(found, sizes, strict=False)
    ):
        return False
    whole, again, *alone = (
        np.split(np.moveaxis(one, kind.axis, 0), size // kind.per_example)
        for one, size in zip(found, sizes, strict=False)
    )
    there = np.argsort(order)
    pairs = [(whole[i], again[there[i]]) for i in range(NUM_ROWS // 2)]
    pairs += [(whole[0], one[0]) for one in alone]
    return all(
        a.shape == b.shape
        and (
            np.array_equal(a, b)
            if a.dtype == object
            else np.allclose(a, b, 1e-4, 1e-5, equal_nan=True)
        )
        for a, b in pairs
    )


def _tries(kind: str, enough: int = 6) -> tuple[int, int]:
    """Returns how many results were said to be rows, and of how many that is wrong."""
    said = wrong = 0
    for seed in range(400):
        if said >= enough:
            break
        random = np.random.default_rng([seed, *kind.encode()])
        with tf.Graph().as_default() as graph:
            values = tf.compat.v1.placeholder(tf.float32, (None, *SHAPE))
            try:
                results = called(kind, Call(kind, random, values))
            except ERRORS:  # an impossible call
                continue
            kinds = classify(graph, [values])
            rows = [r for r in results if isinstance(kinds[r.name], PerRow)]
            if not rows:  # most calls, and a session is slow to make
                continue
            with tf.compat.v1.Session(graph=graph) as session:
                for result in rows:
                    with contextlib.suppress(tf.errors.OpError):
                        right = is_rows(
                            session, values, result, kinds[result.name], random
                        )
                        said, wrong = said + 1, wrong + (not right)
    return said, wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_said_to_be_rows_is_rows(kind: str) -> None:
    said, wrong = _tries(kind, 3 if kind in row_independence._ELEMENTWISE else 6)
    assert said
    assert not wrong


@pytest.mark.parametrize("kind", ["Cumsum", "DenseBincount", "GatherV2", "ReverseV2"])
def test_a_rule_that_is_too_wide_is_found(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(row_independence._RULES, kind, lambda op, kinds: kinds[0])
    assert _tries(kind)[1]


# -- as tf.vectorized_map computes them ------------------------------------------------


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
        if len(found) == (1 if kind in row_independence._ELEMENTWISE else 3):
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
