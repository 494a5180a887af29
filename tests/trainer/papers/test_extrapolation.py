"""Lines through runs: by hand, and against NumPy and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting.core.validation import InputError
from trainer.papers.extrapolation import Line, fit_line

SIZES = (32, 64, 128) * 2


def _runs(seed: int) -> list[float]:
    """Returns the values of six runs near a line."""
    random = np.random.default_rng(seed)
    return list(0.6 + 0.01 * np.log2(SIZES) + random.normal(0, 0.004, len(SIZES)))


def test_by_hand() -> None:
    # x = 1, 2, 3 and y = 0, 3, 3: the line is -1 + 1.5 x, off by -1/2, 1 and -1/2.
    line = fit_line((2, 4, 8), (0.0, 3.0, 3.0))
    assert (line.slope, line.intercept) == pytest.approx((1.5, -1.0))
    assert line.residual_stddev == pytest.approx(math.sqrt(1.5))
    assert line.lack_of_fit is None
    found = line.predict(16, confidence=0.9)
    # Student's t with one degree of freedom: tan(0.45 pi).  1 + 1/3 + (4 - 2)^2 / 2.
    margin = math.tan(0.45 * math.pi) * math.sqrt(1.5) * math.sqrt(1 + 1 / 3 + 2)
    assert found.mean == pytest.approx(5.0)
    assert found.upper - found.mean == pytest.approx(margin)
    assert found.mean - found.lower == pytest.approx(margin)


def test_lack_of_fit_against_the_f_test_of_nested_models() -> None:
    values = _runs(5)
    line = fit_line(SIZES, values)
    x = np.log2(SIZES)
    groups = [np.array(values)[x == size] for size in set(x)]
    full = sum(((group - group.mean()) ** 2).sum() for group in groups)
    reduced = np.polyfit(x, values, 1, full=True)[1][0]
    ratio = (reduced - full) / 1 / (full / 3)
    assert line.lack_of_fit == pytest.approx(stats.f.sf(ratio, 1, 3), rel=1e-6)


@pytest.mark.parametrize("sizes", [(8, 16), (8, 8, 8), ()])
def test_what_gives_no_line_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"num_runs={len(sizes)}"):
        fit_line(sizes, [0.5] * len(sizes))


def test_a_confidence_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="confidence=1"):
        Line(
            intercept=0, slope=0, residual_stddev=1, num_runs=3, mean_log2=1,
            sum_squares=1, lack_of_fit=None,
        ).predict(2, confidence=1.0)  # fmt: skip
