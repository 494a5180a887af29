"""Settings of a run in one dict, those of its method among them."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.settings.train_settings import TrainSettings

_NAMES = {field.name for field in dataclasses.fields(TrainSettings)}


def train_settings(**values: Any) -> TrainSettings:
    """What is no field of ``TrainSettings`` is a setting of the method alone."""
    own = {name: values.pop(name) for name in list(values) if name not in _NAMES}
    return TrainSettings(**values, method_settings=own)
