"""The model that the audit trains: one weight per canary, and a gradient that is known.

The loss of an example is minus ``label`` times the weight of its own, so that its
gradient is ``-label`` there and 0 elsewhere, whatever the weights are.  A canary has a
label far beyond the clip norm, and is clipped to it; a ghost has the label 0.
"""

from __future__ import annotations

from typing import Any

from pipelines.manifest import Manifest
from trainer.tf_privacy import keras

#: Column that says which weight is an example's own.
CANARY = "canary"


def weights(manifest: Manifest) -> Any:
    """Returns the model, whose weights are zeros at first: ``--model`` of the audit."""
    canary = keras.Input((), dtype="int32", name=CANARY)
    own = keras.layers.Embedding(
        manifest.plan.num_examples, 1, embeddings_initializer="zeros"
    )
    return keras.Model(canary, own(canary))


def linear(labels: Any, outputs: Any) -> Any:
    """Returns minus labels times outputs, shape (batch,): ``--loss`` of the audit."""
    return -labels * outputs[:, 0]
