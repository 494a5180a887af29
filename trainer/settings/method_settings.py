"""Which method trains, and the settings that belong to one method alone.

Three private methods release the same thing, noisy sums of clipped per-example
gradients, and have the same accounting.  They differ in where gradients are taken:

    dp-sgd        at the weights theta
    bam           uphill of theta, by ``bam_radius`` along each example's own gradient
    dp-sat        uphill of theta, by ``sat_radius`` along the previous noisy gradient
    model-mix     at theta; releases iterates alone, which start at hidden random
                  mixtures of the two latest ones, and has accounting of its own
    non-private   at theta, without clip and noise

A method is registered as a `Method`: its settings, what it releases and hence how it is
accounted for, its words in the privacy statement, and where its gradients are summed.
An optimizer of its own, as DP-SAT and ModelMix have, is wired in the trainer.

Formal guarantees:
  - nothing by default: a method that does not say how it is accounted for, or what it
    clips, gets no epsilon and no statement; an unknown one gets no gradients either.
  - one meaning per name: neither a method nor a setting has two owners.

References:
  BAM: Knolle et al. (2023), arXiv:2308.12018; DP-SAT: Park et al. (2023),
  arXiv:2306.05651; ModelMix: Xiao, Wan and Devadas (2023), arXiv:2210.03843.  The
  radius is lambda of the one paper and rho of the other, and of sharpness-aware
  minimisation; ``mix_width`` is tau / eta, and ``linf_factor`` is p.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from accounting.validation import InputError, check_choice, check_float, check_int

DP_SGD = "dp-sgd"
BAM = "bam"
DP_SAT = "dp-sat"
MODEL_MIX = "model-mix"
NON_PRIVATE = "non-private"
#: A second gradient, or the exact derivative by a product with the Hessian.
BAM_SAM = "sam"
BAM_HVP = "hvp"
BAM_VARIANTS = (BAM_SAM, BAM_HVP)

#: What a method releases: DP-SGD's noisy sums of clipped per-example gradients, or
#: iterates alone, from hidden mixtures of those before.
NOISY_SUMS = "noisy sums"
MIXED_ITERATES = "mixed iterates"
_OF_MIXING = {"mix_width", "linf_factor"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that one method alone has: a field of `MethodSettings`.

    Attributes:
      check: (name, value) -> raises InputError if the value is refused.
      default: What None stands for.
      needed: What published runs used, of a setting that must be given; else None.
    """

    check: Callable[[str, Any], object]
    default: Any = None
    needed: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What a training method brings.  Whatever is None is refused when asked for.

    Attributes:
      sums: Returns its `trainer.methods.base.Sums`; loads TensorFlow.
      whole_tables: Settings -> why a step reads whole embedding tables, or None if it
        reads the rows of its examples alone.
      releases: ``NOISY_SUMS`` or ``MIXED_ITERATES``, by which it is accounted for.
      sentence: What ``describe_method`` returns -> what is clipped, in words.
      settings: Its own settings, by name.

    Raises:
      InputError: it releases something else, or mixes without the settings of mixing.
    """

    sums: Callable[[], Any]
    whole_tables: Callable[[MethodSettings], str | None]
    releases: str | None = None
    sentence: Callable[[Mapping[str, Any]], str] | None = None
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.releases is not None:
            check_choice("releases", self.releases, (NOISY_SUMS, MIXED_ITERATES))
        if self.releases == MIXED_ITERATES and set(self.settings) != _OF_MIXING:
            raise InputError(
                f"Expected releases={self.releases!r} only beside the settings "
                f"{', '.join(sorted(_OF_MIXING))}, which its theorem asks for. Take "
                f"{NOISY_SUMS!r} if noisy sums are released."
            )


_ENTRIES: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Makes a method known in this process.

    Args:
      name: As settings will say it; it must not be taken.
      method: What it brings.

    Raises:
      InputError: the name or a setting is taken, or a setting is no field of
        `MethodSettings`.
    """
    if name in _ENTRIES:
        raise InputError(
            f"Expected method={name!r} not to be registered yet. Take another name."
        )
    fields = {field.name for field in dataclasses.fields(MethodSettings)}
    taken = {own for known in _ENTRIES.values() for own in known.settings}
    for own in method.settings:
        if own in taken or own not in fields:
            raise InputError(
                f"Expected setting {own!r} of method={name!r} to be a field of "
                "MethodSettings that no other method has. Add one there."
            )
    _ENTRIES[name] = method


def names() -> tuple[str, ...]:
    """Returns the methods that are registered, in order of registration."""
    return tuple(_ENTRIES)


def get(name: str) -> Method:
    """Returns what a method brings.

    Raises:
      InputError: no such method.
    """
    return _ENTRIES[check_choice("method", name, names())]


def released_by(name: str) -> str:
    """Returns what a method releases, by which it is accounted for.

    Raises:
      InputError: no such method, or it does not say.
    """
    found = get(name).releases
    if found is None:
        raise InputError(
            f"Expected method={name!r} to say what it releases: no epsilon is known "
            "for it. Take a private --method."
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """How gradients are made.  All public.

    Attributes:
      method: One of ``METHODS``, or registered with `register`.
      bam_radius: Length of the step along each example's gradient, at least 0; of
        method "bam", as the others below are of the method in their name.
      bam_variant: "sam" if None, or "hvp".
      sat_radius: Length of the step along the previous noisy gradient, at least 0.
      mix_width: Least distance of the two states that are mixed, in each coordinate,
        over the learning rate; above 0.  In the unit of a mean gradient: the sum over
        ``expected_batch_size``.
      linf_factor: Coordinates of one example's gradient are clipped to
        ``l2_norm_clip / sqrt(linf_factor)``; 1, which clips nothing, if None.
      non_private_diagnostics: Whether to write the bias of clipping, which is not
        private, into the private folder of the run.

    Raises:
      InputError: name, value, bound, remedy.
    """

    method: str = DP_SGD
    bam_radius: float | None = None
    bam_variant: str | None = None
    sat_radius: float | None = None
    mix_width: float | None = None
    linf_factor: int | None = None
    non_private_diagnostics: bool = False

    def __post_init__(self) -> None:
        get(self.method)  # refuses an unknown one
        for method, known in _ENTRIES.items():
            for name, setting in known.settings.items():
                self._check_setting(method, name, setting)
        if self.non_private_diagnostics and self.method == NON_PRIVATE:
            raise InputError(
                "Expected no --non-private-diagnostics for method='non-private': it "
                "measures the bias of clipping, and nothing is clipped."
            )

    def _check_setting(self, method: str, name: str, setting: Setting) -> None:
        value = getattr(self, name)
        if value is None:
            if setting.needed is not None and method == self.method:
                raise InputError(
                    f"Expected --{name.replace('_', '-')} for method={self.method!r}. "
                    f"{setting.needed}"
                )
            return
        if method != self.method:
            raise InputError(
                f"Expected no {name}={value} for method={self.method!r}; it belongs to "
                f"--method {method}."
            )
        setting.check(name, value)

    @property
    def whole_tables_obstacle(self) -> str | None:
        """Why a step reads whole embedding tables; None if the method does not."""
        obstacle = get(self.method).whole_tables(self)
        if obstacle is None and self.non_private_diagnostics:
            return "--non-private-diagnostics reads rows beside the step"
        return obstacle

    def describe_method(self) -> dict[str, Any]:
        """Returns the settings of the method alone, for the run record."""
        values = {}
        for name, setting in get(self.method).settings.items():
            value = getattr(self, name)
            values[name] = setting.default if value is None else value
        return values


def check_described(method: str, described: Any) -> None:
    """Accepts what ``describe_method`` returns for ``method``.

    Args:
      method: A registered one.
      described: What a run record says.

    Raises:
      InputError: no such method, other names, or values that are refused.
    """
    settings = get(method).settings
    if not isinstance(described, dict) or set(described) != set(settings):
        raise InputError(
            f"Expected method_settings of method={method!r} to be "
            f"{', '.join(sorted(settings)) or 'empty'}."
        )
    for name, value in described.items():
        settings[name].check(name, value)


def gradients_text(method: str, described: Mapping[str, Any]) -> str:
    """Returns what a private method clips, in words, for the privacy statement.

    Args:
      method: A registered one.
      described: What ``MethodSettings.describe_method`` returns for it.

    Raises:
      InputError: the method does not say.

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
    return sentence(described)


def _bam_sentence(described: Mapping[str, Any]) -> str:
    radius = f"bam_radius={described['bam_radius']!r}"
    if described["bam_variant"] == BAM_HVP:
        return (
            "BAM, variant hvp: per-example gradients of the loss plus "
            f"{radius} times its gradient's norm"
        )
    return (
        "BAM, variant sam: per-example gradients at the weights moved by "
        f"{radius} along the same example's gradient"
    )


def _sat_sentence(described: Mapping[str, Any]) -> str:
    return (
        "DP-SAT: per-example gradients at the weights moved by "
        f"sat_radius={described['sat_radius']!r} along the previous noisy gradient"
    )


def _bam_tables(settings: MethodSettings) -> str | None:
    if settings.bam_variant == BAM_HVP:
        return "--bam-variant hvp has gradients of whole tables"
    return None


def _sums(place: str) -> Callable[[], Any]:
    module, attribute = place.split(":")
    # By name: settings are read without TensorFlow.
    return lambda: getattr(importlib.import_module(module), attribute)


_RADIUS = functools.partial(check_float, at_least=0)

register(
    DP_SGD,
    Method(
        sums=_sums("trainer.methods.dp_sgd:CLIPPED"),
        whole_tables=lambda _: None,
        releases=NOISY_SUMS,
        sentence=lambda _: "DP-SGD: per-example gradients",
    ),
)
register(
    BAM,
    Method(
        sums=_sums("trainer.methods.bam:SUMS"),
        whole_tables=_bam_tables,
        releases=NOISY_SUMS,
        sentence=_bam_sentence,
        settings={
            "bam_radius": Setting(
                check=_RADIUS, needed="Published runs use 0.005 to 0.02."
            ),
            "bam_variant": Setting(
                check=functools.partial(check_choice, choices=BAM_VARIANTS),
                default=BAM_SAM,
            ),
        },
    ),
)
register(
    DP_SAT,
    Method(
        sums=_sums("trainer.methods.dp_sgd:CLIPPED"),
        whole_tables=lambda _: "--method dp-sat moves every row at every step",
        releases=NOISY_SUMS,
        sentence=_sat_sentence,
        settings={
            "sat_radius": Setting(
                check=_RADIUS, needed="Published runs use 0.03 to 0.086."
            ),
        },
    ),
)
register(
    MODEL_MIX,
    Method(
        sums=_sums("trainer.methods.dp_sgd:CLIPPED"),
        whole_tables=lambda _: "--method model-mix mixes every row at every step",
        releases=MIXED_ITERATES,
        sentence=lambda _: "ModelMix: per-example gradients",
        settings={
            "mix_width": Setting(
                check=functools.partial(check_float, above=0),
                needed="It is compared with a mean gradient: published runs use 0.05 "
                "to 0.15 at a clip norm of 20 and 1,500 expected examples.",
            ),
            "linf_factor": Setting(
                check=functools.partial(check_int, at_least=1), default=1
            ),
        },
    ),
)
register(
    NON_PRIVATE,
    Method(sums=_sums("trainer.methods.dp_sgd:UNCLIPPED"), whole_tables=lambda _: None),
)
METHODS = names()
#: Methods that release DP-SGD's noisy sums, and so have its accounting.
DP_SGD_RELEASES = tuple(n for n, m in _ENTRIES.items() if m.releases == NOISY_SUMS)
