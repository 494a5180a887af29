"""The training methods of this package.

    dp-sgd        gradients at the weights theta
    bam           at theta moved by ``bam_radius`` along each example's own gradient
    dp-sat        at theta moved by ``sat_radius`` along the previous noisy gradient
    model-mix     at theta; steps start at hidden random mixtures of the two latest
                  iterates
    non-private   at theta, without clip and noise

The first three release noisy sums of clipped per-example gradients and have DP-SGD's
accounting.  ModelMix releases only iterates and has another accounting.

References:
  BAM: Knolle et al. (2023), arXiv:2308.12018; DP-SAT: Park et al. (2023),
  arXiv:2306.05651; ModelMix: Xiao, Wan and Devadas (2023), arXiv:2210.03843.  In these
  papers ``bam_radius`` is lambda, ``sat_radius`` rho, ``mix_width`` tau / eta, and
  ``linf_factor`` p.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accounting.core.claim import AUTO_CLIP
from accounting.core.validation import InputError
from trainer.core import claims
from trainer.settings.methods import (
    DP_SGD,
    NON_PRIVATE,
    Method,
    Setting,
    as_dp_sgd,
    register,
)

if TYPE_CHECKING:
    from accounting.core.theorem import Theorem
    from trainer.settings.train_settings import TrainSettings

#: Variants of BAM: a second gradient, or the exact derivative by a Hessian product.
BAM_SAM = "sam"
BAM_HVP = "hvp"
BAM_VARIANTS = (BAM_SAM, BAM_HVP)


def _load(place: str) -> Callable[[], Any]:
    """Returns a function that imports "module:attribute" when it is called."""
    module, attribute = place.split(":")
    return lambda: getattr(importlib.import_module(module), attribute)


def _reads_rows(settings: TrainSettings) -> None:
    """The ``whole_tables`` of a method whose step reads only its examples' rows."""
    del settings


register(
    DP_SGD,
    Method(
        summary="gradients at the weights",
        hooks=_load("trainer.methods.dp_sgd:DP_SGD_HOOKS"),
        whole_tables=_reads_rows,
        accounting=as_dp_sgd,
        sentence=lambda settings: "DP-SGD: per-example gradients",
        claim=None,
    ),
)


# -- BAM -------------------------------------------------------------------------------


def _bam_sentence(settings: Mapping[str, Any]) -> str:
    radius = f"bam_radius={settings['bam_radius']!r}"
    if settings["bam_variant"] == BAM_HVP:
        return (
            "BAM, variant hvp: per-example gradients of the loss plus "
            f"{radius} times its gradient's norm"
        )
    return (
        "BAM, variant sam: per-example gradients at the weights moved by "
        f"{radius} along the same example's gradient"
    )


def _bam_tables(settings: TrainSettings) -> str | None:
    if settings.method_settings["bam_variant"] == BAM_HVP:
        return "--bam-variant hvp has gradients of whole tables"
    return None


register(
    "bam",
    Method(
        summary="at weights moved along each example's gradient, at the same epsilon",
        hooks=_load("trainer.claims.bam:HOOKS"),
        whole_tables=_bam_tables,
        accounting=as_dp_sgd,
        sentence=_bam_sentence,
        claim=claims.MOVED_WEIGHTS,
        settings={
            "bam_radius": Setting(
                kind=float,
                metavar="LAMBDA",
                help="Distance that bam moves the weights, 0.005 to 0.02 in the paper.",
                at_least=0,
                needed="Published runs use 0.005 to 0.02.",
            ),
            "bam_variant": Setting(
                kind=str,
                help="Of bam.  sam (default): a second gradient; hvp: exact and "
                "slower, by Hessian products.",
                choices=BAM_VARIANTS,
                default=BAM_SAM,
            ),
        },
    ),
)


# -- DP-SAT ----------------------------------------------------------------------------


def _sat_sentence(settings: Mapping[str, Any]) -> str:
    return (
        "DP-SAT: per-example gradients at the weights moved by "
        f"sat_radius={settings['sat_radius']!r} along the previous noisy gradient"
    )


register(
    "dp-sat",
    Method(
        summary="at weights moved along the last noisy gradient, at the same epsilon",
        hooks=_load("trainer.claims.dp_sat:HOOKS"),
        whole_tables=lambda settings: "--method dp-sat moves every row at every step",
        accounting=as_dp_sgd,
        sentence=_sat_sentence,
        claim=claims.RELEASED_MOVES,
        settings={
            "sat_radius": Setting(
                kind=float,
                metavar="RHO",
                help="Distance that dp-sat moves the weights, 0.03 to 0.086 in the "
                "papers.",
                at_least=0,
                needed="Published runs use 0.03 to 0.086.",
            ),
        },
    ),
)


# -- ModelMix --------------------------------------------------------------------------


def _check_mixing(settings: TrainSettings) -> None:
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
    made: Theorem = _load("accounting.claims.model_mix.theorem:Mixing")()(
        l2_norm_clip=clip, **settings
    )
    return made


register(
    "model-mix",
    Method(
        summary="hidden mixing of iterates, for less Gaussian noise",
        hooks=_load("trainer.claims.model_mix:HOOKS"),
        whole_tables=lambda settings: (
            "--method model-mix mixes every row at every step"
        ),
        accounting=_mixing,
        sentence=lambda settings: "ModelMix: per-example gradients",
        claim=claims.HIDDEN_MIXTURES,
        check=_check_mixing,
        settings={
            "mix_width": Setting(
                kind=float,
                metavar="TAU",
                help="Least distance, in each coordinate, of the two iterates that "
                "model-mix mixes, over the learning rate.  Compare it with a mean "
                "gradient, clip norm over batch size: 0.05 to 0.15 in the paper, at "
                "clip norm 20 and batch size 1,500.",
                above=0,
                needed="It is compared with a mean gradient: published runs use 0.05 "
                "to 0.15 at a clip norm of 20 and 1,500 expected examples.",
            ),
            "linf_factor": Setting(
                kind=int,
                metavar="P",
                help="Of model-mix: clip each coordinate of one example's gradient to "
                "the clip norm over the root of P.  100 in the paper; 1 (default) has "
                "no effect.",
                at_least=1,
                default=1,
            ),
        },
    ),
)
register(
    NON_PRIVATE,
    Method(
        summary="no clip, no noise",
        hooks=_load("trainer.methods.dp_sgd:NON_PRIVATE_HOOKS"),
        whole_tables=_reads_rows,
        claim=None,
    ),
)
