"""The diagnostic that is not private: its formula, its place, and its name."""

from __future__ import annotations

import pathlib
import stat
from typing import Any

import numpy as np
import pytest

from tests.trainer.zoo import arrays, batch, linear, make_model
from trainer.gradients.clipping import clipped_sum, plain_sum
from trainer.gradients.clipping_bias import (
    CLIPPING_BIAS_NAME,
    NonPrivateClippingBias,
    decompose,
)


def _bias(run: pathlib.Path, model: Any, first_step: int = 0) -> Any:
    return NonPrivateClippingBias(
        run,
        model.variables,
        clipped=clipped_sum(model, l2_norm_clip=0.3),
        unclipped=plain_sum(model),
        first_step=first_step,
    )


def _lines(run: pathlib.Path) -> list[str]:
    return (run / "private" / CLIPPING_BIAS_NAME).read_text().splitlines()


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "private").mkdir()
    return tmp_path


def test_by_hand() -> None:
    ghat = [np.array([3.0, 0.0]), np.array([[4.0]])]
    # Half of it, plus something of norm 2.5 at a right angle.
    gbar = [np.array([1.5, 2.5]), np.array([[2.0]])]
    assert decompose(gbar, ghat) == pytest.approx((0.5, 0.5))
    assert decompose(ghat, ghat) == pytest.approx((1.0, 0.0))
    assert decompose(gbar, [0 * g for g in ghat]) == (1.0, 0.0)


def test_a_line_is_of_all_batches_of_its_step(run: pathlib.Path, rows: Any) -> None:
    model, bias = make_model(linear), None
    bias = _bias(run, model)
    for data in (rows(6, seed=1), rows(5, seed=2)):
        bias.add(*batch(data, padding=7 - len(data)))
    bias.finish(1)
    bias.add(*batch(rows(7, seed=3)))
    bias.finish(2)
    header, first, second = _lines(run)
    assert header == "step,magnitude,direction"
    for line, data in (
        (first, np.concatenate([rows(6, seed=1), rows(5, seed=2)])),
        (second, rows(7, seed=3)),
    ):
        clipped = arrays(clipped_sum(model, l2_norm_clip=0.3)(*batch(data)))
        wanted = decompose(clipped, arrays(plain_sum(model)(*batch(data))))
        assert wanted[0] < 0.9
        assert [float(x) for x in line.split(",")[1:]] == pytest.approx(wanted, 1e-3)


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
