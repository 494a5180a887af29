"""What pictures owe their readers: all is named, and nothing hides another thing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure

import dpsgd
from tests.trainer.experiments.test_simulation import _report, _simulation
from trainer.experiments import compare_report
from trainer.experiments.compare import Outcome
from trainer.report.plots import plot_curve

PLAN = (
    "plan", "--num-examples=400", "--batch-size=40", "--epochs=2", "--delta=1e-5",
    "--plot=a.png",
)  # fmt: skip
SAMPLERS = ("deterministic", "persistent-shuffle", "dynamic-shuffle", "poisson")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[Figure]:
    """Figures that were written, laid out."""
    found: list[Figure] = []
    monkeypatch.chdir(tmp_path)

    def keep(figure: Figure, *_: Any, **__: Any) -> None:
        figure.draw_without_rendering()
        found.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def named(figure: Figure) -> list[str]:
    """The lines of the legend."""
    [legend] = figure.legends
    return [text.get_text().replace("\n", " ") for text in legend.get_texts()]


def renderer_of(figure: Figure) -> RendererBase:
    return figure.canvas.get_renderer()


def run(*arguments: str) -> str:
    done = CliRunner().invoke(dpsgd.cli, [*PLAN, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("question", ["--epsilon=3", "--noise-multiplier=0.7"])
def test_numbers_are_those_of_the_table_beside_their_bars(
    drawn: list[Figure], question: str
) -> None:
    table = run(question)
    [figure] = drawn
    [axes] = figure.axes
    assert set(named(figure)) == {"proven", "lower bound"}
    labels = axes.texts
    assert len(labels) == 6
    cells = re.findall(r"(?:\.\. )?(\d+\.\d{4}) │ [eul]", table)
    assert [label.get_text() for label in labels] == cells
    circles = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    assert circles
    for label, [(x, y)] in itertools.product(labels, circles):
        box = label.get_window_extent(renderer_of(figure)).padded(4)
        assert not box.contains(x, y)


def test_no_noise_is_drawn_as_infinite(drawn: list[Figure]) -> None:
    run("--noise-multiplier=0")
    [axes] = drawn[0].axes
    assert {label.get_text() for label in axes.texts} == {"infinite"}
    assert not drawn[0].legends


def test_lines_of_a_sweep_that_coincide_can_all_be_seen(drawn: list[Figure]) -> None:
    run("--epsilon=3", "--sweep=epochs")
    [figure] = drawn
    solid = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert tuple(line.get_label() for line in solid) == SAMPLERS
    # Later lines are on top.
    widths = [line.get_linewidth() for line in solid]
    assert widths == sorted(set(widths), reverse=True)
    assert all(each.get_zorder() == solid[0].get_zorder() for each in solid)
    lower = [f"{name}, necessary (lower bound)" for name in SAMPLERS[1:3]]
    assert {*SAMPLERS, *lower} <= set(named(figure))
    # The legend stands beside the axes: it covers no line.
    renderer = renderer_of(figure)
    box = figure.legends[0].get_window_extent(renderer)
    assert not box.overlaps(figure.axes[0].get_window_extent(renderer))


OUTCOME = Outcome(
    sampler="truncated-poisson",
    method="dp-sgd",
    weights="last",
    target_epsilon=3.0,
    noise_multiplier=0.7,
    epsilon=2.99801,
    epsilon_lower_bound=None,
    metric="auc",
    mean=0.8,
    stddev=0.01,
    num_seeds=2,
)


def outcomes(**changes: Any) -> list[Outcome]:
    plain = {"method": "non-private", "epsilon": None, "noise_multiplier": None}
    weak = {"sampler": "dynamic-shuffle", "epsilon": None, "epsilon_lower_bound": 6.999}
    return [
        dataclasses.replace(OUTCOME, **each, weights=weights, **changes)
        for each in ({}, plain, weak)
        for weights in ("last", "ema")
    ]


def test_a_comparison_names_all_and_rounds_to_the_safe_side(
    drawn: list[Figure],
) -> None:
    compare_report.plot(outcomes(), pathlib.Path("a.png"), title="T")
    [figure] = drawn
    assert set(named(figure)) == {
        "last", "ema", "last, non-private", "ema, non-private",
        "last, epsilon not proven", "ema, epsilon not proven",
    }  # fmt: skip
    ticks = [[t.get_text() for t in axes.get_xticklabels()] for axes in figure.axes]
    assert ticks == [["3.00"], ["≥ 6.99"]]
    assert figure.axes[0].get_ylabel() == "held-out AUC"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_seeds": 1, "stddev": None}, "1 seed"),
        ({}, "mean and standard deviation over 2 seeds"),
    ],
)
def test_one_seed_is_no_seeds(
    drawn: list[Figure], changes: dict[str, Any], says: str
) -> None:
    found = outcomes(**changes)
    compare_report.plot(found, pathlib.Path("a.png"), title="T")
    assert drawn[0].get_suptitle() == f"T\n{says}"
    assert f": {says}." in compare_report.markdown(found, title="T", picture="a.png")


def test_intervals_of_a_simulation_stand_beside_each_other(
    drawn: list[Figure],
) -> None:
    rates = [_simulation(rate, 0.6, 0.61, 0.62) for rate in (0.1, 0.2)]
    _report(*rates).plot(pathlib.Path("a.png"))
    [figure] = drawn
    lines = named(figure)
    assert {"one simulated run", "the line through them"} <= set(lines)
    assert sum("predicted" in line for line in lines) == 2
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    places = [tuple(line.get_xdata()) for line in crosses if len(line.get_xdata())]
    # Three sizes of two rates, with equal results.
    assert len(set(places)) == 6


def test_each_metric_of_a_curve_has_axes_of_its_own(drawn: list[Figure]) -> None:
    points = [{"step": s, "auc": None if s == 0 else 0.7, "loss": 1.0} for s in (0, 5)]
    plot_curve(points, pathlib.Path("a.png"), title="T")
    labels = [axes.get_ylabel() for axes in drawn[0].axes]
    assert labels == ["AUC on held-out examples", "loss on held-out examples"]
    values = drawn[0].axes[0].lines[0].get_ydata()
    assert np.array_equal(values, [np.nan, 0.7], equal_nan=True)


def test_an_audit_names_all_and_rounds_its_claim_up(drawn: list[Figure]) -> None:
    arguments = [
        "audit", "--sampler=poisson", "--num-examples=400", "--batch-size=20",
        "--epochs=1", "--epsilon=2", "--delta=1e-5", "--trials=200",
        "--plot=a.png", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(dpsgd.cli, arguments)
    claimed = json.loads(done.stdout)["claim"]["epsilon"]
    [figure] = drawn
    first, *others = named(figure)
    [found] = re.findall(r"epsilon ≤ ([\d.]+) at delta 1e-05", first)
    assert claimed <= float(found) <= claimed + 1e-4
    assert others == [
        "impossible if the claim is true", "perfect privacy",
        "found, with 95 % intervals",
    ]  # fmt: skip
