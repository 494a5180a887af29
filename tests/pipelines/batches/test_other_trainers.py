"""The README's examples for JAX Privacy and Opacus, held against DP-SGD in NumPy.

They run where their package is installed; it conflicts with that of the trainer:

    pip install -e '.[pipelines,accounting,jax]' pytest    # or opacus
"""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import types
from typing import Any

import numpy as np
import pytest

from accounting.core import accountant
from pipelines.batches.folder import read_manifest
from pipelines.batches.reader import read_batches

CLIP, LEARNING_RATE = 1.0, 0.5  # as in the README


def framework(extra: str, package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    reason = f"{package} is not installed; pip install '.[{extra}]'"
    return pytest.param(extra, marks=pytest.mark.skipif(missing, reason=reason))


FRAMEWORKS = [framework("jax", "jax_privacy"), framework("opacus", "opacus")]


class Example:
    """One block of the README, which trains a linear model from zero."""

    def __init__(
        self, extra: str, text: str, folder: pathlib.Path, patch: pytest.MonkeyPatch
    ) -> None:
        self.text = text
        self._extra, self._folder, self._patch = extra, folder, patch

    def train(self, noise: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (weights, biases); by default under the noise of the text."""
        if noise is not None:
            answer = types.SimpleNamespace(sufficient=noise)
            self._patch.setattr(accountant, "noise_multiplier", lambda *_, **__: answer)
        if self._extra == "opacus":
            import torch

            start = lambda layer: [p.data.zero_() for p in layer.parameters()]  # noqa: E731
            self._patch.setattr(torch.nn.Linear, "reset_parameters", start)
        self._patch.chdir(self._folder)
        names: dict[str, Any] = {"__name__": "readme"}
        exec(compile(self.text, "README.md", "exec"), names)
        if self._extra == "jax":
            params = names["params"]
            return np.asarray(params["w"]), np.asarray(params["b"])
        layer = names["linear"]
        return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


@pytest.fixture
def example(
    request: pytest.FixtureRequest,
    readme_blocks: list[tuple[str, str, str | None]],
    readme_folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Example:
    (text,) = [text for _, text, extra in readme_blocks if extra == request.param]
    return Example(request.param, text, readme_folder, monkeypatch)


def dp_sgd(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """The same run without noise, one example at a time."""
    weights, biases = np.zeros((28 * 28, 10)), np.zeros(10)
    divisor = read_manifest(folder).plan.expected_batch_size
    for _, parts in itertools.groupby(read_batches(folder), lambda batch: batch.step):
        total_weights, total_biases = np.zeros_like(weights), np.zeros_like(biases)
        for batch in parts:
            for row in np.flatnonzero(batch.weight):
                pixels = batch.columns["image"][row].reshape(-1) / 255
                logits = pixels @ weights + biases
                error = np.exp(logits - logits.max())
                error /= error.sum()
                error[batch.columns["label"][row]] -= 1
                norm = np.linalg.norm(error) * np.sqrt(pixels @ pixels + 1)
                error *= min(1, CLIP / norm)
                total_weights += np.outer(pixels, error)
                total_biases += error
        weights -= LEARNING_RATE * total_weights / divisor
        biases -= LEARNING_RATE * total_biases / divisor
    return weights, biases


@pytest.mark.slow
@pytest.mark.parametrize("example", FRAMEWORKS, indirect=True)
def test_without_noise_it_is_dp_sgd_example_by_example(
    example: Example, readme_folder: pathlib.Path
) -> None:
    """Clipping, padding, parts of a step and the constant divisor.

    62 updates in single precision lose some 1e-6 of the largest weight each.
    """
    expected = dp_sgd(readme_folder / "batches")
    for found, wanted in zip(example.train(noise=0.0), expected, strict=True):
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize("example", FRAMEWORKS, indirect=True)
def test_noise_is_added_once_per_step_and_scaled_by_the_clip(
    example: Example, readme_folder: pathlib.Path
) -> None:
    """Noise so large that the data does not show: the weights are a sum of 62 draws.

    The standard deviation of 7,840 normals is known within 0.8 %; 4 % is five of that,
    and noise once per physical batch (two or three to a step) is 41 % off or more.
    """
    plan = read_manifest(readme_folder / "batches").plan
    weights, _ = example.train(noise=500.0)
    scale = LEARNING_RATE * 500.0 * CLIP / plan.expected_batch_size
    assert weights.std() == pytest.approx(scale * plan.num_steps**0.5, rel=0.04)
    assert not np.array_equal(weights, example.train(noise=500.0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("example", FRAMEWORKS, indirect=True)
def test_the_example_runs_as_written_and_learns(
    example: Example, readme_folder: pathlib.Path
) -> None:
    import pyarrow.parquet as pq

    weights, biases = example.train()
    table = pq.read_table(readme_folder / "images")
    image = table["image"].combine_chunks().flatten().flatten().to_numpy()
    logits = image.reshape(-1, 28 * 28) / 255 @ weights + biases
    # One in ten is chance; two thirds of 2,000 rows are not.
    assert (logits.argmax(1) == table["label"].to_numpy()).mean() > 0.66
