"""Noise and clip of a run are what its settings say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trainer.run.whole_runs import (
    SMALL,
    private_settings,
    weights_of,
)
from trainer.averaging import averages
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("lean_results")


def test_zero_noise_and_a_clip_that_never_bites_equal_the_run_without_privacy(
    request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averages, "ONE_IN", 2**40)  # no row is left out
    plain = TrainSettings(method="non-private", optimizer="sgd", **SMALL)
    free = private_settings(noise_multiplier=0.0, l2_norm_clip=1e2, optimizer="sgd")
    requests = [
        request_for("plain", settings=plain, held_out=None),
        request_for("free", settings=free, held_out=None),
    ]
    for request in requests:
        train(request)
    for left, right in zip(*(weights_of(r.run) for r in requests), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
