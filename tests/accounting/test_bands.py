"""The rule for the number of bands of correlated noise."""

from __future__ import annotations

import numpy as np
import pytest

from accounting.bands import best_bands, coefficients, iterate_noise

#: (n, b, epochs, epsilon) -> the number of bands with which the rule was tried.
TRIED = {
    (540_000, 1024, 1, 1.0): 16,
    (540_000, 1024, 1, 8.0): 16,
    (540_000, 1024, 5, 1.0): 8,
    (3_600_000, 8192, 1, 1.0): 16,
    (125_000, 1024, 1, 1.0): 4,
    (278_000, 1024, 5, 1.0): 4,
    (278_000, 1024, 5, 8.0): 16,
    (26_000, 256, 3, 1.0): 4,
    (26_000, 256, 8, 1.0): 2,
    (20_000, 1024, 2, 8.0): 4,  # 8 and 16 were worse
    (125_000, 1024, 1, 3.0): 16,
}


def test_the_square_of_the_coefficients_is_the_series() -> None:
    c = coefficients(12)
    square = np.convolve(c, c)[:12]
    # Each is rounded to a multiple of 2^-10, and the sum of all is below 6.
    np.testing.assert_allclose(square, 2 - 0.5 ** np.arange(12.0), atol=6 * 2.0**-10)
    assert (c * 1024 % 1 == 0).all()


@pytest.mark.parametrize(("bands", "num_steps"), [(1, 9), (3, 9), (16, 9), (4, 40)])
def test_the_noise_of_iterates_is_that_of_the_matrices(
    bands: int, num_steps: int
) -> None:
    c = np.zeros(num_steps)
    c[: min(bands, num_steps)] = coefficients(bands)[:num_steps]
    lag = np.subtract.outer(np.arange(num_steps), np.arange(num_steps))
    correlation = np.where(lag >= 0, c[lag], 0)
    average = np.where(lag >= 0, 0.1 * 0.9 ** np.abs(lag), 0)
    iterates = np.tril(np.ones((num_steps, num_steps))) @ average
    noise = iterates @ np.linalg.inv(correlation) * np.linalg.norm(coefficients(bands))
    expected = np.sqrt((noise**2).sum(axis=1).mean())
    assert iterate_noise(bands, num_steps) == pytest.approx(expected)


@pytest.mark.parametrize("setting", TRIED)
def test_the_rule_chooses_what_was_tried(
    setting: tuple[int, int, int, float],
) -> None:
    n, b, epochs, epsilon = setting
    found = best_bands(
        num_examples=n, expected_batch_size=b, num_steps=round(n / b) * epochs,
        epsilon=epsilon, delta=1e-6,
    )  # fmt: skip
    assert found.bands == TRIED[setting]
    assert 0.3 < found.noise < 1
    assert found.noise_multiplier > found.independent


def test_few_examples_have_independent_noise() -> None:
    found = best_bands(
        num_examples=100, expected_batch_size=60, num_steps=20, epsilon=1.0, delta=1e-5
    )
    assert (found.bands, found.noise) == (1, 1.0)
