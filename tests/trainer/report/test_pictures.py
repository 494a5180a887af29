"""Pictures name everything that they show, and hide nothing."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

import dpsgd
from trainer.experiments.compare import NO_GUARANTEE, Outcome, report

PLAN = (
    "plan", "--num-examples=400", "--batch-size=40", "--epochs=2", "--delta=1e-5",
    "--plot=a.png",
)  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[Figure]:
    """Figures that were written, after layout."""
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


def run(*arguments: str) -> str:
    done = CliRunner().invoke(dpsgd.cli, [*PLAN, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_sweep_is_drawn_on_the_safe_side(drawn: list[Figure]) -> None:
    names = ("poisson", "dynamic-shuffle")
    samplers = [f"--sampler={name}" for name in names]
    table = run("--epsilon=3", "--sweep=epochs", "--values=1", *samplers)
    [figure] = drawn
    [axes] = figure.axes
    proven = [line for line in axes.lines if line.get_linestyle() != ":"]
    assert tuple(line.get_label() for line in proven) == names
    for line in proven:
        assert f"{line.get_ydata()[0]:.4f}" in table
    others = {"lower bound: no guarantee", "between the bounds: not known"}
    assert {*names, *others} <= set(named(figure))
    assert axes.get_title().startswith("noise multiplier at epsilon=3.0, delta=1e-05\n")
    assert "n=400 examples, b=40 per step, zero-out relation" in axes.get_title()


OUTCOME = Outcome(
    sampler="truncated-poisson",
    expected_batch_size=1024,
    num_epochs=1,
    method="dp-sgd",
    method_settings={},
    learning_rate=0.1,
    l2_norm_clip=1.0,
    weights="last",
    target_epsilon=3.0,
    delta=1e-6,
    noise_rule="own",
    guarantee="proven",
    noise_multiplier=0.7,
    epsilon=2.99801,
    epsilon_lower_bound=None,
    metric="auc",
    mean=0.8,
    stddev=0.01,
    num_seeds=2,
)
SHUFFLED = {"sampler": "dynamic-shuffle"}
OPTIMISTIC = {**SHUFFLED, "noise_rule": "optimistic", "guarantee": "no guarantee"}
PLAIN = {
    "method": "non-private", "target_epsilon": None, "noise_multiplier": None,
    "noise_rule": None, "guarantee": None,
}  # fmt: skip


def outcomes(**changes: Any) -> list[Outcome]:
    return [
        dataclasses.replace(OUTCOME, **each, **at, **changes)
        for each in ({}, SHUFFLED, OPTIMISTIC)
        for at in ({}, {"target_epsilon": 1.0}, {"num_epochs": 5})
    ] + [dataclasses.replace(OUTCOME, **PLAIN, **changes)]


LINES = [
    "truncated-poisson, epochs {}, dp-sgd, noise rule own",
    "dynamic-shuffle, epochs {}, dp-sgd, noise rule own",
    "dynamic-shuffle, epochs {}, dp-sgd, noise rule optimistic: no guarantee",
]


def draw(given: list[Outcome]) -> None:
    report(given).draw["comparison.png"](pathlib.Path("a.png"))


def test_a_comparison_has_a_line_for_each_combination_of_settings(
    drawn: list[Figure],
) -> None:
    draw(outcomes())
    [figure] = drawn
    [axes] = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "3"]
    assert axes.get_xlabel() == "epsilon"
    at = [line.format(epochs) for line in LINES for epochs in (1, 5)]
    assert named(figure) == [*at, "truncated-poisson, epochs 1, non-private"]
    assert "batch size 1,024, delta 1e-06" in figure.get_suptitle()


def test_lines_of_a_comparison_can_be_told_apart_without_colour(
    drawn: list[Figure],
) -> None:
    draw(outcomes())
    [legend] = drawn[0].legends
    handles = legend.legend_handles
    styles = {(h.get_marker(), h.get_linestyle()) for h in handles}
    assert len(styles) == len(handles) == 7
    # Nothing is proven of the optimistic ones: their points are hollow, here and there.
    hollow = [handle.get_markerfacecolor() == "white" for handle in handles]
    assert hollow == ["optimistic" in line for line in named(drawn[0])]
    assert sum(hollow) == 2
    markers = [
        each.get_marker() for each in handles if NO_GUARANTEE in each.get_label()
    ]
    points = [x for x in drawn[0].axes[0].lines if x.get_marker() in markers]
    assert len(points) > 2
    assert {line.get_markerfacecolor() for line in points} == {"white"}


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
