"""The contract of a training method, and the methods that this process knows.

A method has two parts.  `Method` is what can be asked before any work and without
TensorFlow: its settings and their flags, what it refuses, how it is accounted for, and
its sentence in the privacy statement.  ``Method.hooks`` loads the other part, what a
step does: `trainer.methods.base.Hooks`.

The methods of this package are in `built_in_methods`.  A method from outside calls
`register`; then ``train`` and the command line know it, its settings and its flags.

Formal guarantees:
  - nothing by default: a method that does not say how it is accounted for, or what it
    clips, gets no epsilon and no statement; an unknown one gets no gradients either.
  - one meaning per name: neither a method nor a setting has two owners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accounting.validation import InputError, check_choice

if TYPE_CHECKING:
    from accounting.theorem import Theorem
    from trainer.settings.train_settings import TrainSettings

#: The default, and the one method without clip and noise.
DP_SGD = "dp-sgd"
NON_PRIVATE = "non-private"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of one method, and its flag.

    Attributes:
      kind: Type of the value that the flag takes.
      help: Help of the flag.
      metavar: How the help writes the value; None for its type.
      choices: The values it may have; None if ``check`` decides.
      check: (name, value) -> raises InputError if the value is refused.
      default: The value where none is given.
      needed: For a setting without a default, what to give; None if there is one.
    """

    kind: type
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    check: Callable[[str, Any], object] = lambda name, value: None
    default: Any = None
    needed: str | None = None

    def accept(self, name: str, value: Any) -> None:
        """Accepts a value.

        Args:
          name: Name of the setting.
          value: What is given for it.

        Raises:
          InputError: name, value, bound.
        """
        if self.choices is not None:
            check_choice(name, value, self.choices)
        self.check(name, value)


#: (settings of the method, l2_norm_clip, ``describe_optimizer`` of the run or None for
#: a plan that nobody executed) -> its theorem; None if DP-SGD's accounting holds.
Accounting = Callable[
    [Mapping[str, Any], float, "Mapping[str, Any] | None"], "Theorem | None"
]


def as_dp_sgd(
    settings: Mapping[str, Any], clip: float, optimizer: Mapping[str, Any] | None
) -> None:
    """The accounting of a method that releases noisy sums of clipped gradients.

    Args:
      settings: Settings of the method; epsilon does not depend on them.
      clip: Bound on the L2 norm of one example's gradient.
      optimizer: What makes iterates of noisy sums: post-processing.
    """
    del settings, clip, optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What a training method brings.  Whatever is None is refused when asked for.

    Attributes:
      summary: A few words for the help of ``--method``.
      hooks: Returns its `trainer.methods.base.Hooks`; loads TensorFlow.
      whole_tables: Settings -> why a step reads whole embedding tables, or None if it
        reads the rows of its examples alone.
      accounting: How it is accounted for; `as_dp_sgd` if it releases noisy sums.
      sentence: Its settings -> what is clipped, in words: a function of one example
        and of what was released before.
      settings: Its own settings, by name.
      check: Refuses settings of a run, with an InputError, that do not go with it.
    """

    summary: str
    hooks: Callable[[], Any]
    whole_tables: Callable[[TrainSettings], str | None]
    accounting: Accounting | None = None
    sentence: Callable[[Mapping[str, Any]], str] | None = None
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    check: Callable[[TrainSettings], None] = lambda settings: None

    @property
    def has_dp_sgd_accounting(self) -> bool:
        """Whether it releases noisy sums, and so has DP-SGD's epsilon."""
        return self.accounting is as_dp_sgd

    @property
    def has_theorem(self) -> bool:
        """Whether it has accounting of its own."""
        return self.accounting is not None and not self.has_dp_sgd_accounting


_ENTRIES: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Makes a method known in this process.

    Args:
      name: What settings and ``--method`` call it.
      method: What it brings.

    Raises:
      InputError: the name or a setting is taken.
    """
    if name in _ENTRIES:
        raise InputError(
            f"Expected method={name!r} not to be registered yet. Take another name."
        )
    for own in method.settings:
        if own in owners() or not own.isidentifier():
            raise InputError(
                f"Expected setting {own!r} of method={name!r} to be an identifier that "
                "no other method's setting has. Take another name."
            )
    _ENTRIES[name] = method


def names() -> tuple[str, ...]:
    """Returns the methods that are registered, in order of registration."""
    return tuple(_ENTRIES)


def with_dp_sgd_accounting() -> tuple[str, ...]:
    """Returns the methods that have DP-SGD's epsilon."""
    return tuple(n for n, method in _ENTRIES.items() if method.has_dp_sgd_accounting)


def owners() -> dict[str, str]:
    """Returns name of a setting -> the one method that has it."""
    return {own: name for name, method in _ENTRIES.items() for own in method.settings}


def own_settings() -> Iterator[tuple[str, Setting]]:
    """Yields the settings of all methods, by name."""
    for method in _ENTRIES.values():
        yield from method.settings.items()


def get(name: str) -> Method:
    """Returns what a method brings.

    Raises:
      InputError: no such method.
    """
    remedy = "Import the module that registers it, if it is yours."
    return _ENTRIES[check_choice("method", name, names(), remedy=remedy)]


def theorem_of(
    name: str,
    settings: Mapping[str, Any],
    l2_norm_clip: float,
    optimizer: Mapping[str, Any] | None = None,
) -> Theorem | None:
    """Returns the theorem of a method; None if DP-SGD's accounting holds.

    Args:
      name: Name of the method.
      settings: Its own, complete.
      l2_norm_clip: Bound on the L2 norm of one example's gradient.
      optimizer: What ``TrainSettings.describe_optimizer`` returns for the run; None of
        a plan that nobody executed.

    Raises:
      InputError: no such method, or it does not say.
    """
    accounting = get(name).accounting
    if accounting is None:
        raise InputError(
            f"Expected method={name!r} to say how it is accounted for: no epsilon is "
            "known for it. Take a private --method."
        )
    return accounting(settings, l2_norm_clip, optimizer)
