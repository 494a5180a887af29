"""Settings of a run and of its method in one dict."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.settings.train_settings import TrainSettings

_NAMES = {field.name for field in dataclasses.fields(TrainSettings)}


def train_settings(**values: Any) -> TrainSettings:
    """Settings that ``TrainSettings`` lacks are those of the method."""
    own = {name: values.pop(name) for name in list(values) if name not in _NAMES}
    return TrainSettings(**values, method_settings=own)
