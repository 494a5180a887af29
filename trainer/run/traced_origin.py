"""The parts of a run's origin (see ``origin``) that need the traced step.

Formal guarantees:
  - ``settle`` writes the origin of a new run, and refuses to resume a run if any part
    of its origin changed.
  - The digest is that of the executed step, which is traced once.
  - The values are those from before the first step, also in a resumed run.

Public: as in ``origin``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.core.run import graph_digest, origin
from trainer.core.run.captured_state import CapturedState
from trainer.core.run.origin import Origin
from trainer.methods import registry
from trainer.model import user_sources
from trainer.model.trainable_model import TrainableModel
from trainer.run import threads
from trainer.run.preflight import Checked
from trainer.tf_compat import raw_variable, tf


def find(
    checked: Checked,
    model: TrainableModel,
    optimizer: Any,
    state: CapturedState,
) -> Origin:
    """Returns the current origin of a run, before its first step.

    Args:
      checked: The request.
      model: The trained model.
      optimizer: A Keras optimizer.
      state: What the traced step of the model and the optimizer captures.
    """
    named = user_sources.named_in(checked.request.settings)
    return {
        **checked.here,
        "devices": _devices(),
        "threads": threads.current(),
        "code": user_sources.digests(
            {
                *(spec.partition(":")[0] for spec in named.values()),
                *registry.modules_of(checked.request.settings.method),
                *_made(model, optimizer),
            }
        ),
        "step": graph_digest.digest(state.function),
        # The key of the run covers the network's variables.
        "values": state.values(but=map(raw_variable, model.network.weights)),
    }


def settle(checked: Checked, found: Origin) -> None:
    """Writes the origin of a new run, or compares it with that of a resumed run.

    Args:
      checked: The request, whose run has a folder.
      found: The origin that ``find`` returned.

    Raises:
      InputError: the run began with another origin.
    """
    if checked.began_under is None:
        origin.write(checked.request.run, found)
    else:
        origin.check_traced(checked.began_under, found)


def _devices() -> list[str]:
    details = tf.config.experimental.get_device_details
    names = (details(one) for one in tf.config.list_physical_devices("GPU"))
    return sorted(
        f"{one.get('device_name')} {one.get('compute_capability')}" for one in names
    )


def _made(model: TrainableModel, optimizer: Any) -> Iterator[str]:
    """Yields the modules of the classes of all layers and of the optimizer."""
    layers = model.network._flatten_layers()
    for one in (*layers, optimizer):
        yield from (kind.__module__ for kind in type(one).__mro__)
