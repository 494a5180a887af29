"""The contract of a training method, and the registry of methods.

A method has two sides.  `Method` needs no TensorFlow: settings with their flags, what
the method refuses, its accounting, and its sentence in the privacy statement.
``Method.hooks`` loads `trainer.methods.base.Hooks`, which define a step.

The methods of this package are in `built_in_methods`.  Another method calls `register`,
which makes it known to ``train`` and the command line, with its settings and flags.

Formal guarantees:
  - Nothing by default: a method without accounting or without a sentence gets no
    epsilon and no statement; an unknown method gets no gradients either.
  - One meaning per name: no two methods share a name or the name of a setting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accounting.core.validation import InputError, check_choice
from trainer.core import claims
from trainer.core.claims import NON_PRIVATE as NON_PRIVATE
from trainer.settings.setting import Setting as Setting

if TYPE_CHECKING:
    from accounting.core.theorem import Theorem
    from trainer.settings.train_settings import TrainSettings

#: The default method, and the one without clip and noise.
DP_SGD = "dp-sgd"


#: (settings of the method, l2_norm_clip, the run's ``describe_optimizer()`` or None for
#: a plan without a run) -> the method's theorem; None if DP-SGD's accounting holds.
Accounting = Callable[
    [Mapping[str, Any], float | str, "Mapping[str, Any] | None"], "Theorem | None"
]


def as_dp_sgd(
    settings: Mapping[str, Any], clip: float | str, optimizer: Mapping[str, Any] | None
) -> None:
    """The accounting of a method that releases noisy sums of clipped gradients.

    Epsilon does not depend on the arguments; see `theorem_of`.

    Args:
      settings: Settings of the method.
      clip: Bound on the L2 norm of one example's gradient, or "auto".
      optimizer: Description of the optimizer, which is post-processing.
    """
    del settings, clip, optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A training method.  To ask for an attribute that is None is an InputError.

    Attributes:
      summary: A few words for the help of ``--method``.
      hooks: Returns its `trainer.methods.base.Hooks`; loads TensorFlow.
      whole_tables: Settings -> why a step reads whole embedding tables; None if it
        reads only its examples' rows.
      accounting: Its accounting; `as_dp_sgd` if it releases noisy sums.
      sentence: Its settings -> what is clipped, in words: a function of one example
        and of earlier releases.
      settings: Its own settings, by name.
      claim: Name of what its privacy relies on besides the core; None for nothing, as
        of the core's own methods alone.
      check: Raises an InputError for settings of a run that it does not support.
    """

    summary: str
    hooks: Callable[[], Any]
    whole_tables: Callable[[TrainSettings], str | None]
    accounting: Accounting | None = None
    sentence: Callable[[Mapping[str, Any]], str] | None = None
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    claim: str | None = claims.OTHER_METHOD
    check: Callable[[TrainSettings], None] = lambda settings: None

    @property
    def has_dp_sgd_accounting(self) -> bool:
        """Whether it releases noisy sums and therefore has DP-SGD's epsilon."""
        return self.accounting is as_dp_sgd

    @property
    def has_theorem(self) -> bool:
        """Whether it has another accounting than DP-SGD."""
        return self.accounting is not None and not self.has_dp_sgd_accounting


_ENTRIES: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Registers a method in this process.

    Args:
      name: Name in settings and ``--method``.
      method: The method.

    Raises:
      InputError: the name of the method or of a setting is taken, or it names no claim.
    """
    if name in _ENTRIES:
        raise InputError(
            f"Expected method={name!r} not to be registered yet. Take another name."
        )
    if method.claim is None and name not in (DP_SGD, NON_PRIVATE):
        raise InputError(
            f"Expected claim=None of method={name!r} to be a name: the core does not "
            f"vouch for it. Omit it, for {claims.OTHER_METHOD!r}."
        )
    for own in method.settings:
        if own in owners() or not own.isidentifier():
            raise InputError(
                f"Expected setting {own!r} of method={name!r} to be an identifier that "
                "no other method's setting has. Take another name."
            )
    _ENTRIES[name] = method


def names() -> tuple[str, ...]:
    """Returns the names of the registered methods, in order of registration."""
    return tuple(_ENTRIES)


def with_dp_sgd_accounting() -> tuple[str, ...]:
    """Returns the names of the methods that have DP-SGD's epsilon."""
    return tuple(n for n, method in _ENTRIES.items() if method.has_dp_sgd_accounting)


def owners() -> dict[str, str]:
    """Returns the mapping from every setting to its method."""
    return {own: name for name, method in _ENTRIES.items() for own in method.settings}


def own_settings() -> Iterator[tuple[str, Setting]]:
    """Yields the settings of all methods, by name."""
    for method in _ENTRIES.values():
        yield from method.settings.items()


def get(name: str) -> Method:
    """Returns the method with a name.

    Raises:
      InputError: no such method.
    """
    remedy = "Import the module that registers it, if it is yours."
    return _ENTRIES[check_choice("method", name, names(), remedy=remedy)]


def theorem_of(
    name: str,
    settings: Mapping[str, Any],
    l2_norm_clip: float | str,
    optimizer: Mapping[str, Any] | None = None,
) -> Theorem | None:
    """Returns the theorem of a method; None if DP-SGD's accounting holds.

    Args:
      name: Name of the method.
      settings: All of its settings.
      l2_norm_clip: Bound on the L2 norm of one example's gradient, or "auto".
      optimizer: The run's ``TrainSettings.describe_optimizer()``; None for a plan
        without a run.

    Raises:
      InputError: no such method, or it has no accounting.
    """
    accounting = get(name).accounting
    if accounting is None:
        raise InputError(
            f"Expected method={name!r} to say how it is accounted for: no epsilon is "
            "known for it. Take a private --method."
        )
    return accounting(settings, l2_norm_clip, optimizer)
