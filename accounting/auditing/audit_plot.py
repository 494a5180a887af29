"""Plots an audit: the error rates found, and those that the claim allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from accounting.auditing.audit import USUAL_CONFIDENCE, Verdict, percent
from accounting.core.intervals import upper_text
from accounting.plots import new_figure, save

_CLAIMED, _FOUND, _BAD = "#31688e", "#d95f02", "#b2182b"


def draw(verdict: Verdict, title: str, path: Path) -> None:
    """Draws the error rates twice: all of them, and where false positives are rare.

    If the claim is true, no test has error rates in the shaded regions.

    Args:
      verdict: A result of `audit.judge`.
      title: Title of the figure.
      path: Where to write; the suffix gives the format.

    Raises:
      InputError: the folder does not exist, or the format is unknown.
    """
    figure, (left, right) = new_figure(9.6, 5.2, columns=2)
    least = 0.5 / verdict.trials
    fpr = np.geomspace(least, 1.0, 500)
    fnr = verdict.claim.profile.least_fnr(fpr)
    left.plot(fpr, fnr, color=_CLAIMED, label=_claimed(verdict))
    impossible = "impossible if the claim is true"
    left.fill_between(fpr, 0, fnr, color=_CLAIMED, alpha=0.15, lw=0, label=impossible)
    left.plot(fpr, 1 - fpr, ":", color="0.5", label="perfect privacy")
    right.plot(fpr, 1 - fnr, color=_CLAIMED)
    right.fill_between(fpr, 1 - fnr, 1, color=_CLAIMED, alpha=0.15, lw=0)
    right.plot(fpr, fpr, ":", color="0.5")
    false = np.array([point.fpr for point in verdict.points])
    missed = np.array([point.fnr for point in verdict.points])
    _add_points(left, false, missed)
    # The true positive rate is 1 - FNR: its bounds are in the opposite order.
    _add_points(right, np.maximum(false, least), np.maximum(1 - missed[:, ::-1], least))
    left.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), title="all errors")
    left.set_ylabel("the example taken for a ghost")
    # On a logarithmic axis, no error is drawn as half an error in all trials.
    ends = (least * 0.7, 1.4)
    right.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title="rare errors")
    right.set_ylabel("the example recognised")
    for axes in (left, right):
        axes.set_xlabel("ghosts taken for the example")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=2
    )
    color = _BAD if verdict.violated else "black"
    figure.suptitle(f"{title}\n{verdict.text}", size=10, color=color)
    save(figure, path)


def _claimed(verdict: Verdict) -> str:
    claim = verdict.claim
    return f"claimed: epsilon ≤ {upper_text(claim.epsilon)} at delta {claim.delta!r}"


def _add_points(axes: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Draws rates with intervals; columns are low, rate, high."""

    def bars(rates: np.ndarray) -> np.ndarray:
        return np.stack([rates[:, 1] - rates[:, 0], rates[:, 2] - rates[:, 1]])

    axes.errorbar(
        x[:, 1],
        y[:, 1],
        xerr=bars(x),
        yerr=bars(y),
        fmt="o",
        markersize=3,
        linewidth=0.8,
        color=_FOUND,
        label=f"found, with {percent(USUAL_CONFIDENCE)} intervals",
    )
