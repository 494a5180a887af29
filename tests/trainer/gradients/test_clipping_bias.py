"""The diagnostic that is not private: its formula, its place, and its name."""

from __future__ import annotations

import pathlib
import stat
from typing import Any

import numpy as np
import pytest

from tests.trainer.zoo import arrays, batch, linear, make_model
from trainer.claims import bam, dp_sat
from trainer.claims.dp_sat import SharpnessAwareOptimizer
from trainer.gradients.clipping import clipped_sum, plain_sum
from trainer.gradients.clipping_bias import (
    CLIPPING_BIAS_NAME,
    NonPrivateClippingBias,
    cosine,
    decompose,
)
from trainer.tf_compat import keras, tf

DIVISOR = 5


def _bias(
    run: pathlib.Path, model: Any, first_step: int = 0, ascent: Any = None
) -> Any:
    return NonPrivateClippingBias(
        run,
        model.variables,
        clipped=clipped_sum(model, l2_norm_clip=0.3),
        unclipped=plain_sum(model),
        ascent=ascent,
        expected_batch_size=DIVISOR,
        first_step=first_step,
    )


def _lines(run: pathlib.Path) -> list[str]:
    return (run / "private" / CLIPPING_BIAS_NAME).read_text().splitlines()


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "private").mkdir()
    return tmp_path


def test_by_hand() -> None:
    ghat = np.array([3.0, 0.0, 4.0])
    # Half of it, plus something of norm 2.5 at a right angle.
    gbar = np.array([1.5, 2.5, 2.0])
    assert decompose(gbar, ghat) == pytest.approx((0.5, 0.5))
    assert decompose(ghat, ghat) == pytest.approx((1.0, 0.0))
    assert decompose(gbar, 0 * ghat) == (1.0, 0.0)


def test_a_line_is_of_all_batches_of_its_step(run: pathlib.Path, rows: Any) -> None:
    model, bias = make_model(linear), None
    bias = _bias(run, model)
    for data in (rows(6, seed=1), rows(5, seed=2)):
        bias.add(*batch(data, padding=7 - len(data)))
    bias.finish(1)
    bias.add(*batch(rows(7, seed=3)))
    bias.finish(2)
    header, first, second = _lines(run)
    assert header == "step,magnitude,direction,bias,cosine,ascent_cosine"
    for line, data in (
        (first, np.concatenate([rows(6, seed=1), rows(5, seed=2)])),
        (second, rows(7, seed=3)),
    ):
        both = clipped_sum(model, l2_norm_clip=0.3), plain_sum(model)
        pair = [_flat(gradient_sum(*batch(data))) for gradient_sum in both]
        wanted = decompose(*pair)
        assert wanted[0] < 0.9
        *found, ascent = (float(x) for x in line.split(",")[1:])
        bias = np.linalg.norm(pair[0] - pair[1]) / DIVISOR
        angle = pair[0] @ pair[1] / np.prod(np.linalg.norm(pair, axis=1))
        assert found == pytest.approx([*wanted, bias, angle], 1e-3)
        assert np.isnan(ascent)


def _flat(gradients: Any) -> np.ndarray:
    return np.concatenate([g.ravel() for g in arrays(gradients)])


def _cosine_of_ascent(run: pathlib.Path, model: Any, ascent: Any, data: Any) -> float:
    bias = _bias(run, model, ascent=ascent)
    bias.add(*batch(data, padding=2, fill=np.nan))
    bias.finish(1)
    return float(_lines(run)[1].split(",")[-1])


def test_the_ascent_of_bam_is_the_sum_of_directions(
    run: pathlib.Path, rows: Any
) -> None:
    model, data = make_model(linear), rows(6)
    each = [_flat(plain_sum(model)(*batch(row))) for row in np.split(data, 6)]
    directions = sum(g / np.linalg.norm(g) for g in each)
    found = _cosine_of_ascent(run, model, bam.HOOKS.ascent(model, None), data)
    assert found == pytest.approx(cosine(directions, sum(each)), 1e-4)
    assert found < 0.99


def test_the_ascent_of_dp_sat_is_the_previous_gradient_at_the_weights(
    run: pathlib.Path, rows: Any
) -> None:
    model, data = make_model(linear), rows(6)
    optimizer = SharpnessAwareOptimizer(
        keras.optimizers.SGD(0.0), model.variables, radius=3.0
    )
    optimizer.build(model.variables)
    optimizer.before_step()
    previous = [tf.ones_like(v) for v in model.variables]
    optimizer.apply_gradients(zip(previous, model.variables, strict=True))
    here = _flat(plain_sum(model)(*batch(data)))
    optimizer.before_step()
    moved = arrays(model.variables)
    uphill = _flat(plain_sum(model)(*batch(data)))
    ascent = dp_sat.HOOKS.ascent(model, optimizer)
    found = _cosine_of_ascent(run, model, ascent, data)
    assert found == pytest.approx(cosine(here, _flat(previous)), 1e-4)
    assert found != pytest.approx(cosine(uphill, _flat(previous)), 1e-3)
    for left, right in zip(model.variables, moved, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_resumed_run_has_each_step_once(run: pathlib.Path, rows: Any) -> None:
    model = make_model(linear)
    bias = _bias(run, model)
    for step in (1, 2, 3):
        bias.add(*batch(rows(4)))
        bias.finish(step)
    before = _lines(run)
    path = run / "private" / CLIPPING_BIAS_NAME
    path.write_text(path.read_text() + "4,0.")  # killed while writing
    bias = _bias(run, model, first_step=2)
    bias.add(*batch(rows(4)))
    bias.finish(3)
    assert _lines(run) == before
    assert not stat.S_IMODE(path.stat().st_mode) & 0o077
