"""Training methods: their contract, their registry, and those of this package.

    dp-sgd        gradients at the weights theta
    bam           at theta moved by ``bam_radius`` along each example's own gradient
    dp-sat        at theta moved by ``sat_radius`` along the previous noisy gradient
    model-mix     at theta; steps start at hidden random mixtures of the two latest
                  iterates
    non-private   at theta, without clip and noise

The first three release noisy sums of clipped per-example gradients and have DP-SGD's
accounting.  ModelMix releases only iterates and has another accounting.

A method has two sides.  `Method` needs no TensorFlow: settings with their options, what
the method refuses, its accounting, and its sentence in the privacy statement.
``Method.hooks`` loads `trainer.run.hooks.Hooks`, which define a step.  Another
method calls `register`, which makes it known to ``train`` and the command line.

Formal guarantees:
  - Nothing by default: a method without accounting or without a sentence gets no
    epsilon and no statement; an unknown method gets no gradients either.
  - One meaning per name: no two methods share a name or the name of a setting.
  - A setting belongs to its method: a setting of another method or of none is refused,
    as is a missing one that the method needs.
  - ``method_settings`` is complete: it has a checked value for every setting of the
    method, as have run record and statement.

References:
  BAM: Knolle et al. (2023), arXiv:2308.12018; DP-SAT: Park et al. (2023),
  arXiv:2306.05651; ModelMix: Xiao, Wan and Devadas (2023), arXiv:2210.03843.  In these
  papers ``bam_radius`` is lambda, ``sat_radius`` rho, ``mix_width`` tau / eta, and
  ``linf_factor`` p.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from cyclopts import Group, Parameter
from pydantic import AfterValidator, SkipValidation

from accounting.core.claim import AUTO_CLIP
from accounting.core.settings import (
    Field,
    Settings,
    annotated_fields,
    checked,
    one_of,
)
from accounting.core.validation import InputError, check_choice, did_you_mean
from trainer.core import claim_names
from trainer.core.claim_names import NON_PRIVATE as NON_PRIVATE
from trainer.model.user_code import check_name

if TYPE_CHECKING:
    from accounting.core.claim import Theorem

#: Groups of the settings in the help.
TRAINING = Parameter(group=Group("Training", sort_key=3))
MODEL = Parameter(group=Group("Model and loss", sort_key=4))
AVERAGES = Parameter(
    group=Group("Averages of the iterates, at no further cost", sort_key=5)
)


def code(name: str, *names: str) -> AfterValidator:
    """Returns the check of a setting that is ``module:function``.

    Args:
      name: Name of the setting.
      *names: Names that are accepted, too.
    """

    def check(value: str | None) -> str | None:
        if value is not None and (":" in value or not names):
            check_name(value, name)
        elif value is not None:
            check_choice(name, value, (*names, "module:function"))
        return value

    return AfterValidator(check)


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
      hooks: Returns its `trainer.run.hooks.Hooks`; loads TensorFlow.
      whole_tables: `TrainSettings` -> why a step reads whole tables; None if it
        reads only its examples' rows.
      accounting: Accounting of the method; `as_dp_sgd` if it releases noisy sums.
      sentence: Its settings -> what is clipped, in words: a function of one example
        and of earlier releases.
      settings: A dataclass of its own settings; see `accounting.core.settings`.
      claim: Name of what its privacy relies on besides the core; None for nothing, as
        of the core's own methods alone.
      check: Raises an InputError for `TrainSettings` of a run that it does not support.
    """

    hooks: Callable[[], Any]
    whole_tables: Callable[[Any], str | None]
    accounting: Accounting | None = None
    sentence: Callable[[Mapping[str, Any]], str] | None = None
    settings: type = Settings
    claim: str | None = claim_names.OTHER_METHOD
    check: Callable[[Any], None] = lambda settings: None

    @property
    def has_dp_sgd_accounting(self) -> bool:
        """Whether it releases noisy sums and therefore has DP-SGD's epsilon."""
        return self.accounting is as_dp_sgd


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
            f"vouch for it. Omit it, for {claim_names.OTHER_METHOD!r}."
        )
    for own in settings_of(method):
        if own in owners():
            raise InputError(
                f"Expected setting {own!r} of method={name!r} to be a name that no "
                "other method's setting has. Take another name."
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
    return {
        own: name for name, method in _ENTRIES.items() for own in settings_of(method)
    }


def settings_of(method: Method) -> dict[str, Any]:
    """Returns the annotations of the method's own settings, by name."""
    return {} if method.settings is Settings else annotated_fields(method.settings)


def of_texts(
    given: Mapping[str, str], options: Callable[[], Iterable[str]]
) -> dict[str, Any]:
    """Returns the values of settings of methods that the command line gives as texts.

    Args:
      given: Texts by name.
      options: Returns the other options of the command, for a suggestion.

    Raises:
      InputError: no method has a setting, or its value is refused.
    """
    found = {}
    for option, text in given.items():
        name = option.replace("-", "_")
        if name not in (known := owners()):
            flags = [f"--{own.replace('_', '-')}" for own in known]
            raise InputError(
                f"Unknown option --{option.replace('_', '-')}. See --help."
                f"{did_you_mean(option, [*options(), *flags])}"
            )
        hint = settings_of(get(known[name]))[name]
        found[name] = checked(name, text, pydantic.TypeAdapter(hint).validate_strings)
    return found


def get(name: str) -> Method:
    """Returns the method with a name.

    Raises:
      InputError: there is no such method.
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
      InputError: there is no such method, or it has no accounting.
    """
    accounting = get(name).accounting
    if accounting is None:
        raise InputError(
            f"Expected method={name!r} to say how it is accounted for: no epsilon is "
            "known for it. Take a private --method."
        )
    return accounting(settings, l2_norm_clip, optimizer)


def _load(place: str) -> Callable[[], Any]:
    """Returns a function that imports "module:attribute" when it is called."""
    module, attribute = place.split(":")
    return lambda: getattr(importlib.import_module(module), attribute)


def _reads_rows(settings: Any) -> None:
    """The ``whole_tables`` of a method whose step reads only its examples' rows."""
    del settings


register(
    DP_SGD,
    Method(
        hooks=_load("trainer.run.hooks:DP_SGD_HOOKS"),
        whole_tables=_reads_rows,
        accounting=as_dp_sgd,
        sentence=lambda settings: "DP-SGD: per-example gradients",
        claim=None,
    ),
)


# -- BAM -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class BamSettings(Settings):
    """Settings of BAM.

    Attributes:
      bam_radius: Distance that bam moves the weights, 0.005 to 0.02 in the paper.
    """

    bam_radius: Annotated[float, Field(ge=0), "Published runs use 0.005 to 0.02."]


def _bam_sentence(settings: Mapping[str, Any]) -> str:
    return (
        "BAM: per-example gradients at the weights moved by "
        f"bam_radius={settings['bam_radius']!r} along the same example's gradient"
    )


register(
    "bam",
    Method(
        hooks=_load("trainer.claims.bam:HOOKS"),
        whole_tables=_reads_rows,
        accounting=as_dp_sgd,
        sentence=_bam_sentence,
        claim=claim_names.MOVED_WEIGHTS,
        settings=BamSettings,
    ),
)


# -- DP-SAT ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SatSettings(Settings):
    """Settings of DP-SAT.

    Attributes:
      sat_radius: Distance that dp-sat moves the weights, 0.03 to 0.086 in the papers.
    """

    sat_radius: Annotated[float, Field(ge=0), "Published runs use 0.03 to 0.086."]


def _sat_sentence(settings: Mapping[str, Any]) -> str:
    return (
        "DP-SAT: per-example gradients at the weights moved by "
        f"sat_radius={settings['sat_radius']!r} along the previous noisy gradient"
    )


register(
    "dp-sat",
    Method(
        hooks=_load("trainer.claims.dp_sat:HOOKS"),
        whole_tables=lambda settings: "--method dp-sat moves every row at every step",
        accounting=as_dp_sgd,
        sentence=_sat_sentence,
        claim=claim_names.RELEASED_MOVES,
        settings=SatSettings,
    ),
)


# -- ModelMix --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixSettings(Settings):
    """Settings of ModelMix.

    Attributes:
      mix_width: Least distance, in each coordinate, of the two iterates that model-mix
        mixes, over the learning rate.  Compare it with a mean gradient, clip norm over
        batch size: 0.05 to 0.15 in the paper, at clip norm 20 and batch size 1,500.
      linf_factor: Clip each coordinate of one example's gradient to the clip norm over
        the root of this number.  100 in the paper; 1 (default) has no effect.
    """

    mix_width: Annotated[
        float,
        Field(gt=0),
        "It is compared with a mean gradient: published runs use 0.05 to 0.15 at a "
        "clip norm of 20 and 1,500 expected examples.",
    ]
    linf_factor: Annotated[int, Field(ge=1)] = 1


def _check_mixing(settings: Any) -> None:
    # The coefficients are hidden: state that depends on them is not a function of
    # released iterates.
    why = "ModelMix's theorem is about plain SGD from the last two iterates"
    if settings.optimizer != "sgd":
        raise InputError(
            f"Expected --optimizer sgd for method={settings.method!r}, not "
            f"{settings.optimizer}: {why}."
        )
    if settings.l2_norm_clip == AUTO_CLIP:
        raise InputError(
            f"Expected l2_norm_clip='auto' to be a number for method="
            f"{settings.method!r}: its widths are in units of one clip norm. Give "
            "--l2-norm-clip 1."
        )
    if settings.train_over is not None:
        raise InputError(
            f"Expected no train_over={settings.train_over!r} for method="
            f"{settings.method!r}: {why}. Averages of iterates are possible without."
        )


def _mixing(
    settings: Mapping[str, Any], clip: float | str, optimizer: Mapping[str, Any] | None
) -> Theorem | None:
    # Other optimizers and averages may depend on the coefficients, which the theorem
    # requires to be hidden.  DP-SGD's bound holds whether they are or not.
    if optimizer is not None and (
        optimizer.get("name") != "sgd" or "train_over" in optimizer
    ):
        return None
    made: Theorem = _load("accounting.claims.model_mix:Mixing")()(
        l2_norm_clip=clip, **settings
    )
    return made


register(
    "model-mix",
    Method(
        hooks=_load("trainer.claims.model_mix:HOOKS"),
        whole_tables=lambda settings: (
            "--method model-mix mixes every row at every step"
        ),
        accounting=_mixing,
        sentence=lambda settings: "ModelMix: per-example gradients",
        claim=claim_names.HIDDEN_MIXTURES,
        check=_check_mixing,
        settings=MixSettings,
    ),
)
register(
    NON_PRIVATE,
    Method(
        hooks=_load("trainer.run.hooks:NON_PRIVATE_HOOKS"),
        whole_tables=_reads_rows,
        claim=None,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A training method.  All public.

    Attributes:
      method: dp-sgd, bam, dp-sat, model-mix or non-private.  bam is at weights
        moved along each example's gradient; dp-sat, at weights moved along the last
        noisy gradient; model-mix mixes iterates in secret, for less Gaussian noise;
        non-private has no clip and no noise.
      method_settings: The method's own settings, by name; omitted ones get their
        defaults.

    Example:
      >>> MethodSettings(method="bam", method_settings={"bam_radius": 0.02})
      MethodSettings(method='bam', method_settings={'bam_radius': 0.02})
    """

    method: Annotated[str, one_of("method", names), TRAINING] = DP_SGD
    method_settings: Annotated[
        Mapping[str, Any], SkipValidation, Parameter(parse=False)
    ] = dataclasses.field(default_factory=dict)

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
    entry = get(method)
    settings = settings_of(entry)
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name not in settings:
            raise _not_its_own(method, name, value)
    for field in dataclasses.fields(entry.settings) if settings else ():
        if field.default is dataclasses.MISSING and field.name not in values:
            notes = [n for n in typing.get_args(settings[field.name]) if type(n) is str]
            raise InputError(
                f"Expected --{field.name.replace('_', '-')} for method={method!r}. "
                f"{' '.join(notes)}".rstrip()
            )
    return dict(vars(entry.settings(**values)))


def _not_its_own(method: str, name: str, value: Any) -> InputError:
    owner = owners().get(name)
    remedy = "no method has it. Omit it."
    if owner is not None:
        remedy = f"it belongs to --method {owner}."
    return InputError(f"Expected no {name}={value} for method={method!r}; {remedy}")


def check_described(method: str, described: Any) -> None:
    """Checks a method's settings in a run record.

    Args:
      method: Name of a registered method.
      described: The entry of the record.

    Raises:
      InputError: no such method, missing or unknown settings, or a refused value.
    """
    settings = settings_of(get(method))
    if not isinstance(described, dict) or set(described) != set(settings):
        raise InputError(
            f"Expected method_settings of method={method!r} to be "
            f"{', '.join(sorted(settings)) or 'empty'}."
        )
    complete(method, described)


def gradients_text(
    method: str,
    described: Mapping[str, Any],
    *,
    views: int = 1,
) -> str:
    """Returns what a private method clips, in words, for the privacy statement.

    Args:
      method: Name of a registered method.
      described: All of its settings.
      views: Views per example.

    Raises:
      InputError: the method has no sentence.

    Example:
      >>> gradients_text("dp-sat", {"sat_radius": 0.03})
      'DP-SAT: per-example gradients at the weights moved by sat_radius=0.03 along the \
previous noisy gradient'
    """
    sentence = get(method).sentence
    if sentence is None:
        raise InputError(
            f"Expected method={method!r} to say what it clips: no privacy statement "
            "can be made of it. Take a private --method."
        )
    text = sentence(described)
    if views > 1:
        text += f", each of the mean loss over {views} views of the example,"
    return text
