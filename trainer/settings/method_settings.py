"""Which method trains, and the settings that belong to one method alone.

Three private methods release the same thing, noisy sums of clipped per-example
gradients, and have the same accounting.  They differ in where gradients are taken:

    dp-sgd        at the weights theta
    bam           uphill of theta, by ``bam_radius`` along each example's own gradient
    dp-sat        uphill of theta, by ``sat_radius`` along the previous noisy gradient
    model-mix     at theta; releases iterates alone, which start at hidden random
                  mixtures of the two latest ones, and has accounting of its own
    non-private   at theta, without clip and noise

References:
  BAM: Knolle et al. (2023), arXiv:2308.12018; DP-SAT: Park et al. (2023),
  arXiv:2306.05651; ModelMix: Xiao, Wan and Devadas (2023), arXiv:2210.03843.  The
  radius is lambda of the one paper and rho of the other, and of sharpness-aware
  minimisation; ``mix_width`` is tau / eta, and ``linf_factor`` is p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from accounting.validation import InputError, check_choice, check_float, check_int

DP_SGD = "dp-sgd"
BAM = "bam"
DP_SAT = "dp-sat"
MODEL_MIX = "model-mix"
NON_PRIVATE = "non-private"
METHODS = (DP_SGD, BAM, DP_SAT, MODEL_MIX, NON_PRIVATE)
#: Methods that release DP-SGD's noisy sums, and so have its accounting.
DP_SGD_RELEASES = (DP_SGD, BAM, DP_SAT)

#: A second gradient, or the exact derivative by a product with the Hessian.
BAM_SAM = "sam"
BAM_HVP = "hvp"
BAM_VARIANTS = (BAM_SAM, BAM_HVP)

#: Of each method, the settings that no other method has.
_OWN = {
    BAM: ("bam_radius", "bam_variant"),
    DP_SAT: ("sat_radius",),
    MODEL_MIX: ("mix_width", "linf_factor"),
}

#: What published runs used, to say where a setting is missing.
_USUAL = {
    "bam_radius": "Published runs use 0.005 to 0.02.",
    "sat_radius": "Published runs use 0.03 to 0.086.",
    "mix_width": (
        "It is compared with a mean gradient: published runs use 0.05 to 0.15 at a "
        "clip norm of 20 and 1,500 expected examples."
    ),
}
#: Settings that a method cannot do without.
_NEEDED = tuple(_USUAL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """How gradients are made.  All public.

    Attributes:
      method: One of ``METHODS``.
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
        check_choice("method", self.method, METHODS)
        for method, names in _OWN.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and method != self.method:
                    raise InputError(
                        f"Expected no {name}={value} for method={self.method!r}; it "
                        f"belongs to --method {method}."
                    )
                if name in _NEEDED and value is None and method == self.method:
                    flag = name.replace("_", "-")
                    raise InputError(
                        f"Expected --{flag} for method={self.method!r}. {_USUAL[name]}"
                    )
                if value is not None:
                    _check_value(name, value)
        if self.non_private_diagnostics and self.method == NON_PRIVATE:
            raise InputError(
                "Expected no --non-private-diagnostics for method='non-private': it "
                "measures the bias of clipping, and nothing is clipped."
            )

    @property
    def whole_tables_obstacle(self) -> str | None:
        """Why a step reads whole embedding tables; None if the method does not."""
        if self.method == DP_SAT:
            return "--method dp-sat moves every row at every step"
        if self.method == MODEL_MIX:
            return "--method model-mix mixes every row at every step"
        if self.bam_variant == BAM_HVP:
            return "--bam-variant hvp has gradients of whole tables"
        if self.non_private_diagnostics:
            return "--non-private-diagnostics reads rows beside the step"
        return None

    def describe_method(self) -> dict[str, Any]:
        """Returns the settings of the method alone, for the run record."""
        values = {name: getattr(self, name) for name in _OWN.get(self.method, ())}
        if self.method == BAM:
            values["bam_variant"] = self.bam_variant or BAM_SAM
        if self.method == MODEL_MIX:
            values["linf_factor"] = self.linf_factor or 1
        return values


def _check_value(name: str, value: Any) -> None:
    if name == "bam_variant":
        check_choice(name, value, BAM_VARIANTS)
    elif name == "linf_factor":
        check_int(name, value, at_least=1)
    elif name == "mix_width":
        check_float(name, value, above=0)
    else:
        check_float(name, value, at_least=0)


def check_described(method: str, described: Any) -> None:
    """Accepts what ``describe_method`` returns for ``method``.

    Raises:
      InputError: other names, or values that are refused.
    """
    names = set(_OWN.get(method, ()))
    if not isinstance(described, dict) or set(described) != names:
        raise InputError(
            f"Expected method_settings of method={method!r} to be "
            f"{', '.join(sorted(names)) or 'empty'}."
        )
    for name, value in described.items():
        _check_value(name, value)


def gradients_text(method: str, described: Mapping[str, Any]) -> str:
    """Returns what a private method clips, in words, for the privacy statement.

    Example:
      >>> gradients_text("dp-sat", {"sat_radius": 0.03})
      'DP-SAT: per-example gradients at the weights moved by sat_radius=0.03 along the \
previous noisy gradient'
    """
    if method == DP_SAT:
        return (
            "DP-SAT: per-example gradients at the weights moved by "
            f"sat_radius={described['sat_radius']!r} along the previous noisy gradient"
        )
    if method == BAM and described["bam_variant"] == BAM_HVP:
        return (
            "BAM, variant hvp: per-example gradients of the loss plus "
            f"bam_radius={described['bam_radius']!r} times its gradient's norm"
        )
    if method == BAM:
        return (
            "BAM, variant sam: per-example gradients at the weights moved by "
            f"bam_radius={described['bam_radius']!r} along the same example's gradient"
        )
    if method == MODEL_MIX:
        return "ModelMix: per-example gradients"
    return "DP-SGD: per-example gradients"
