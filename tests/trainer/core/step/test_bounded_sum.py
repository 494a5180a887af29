"""The door: no step can clip, draw, round or divide by another number than its sum's.

Planted faults, each of which a test here was seen to find: a method whose gradients are
twice as long; a clip to 2 C; a grid of 2 C; noise of another multiplier; the divisor of
another plan; a claim that no release knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.bounded import bounded, plan_of
from tests.trainer.zoo import batch, linear, make_model, numbers
from trainer.claims.lazy_noise import LazyNoise
from trainer.core import claim_names
from trainer.core.step import bounded_sum, grid
from trainer.core.step.bounded_sum import BoundedSum
from trainer.core.step.clipping import (
    ExampleGradients,
    SingleExamples,
    example_gradient,
)
from trainer.core.step.dp_step import Step
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, example_gradients
from trainer.model.trainable_model import TrainableModel

CLIP, DIVISOR = 0.5, 8
#: Norms and sums are rounded to float32 (see `clipping`).
MOST = CLIP * (1 + 1e-4)


def _longest(found: BoundedSum, rows: Any, count: int = 4) -> float:
    """The largest norm that one row alone gives to the sum."""
    norms, unit = [], found.unit or 0.0
    for row in rows(count):
        sums = found(*batch(np.array([row])))
        flat = np.concatenate([tf.convert_to_tensor(s).numpy().ravel() for s in sums])
        assert flat.dtype == np.int64
        norms.append(unit * np.linalg.norm(flat.astype("f8")))
    return max(norms)


def _longer(model: TrainableModel, factor: float) -> ExampleGradients:
    def gradient(row: Any) -> tuple[list[Any], Any]:
        return [factor * one for one in example_gradient(model, row)], tf.constant(True)

    return SingleExamples(model, gradient, relies_on=[claim_names.OTHER_METHOD])


# -- one row changes the sum by the bound at most --------------------------------------


@pytest.mark.parametrize("path", [ONE_PASS, SINGLE_EXAMPLES])
def test_one_row_gives_the_bound_at_most_and_nearly_reaches_it(
    path: str, rows: Any
) -> None:
    found = bounded(example_gradients(make_model(linear), path), CLIP, DIVISOR)
    assert 0.999 * CLIP < _longest(found, rows) <= MOST


@pytest.mark.parametrize("factor", [2.0, 1e6])
def test_a_method_cannot_clip_to_more_since_the_sum_clips(
    factor: float, rows: Any
) -> None:
    found = bounded(_longer(make_model(linear), factor), CLIP, DIVISOR)
    assert 0.999 * CLIP < _longest(found, rows) <= MOST


def test_the_smallest_clip_holds_where_squares_are_flushed_to_zero(rows: Any) -> None:
    """Seen to fail: at 2^-60, one row gave 27 times the clip."""

    def wide() -> Any:
        integers, values = numbers()
        return keras.Model(integers, keras.layers.Dense(1 << 12)(values))

    def tiny(row: Any) -> tuple[list[Any], Any]:
        # The squares are below the smallest normal number.
        of_row = tf.cast(tf.reduce_sum(row["label"]) < 0, tf.float32)
        return [tf.fill(v.shape, 1e-19) + of_row for v in model.variables], True

    model = make_model(wide)
    gradients = SingleExamples(model, tiny, relies_on=[claim_names.OTHER_METHOD])
    accepted = 0
    for exponent in range(-60, -20, 2):
        with contextlib.suppress(InputError):
            clip = 2.0**exponent
            assert _longest(bounded(gradients, clip, DIVISOR), rows, 1) <= clip
            accepted += 1
    assert accepted == 3


@pytest.mark.parametrize("factor", [math.nan, 0.5, -1.0, 15])
def test_a_cap_on_coordinates_that_would_be_none_is_refused(factor: float) -> None:
    """Seen to fail: there was no cap, or of more than 14 values a wrong one."""
    with pytest.raises(InputError, match="linf factor="):
        bounded(make_model(linear), CLIP, DIVISOR, linf_factor=factor)


def test_a_row_that_may_not_contribute_cannot_be_brought_back(rows: Any) -> None:
    model = make_model(linear)
    honest = example_gradients(model)

    def all_rows(columns: Any, real: Any) -> Any:
        return honest.of_rows(columns, real)[0], tf.ones_like(real)

    gradients = ExampleGradients(model, all_rows, relies_on=honest.relies_on)
    columns, weight = batch(rows(4))
    for value in bounded(gradients, CLIP, DIVISOR)(columns, tf.zeros_like(weight)):
        assert not tf.convert_to_tensor(value).numpy().any()


# -- grid, noise and divisor are the sum's ---------------------------------------------


def test_a_grid_for_another_clip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = grid.make
    monkeypatch.setattr(
        bounded_sum.grid,
        "make",
        lambda *, l2_norm_clip, **more: honest(l2_norm_clip=2 * l2_norm_clip, **more),
    )
    with pytest.raises(InputError, match=r"grid, .*at most l2_norm_clip=0\.5"):
        bounded(make_model(linear), CLIP, DIVISOR)


def test_a_step_takes_no_clip_grid_noise_or_divisor_of_its_own() -> None:
    model = make_model(linear)
    found, optimizer = bounded(model, CLIP, DIVISOR), keras.optimizers.SGD(1.0)
    for name in ("grid", "expected_batch_size", "noise_stddev", "l2_norm_clip"):
        with pytest.raises(TypeError, match=name):
            Step(model.variables, found, optimizer, **{name: 1})  # type: ignore[arg-type]
    for name in ("bound", "unit", "divisor", "noise_stddev", "plan"):
        with pytest.raises(AttributeError):
            setattr(found, name, 1)
        with pytest.raises(AttributeError):
            delattr(found, name)


@pytest.mark.parametrize("multiplier", [0.0, 1.5])
def test_noise_and_mean_of_a_step_are_of_the_bound_and_the_plan(
    multiplier: float,
) -> None:
    model = make_model(linear)
    found = bounded(model, CLIP, DIVISOR, noise_multiplier=multiplier)
    step, unit = Step(model.variables, found, keras.optimizers.SGD(1.0)), found.unit
    assert unit is not None
    with step.noise(bytes(32), range(2000)) as stream:
        noise = np.concatenate([np.concatenate([*map(np.ravel, d)]) for d in stream])
    # 28,000 values: their deviation is right to 0.42 %, so that one of ten such tests
    # errs by five times that with probability 6e-6.
    assert noise.std() * (found.unit or 0.0) == pytest.approx(
        multiplier * CLIP, rel=0.021
    )
    later = step.later_noise(bytes(32), 3)
    assert later.noise_stddev == multiplier * CLIP
    before = [variable.numpy() for variable in model.variables]
    units = [np.full(shape, 1 << 20) for shape in step.shapes]
    step.begin(units)
    step.add(*_nothing())
    step.finish()
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_allclose(
            value - variable.numpy(),
            (1 << 20) * (found.unit or 0.0) / DIVISOR,
            rtol=1e-3,
        )


def _nothing() -> tuple[dict[str, Any], Any]:
    columns = {"integers": tf.zeros((4, 13)), "label": tf.zeros(4, tf.int8)}
    return columns, tf.zeros(4)


def test_noise_of_bands_is_of_the_norm_of_its_coefficients() -> None:
    """Seen to fail without the norm: less noise than the theorem has."""
    plan = dataclasses.replace(
        plan_of(DIVISOR), sampler="truncated-cyclic-poisson", bands=8
    )
    gradients = example_gradients(make_model(linear))
    found = BoundedSum(gradients, plan, l2_norm_clip=CLIP, noise_multiplier=3.0)
    norm = math.sqrt(sum(c * c for c in found.bands))
    assert len(found.bands) == 8
    assert found.bands[:2] == (1.0, 0.75)
    assert found.noise_stddev == pytest.approx(3.0 * CLIP * norm, rel=1e-12)
    assert claim_names.BANDED_NOISE in found.relies_on
    unit = found.unit
    assert unit is not None
    assert found.noise_stddev / unit <= 2.0**32


def test_lazy_tables_of_another_sum_are_refused() -> None:
    model, one = make_model(linear), bounded(make_model(linear), CLIP, DIVISOR)
    other = bounded(model, 2 * CLIP, DIVISOR)
    lazy = mock.Mock(LazyNoise, bounded=other)
    with pytest.raises(InputError, match="lazy tables of the sum of the step"):
        Step(model.variables, one, keras.optimizers.SGD(1.0), lazy=lazy)


# -- claims ----------------------------------------------------------------------------


def test_every_claim_is_named_and_an_unknown_one_is_refused() -> None:
    model = make_model(linear)
    assert bounded(example_gradients(model, SINGLE_EXAMPLES), 1.0, 8).relies_on == ()
    found = bounded(example_gradients(model, ONE_PASS), 1.0, 8, relies_on=["views"])
    assert found.relies_on == ("graph gradients", "views")
    with pytest.raises(InputError, match="relies_on='magic' to be one of graph"):
        bounded(model, 1.0, 8, relies_on=["magic"])
    of_rows = example_gradients(model).of_rows
    with pytest.raises(InputError, match="relies_on='magic'"):
        ExampleGradients(model, of_rows, relies_on=["magic"])
    with pytest.raises(InputError, match="relies_on to name the claim"):
        ExampleGradients(model, of_rows, relies_on=[])


def test_gradients_that_the_core_did_not_form_name_a_claim() -> None:
    """Seen to fail for a subclass, which the check of ``ExampleGradients`` misses."""
    model = make_model(linear)

    class Silent(SingleExamples):
        def __init__(self) -> None:
            vars(self).update(vars(example_gradients(model)), relies_on=())

    with pytest.raises(InputError, match="relies_on to name the claim"):
        bounded(Silent(), 1.0, 8, relies_on=["views"])
