"""Measures the bias of clipping of DP-SGD, DP-SAT and BAM: arXiv:2308.12018, Theorem 1.

    python examples/papers/bias.py --input public/train --out bias --batch-size 64 \
        --epochs 1 --every 20 -- --noise-multiplier 1 --delta 1e-6

NOT PRIVATE: the bias is computed from examples without noise; use public data.  Each
method trains on batches of its own and keeps its iterates.  At every so many steps, the
gradients of one batch are clipped and summed, and the sum is compared with the sum of
the same gradients unclipped.  What follows ``--`` goes to ``dpsgd train``.
"""

from __future__ import annotations

import argparse
import math
import pathlib

import common
import keras
import numpy as np
import tensorflow as tf

from dpsgd import read_batches, read_manifest

CLIP, RATE = 1.0, 0.1
#: Method -> how far its gradients are taken from the weights.
METHODS = {"dp-sgd": 0.0, "dp-sat": 0.05, "bam": 0.05}
_FLAGS = {"dp-sgd": [], "dp-sat": ["--sat-radius"], "bam": ["--bam-radius"]}
_LOSS = keras.losses.BinaryCrossentropy()  # the exported model gives probabilities


def _flat(parts: list) -> np.ndarray:
    dense = [tf.convert_to_tensor(part) for part in parts]
    return np.concatenate([part.numpy().ravel() for part in dense]).astype("f8")


def _assign(variables: list, flat: np.ndarray) -> None:
    ends = np.cumsum([variable.numpy().size for variable in variables])[:-1]
    for variable, part in zip(variables, np.split(flat, ends), strict=True):
        variable.assign(part.reshape(variable.shape))


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Returns the cosine of the angle of two vectors; NaN if one is 0."""
    norms = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / norms if norms else math.nan


def measure(
    model: keras.Model,
    batch: tuple,
    weights: np.ndarray,
    *,
    method: str,
    last: np.ndarray,
) -> tuple[float, float, float]:
    """Returns distance and cosine of both sums, and cosine of ascent and gradient.

    Args:
      model: The exported model.
      batch: Rows, as inputs and labels by name.
      weights: The iterate before the step, as one vector.
      method: One of ``METHODS``.
      last: The noisy gradient of the step before.
    """
    inputs, labels = batch
    variables, radius = model.trainable_variables, METHODS[method]

    def gradient(row: int, at: np.ndarray) -> np.ndarray:
        _assign(variables, at)
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        with tf.GradientTape() as tape:
            loss = _LOSS(labels[row : row + 1, None], model(one, training=True))
        return _flat(tape.gradient(loss, variables))

    clipped, unclipped, plain = (np.zeros_like(weights) for _ in range(3))
    ascent = np.zeros_like(weights)
    for row in range(len(labels)):
        here = gradient(row, weights)
        plain += here
        uphill = here if method == "bam" else last
        ascent += (uphill / (np.linalg.norm(uphill) or 1.0)) if radius else 0.0
        moved = uphill * (radius / (np.linalg.norm(uphill) or 1.0))
        found = gradient(row, weights + moved) if radius else here
        unclipped += found
        clipped += found * min(1.0, CLIP / (float(np.linalg.norm(found)) or 1.0))
    bias = float(np.linalg.norm(clipped - unclipped))
    return bias, cosine(clipped, unclipped), cosine(ascent, plain)


def of_method(
    run: pathlib.Path, batches: pathlib.Path, every: int, method: str
) -> list:
    """Returns (step, `measure`) of every so many steps of a run.

    Args:
      run: Folder of the run, with all iterates.
      batches: Its batches.
      every: Distance of two measured steps.
      method: One of ``METHODS``.
    """
    model = keras.saving.load_model(run / "model.keras")
    divisor = read_manifest(batches).plan.expected_batch_size
    found, before = [], None
    for batch in read_batches(batches):
        if batch.step == 0:
            continue
        with np.load(run / "iterates" / f"step-{batch.step:08d}.npz") as arrays:
            names = sorted((n for n in arrays if "weight" in n), key=_number)
            weights = np.concatenate([arrays[n].ravel() for n in names]).astype("f8")
        if before is not None and batch.step % every == 0:
            real = batch.weight > 0
            columns = {name: value[real] for name, value in batch.columns.items()}
            rows = columns, columns.pop("label")
            last = (before - weights) / RATE
            far, *cosines = measure(model, rows, weights, method=method, last=last)
            found.append((batch.step, (far / divisor, *cosines)))
        before = weights
    return found


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def main() -> None:
    """Trains by each method, and prints and draws its bias."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--every", type=int, default=10)
    asked, of_train = common.parsed(parser)
    panels = ("absolute bias", "cosine of both sums", "cosine of ascent and gradient")
    figure, axes = common.new_axes(columns=len(panels))
    for method, radius in METHODS.items():
        folder = asked.out / method
        common.dpsgd(
            *("batches", "--input", asked.input, "--out", folder / "batches"),
            *("--batch-size", asked.batch_size, "--epochs", asked.epochs),
        )
        steps = read_manifest(folder / "batches").plan.num_steps
        common.dpsgd(
            *("train", "--batches", folder / "batches", "--out", folder / "run"),
            *("--method", method, *(x for f in _FLAGS[method] for x in (f, radius))),
            *("--optimizer", "sgd", "--learning-rate", RATE, "--l2-norm-clip", CLIP),
            *("--keep-last", steps, "--keep-every", 1, *of_train),
        )
        found = of_method(folder / "run", folder / "batches", asked.every, method)
        means = np.array([values for _, values in found]).mean(0)
        print(method, *(f"{n} {v:.3f}" for n, v in zip(panels, means, strict=True)))
        for place, name in enumerate(panels):
            points = [(step, values[place]) for step, values in found]
            axes[place].plot(*zip(*points, strict=True), label=method)
            axes[place].set(xlabel="step", ylabel=name)
    axes[0].legend()
    figure.savefig(asked.out / "bias.png")


if __name__ == "__main__":
    main()
