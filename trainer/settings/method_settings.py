"""The training method and its own settings.

    MethodSettings(method="bam", method_settings={"bam_radius": 0.02})

`methods` has the contract of a method, and `built_in_methods` those of this package.

Formal guarantees:
  - A setting belongs to its method: a setting of another method or of none is refused,
    as is a missing one that the method needs.
  - ``method_settings`` is complete: it has a checked value for every setting of the
    method, as have run record and statement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from accounting.core.validation import InputError
from trainer.settings import built_in_methods as built_in_methods  # registers them
from trainer.settings import methods
from trainer.settings.methods import DP_SGD as DP_SGD
from trainer.settings.methods import NON_PRIVATE as NON_PRIVATE
from trainer.settings.setting import Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A training method.  All public.

    Attributes:
      method: One of ``methods.names()``.
      method_settings: The method's own settings, by name; omitted ones get their
        defaults.

    Example:
      >>> MethodSettings(method="bam", method_settings={"bam_radius": 0.02})
      ... # doctest: +NORMALIZE_WHITESPACE
      MethodSettings(method='bam', method_settings={'bam_radius': 0.02, 'bam_variant':
      'sam'})
    """

    method: str = DP_SGD
    method_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        found = complete(self.method, self.method_settings)
        object.__setattr__(self, "method_settings", found)  # frozen


def complete(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checked value for every setting of a method.

    Args:
      method: Name of a registered method.
      given: Values by name; None for no value.

    Raises:
      InputError: no such method, a setting that it does not have, or a value that is
        missing or refused.
    """
    settings = methods.get(method).settings
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name not in settings:
            raise _not_its_own(method, name, value)
    return {
        name: _checked(method, name, setting, values.get(name))
        for name, setting in settings.items()
    }


def _not_its_own(method: str, name: str, value: Any) -> InputError:
    owner = methods.owners().get(name)
    remedy = "no method has it. Omit it."
    if owner is not None:
        remedy = f"it belongs to --method {owner}."
    return InputError(f"Expected no {name}={value} for method={method!r}; {remedy}")


def _checked(method: str, name: str, setting: Setting, value: Any) -> Any:
    if value is None and setting.needed is not None:
        raise InputError(
            f"Expected --{name.replace('_', '-')} for method={method!r}. "
            f"{setting.needed}"
        )
    if value is None:
        return setting.default
    setting.accept(name, value)
    return value


def check_described(method: str, described: Any) -> None:
    """Checks a method's settings in a run record.

    Args:
      method: Name of a registered method.
      described: The entry of the record.

    Raises:
      InputError: no such method, missing or unknown settings, or a refused value.
    """
    settings = methods.get(method).settings
    if not isinstance(described, dict) or set(described) != set(settings):
        raise InputError(
            f"Expected method_settings of method={method!r} to be "
            f"{', '.join(sorted(settings)) or 'empty'}."
        )
    for name, value in described.items():
        settings[name].accept(name, value)


def gradients_text(
    method: str,
    described: Mapping[str, Any],
    *,
    views: int = 1,
    rows_per_user: int = 1,
) -> str:
    """Returns what a private method clips, in words, for the privacy statement.

    Args:
      method: Name of a registered method.
      described: All of its settings.
      views: Views per example.
      rows_per_user: Largest number of rows per user, if examples are users.

    Raises:
      InputError: the method has no sentence.

    Example:
      >>> gradients_text("dp-sat", {"sat_radius": 0.03})
      'DP-SAT: per-example gradients at the weights moved by sat_radius=0.03 along the \
previous noisy gradient'
    """
    sentence = methods.get(method).sentence
    if sentence is None:
        raise InputError(
            f"Expected method={method!r} to say what it clips: no privacy statement "
            "can be made of it. Take a private --method."
        )
    text = sentence(described)
    if views > 1:
        text += f", each of the mean loss over {views} views of the example,"
    if rows_per_user > 1:
        text += f", each of the mean loss over at most {rows_per_user} rows of a user,"
    return text
