"""Simulations at constant total noise: runs, reports, refusals and resumption."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from accounting.planning.tan import Configuration
from tests.trainer.conftest import write_held_out
from trainer.cli.commands import account
from trainer.core.run.run_record import read_run
from trainer.papers import simulation_report
from trainer.papers.cli.commands import simulate
from trainer.papers.extrapolation import fit_line
from trainer.papers.settings import SimulationSettings
from trainer.papers.simulate import Simulator, init_seed
from trainer.papers.simulation import Point, Protocol, Simulation, best
from trainer.settings.train_settings import TrainSettings

ROOT = pathlib.Path(__file__).parents[3]
SMALL = ["--hidden=4", "--embedding-dim=2", "--eval-every=100"]
REFERENCE = Configuration(
    plan=DpSgdPlan(
        sampler="poisson", num_examples=400, expected_batch_size=64, num_steps=6
    ),
    noise_multiplier=2.5,
)
TRAINING = TrainSettings(noise_multiplier=2.5, target_delta=1e-3, l2_norm_clip=1.0)


def _protocol(
    reference: Configuration = REFERENCE, epsilon: float = 3.0, **changes: Any
) -> Protocol:
    fields = {
        "source": "", "held_out": pathlib.Path(), "out": pathlib.Path(), "seeds": 2,
        "training": TRAINING, "expected_batch_size": 64, "num_steps": 6,
        "small_batch_sizes": (16, 8, 32),
    }  # fmt: skip
    settings = SimulationSettings(**{**fields, **changes})
    return Protocol(settings=settings, reference=reference, epsilon=epsilon)


def _simulation(rate: float, *means: float, shift: float = 0.001) -> Simulation:
    points = tuple(
        Point(
            expected_batch_size=one.plan.expected_batch_size,
            noise_multiplier=one.noise_multiplier,
            values=(mean - shift, mean + shift),
        )
        for one, mean in zip(_protocol().configurations, means, strict=True)
    )
    line = fit_line((8, 8, 16, 16, 32, 32), [v for p in points for v in p.values])
    return Simulation(
        learning_rate=rate,
        points=points,
        line=line,
        prediction=line.predict(64, confidence=0.95),
    )


def _report(*simulations: Simulation, **changes: Any) -> Any:
    from trainer.run import privacy

    protocol = _protocol(**changes)
    statement = privacy.plan_statement(
        protocol.reference.plan,
        noise_multiplier=protocol.reference.noise_multiplier,
        l2_norm_clip=1.0,
        delta=1e-3,
    )
    return simulation_report.report(protocol, simulations, statement)


def test_cost_is_in_examples_of_the_reference() -> None:
    # (8 + 16 + 32) x 2 seeds x 2 rates over 64.
    assert _protocol(learning_rates=(0.1, 0.2)).cost == pytest.approx(3.5)


@pytest.mark.parametrize(("metric", "rate"), [("auc", 0.2), ("log_loss", 0.1)])
def test_the_best_prediction_wins_whichever_way_is_better(
    metric: str, rate: float
) -> None:
    # The first starts higher and grows less.
    found = [_simulation(0.1, 0.60, 0.61, 0.62), _simulation(0.2, 0.58, 0.61, 0.64)]
    assert best(found, metric).learning_rate == rate


def test_every_size_and_seed_has_initial_weights_of_its_own() -> None:
    configurations = [*_protocol().configurations, REFERENCE]
    seeds = [init_seed(one, REFERENCE, s) for one in configurations for s in range(9)]
    assert len(set(seeds)) == len(seeds)


def test_the_report_claims_no_epsilon_for_small_runs() -> None:
    report = _report(_simulation(0.1, 0.60, 0.61, 0.62))
    fields = report.to_json()
    for point in fields["simulations"][0]["points"]:
        assert point["is_private"] is False
        assert not any("epsilon" in name for name in point)
    rows = [line.split(" | ") for line in report.markdown().splitlines()]
    cells = {row[1]: row[3] for row in rows if len(row) == 5}
    assert cells["8"] == cells["16"] == cells["32"] == "none"
    assert report.notes[0].startswith("NOT PRIVATE")


def test_the_epsilon_of_the_reference_is_the_accountants() -> None:
    report = _report(_simulation(0.1, 0.60, 0.61, 0.62))
    fields = report.to_json()["reference"]
    true = accountant.epsilon(
        REFERENCE.plan, noise_multiplier=2.5, delta=1e-3
    ).guarantee
    assert fields["privacy"]["epsilon"] == pytest.approx(true)
    assert fields["tan"]["epsilon_estimate"] != pytest.approx(true, rel=1e-3)
    assert fields["tan"]["is_guarantee"] is False


def test_a_warning_outside_of_tans_range_and_none_inside() -> None:
    found = _simulation(0.1, 0.60, 0.61, 0.62)
    low = dataclasses.replace(REFERENCE, noise_multiplier=0.55)
    warned = [note for note in _report(found, reference=low).notes if "below 2" in note]
    assert len(warned) == 1
    assert "eta does not determine epsilon" in warned[0]
    assert not any("below 2" in note for note in _report(found).notes)


def test_points_that_bend_are_told_of() -> None:
    bent = _simulation(0.1, 0.60, 0.64, 0.60)
    assert any("deviate" in note for note in _report(bent).notes)
    straight = _simulation(0.1, 0.60, 0.61, 0.62)
    assert not any("deviate" in note for note in _report(straight).notes)


def test_choosing_a_learning_rate_is_told_to_cost_privacy() -> None:
    one, two = _simulation(0.1, 0.60, 0.61, 0.62), _simulation(0.2, 0.5, 0.51, 0.52)
    assert "costs privacy" in _report(one, two).notes[-1]
    assert not any("costs privacy" in note for note in _report(one).notes)


def test_a_line_that_disagrees_with_the_largest_simulated_size_is_told_of() -> None:
    low, flat = _simulation(0.3, 0.46, 0.51, 0.56), _simulation(0.1, 0.61, 0.62, 0.63)
    steepest = _simulation(0.9, 0.4, 0.5, 0.6)
    assert best([flat, steepest], "auc") is steepest
    report = _report(flat, steepest)
    assert report.to_json()["best_learning_rate_simulated"] == 0.1
    assert any("At 32, the largest" in note for note in report.notes)
    assert not any("the largest" in note for note in _report(low, flat).notes)


def _simulate(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, list(arguments))


@pytest.fixture
def common(
    lean_results: None,
    warm_starts: None,
    tmp_path: pathlib.Path,
    rows: Callable[..., np.ndarray],
    held_out: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """A simulation of 3 small runs."""
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    source = write_held_out(tmp_path / "train", rows(400))
    return [
        f"--input={source}", f"--eval={held_out}", f"--out={tmp_path / 'out'}",
        "--batch-size=32", "--num-steps=6", "--noise-multiplier=2.5", "--delta=1e-3",
        "--seeds=1", "--l2-norm-clip=1", "--small-batch-sizes=4,8,16", *SMALL,
    ]  # fmt: skip


@pytest.mark.thorough
def test_from_batches_to_prediction_and_once_more(
    common: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _simulate(*common, "--json")
    assert first.exception is None, first.output
    out, found = tmp_path / "out", json.loads(first.stdout)
    (one,) = found["simulations"]
    # What ran is what is said, and has the total noise of the reference.
    for point in one["points"]:
        size = point["expected_batch_size"]
        for seed, value in enumerate(point["values"]):
            run = out / f"b{size}/runs/truncated-poisson-dp-sgd-seed{seed}-lr0.01"
            record, manifest = read_run(run)
            assert record.noise_multiplier == pytest.approx(2.5 * size / 32)
            assert (manifest.plan.expected_batch_size, manifest.plan.num_steps) == (
                size,
                6,
            )
            assert record.simulates == "expected_batch_size=32, noise_multiplier=2.5"
            assert json.loads((run / "metrics.json").read_bytes())["auc"] == value
    pairs = [(p["expected_batch_size"], v) for p in one["points"] for v in p["values"]]
    slope, intercept = np.polyfit(
        np.log2([p for p, _ in pairs]), [v for _, v in pairs], 1
    )
    assert one["prediction"]["mean"] == pytest.approx(intercept + slope * 5)
    assert found["cost_in_reference_runs"] == pytest.approx((4 + 8 + 16) / 32)
    assert json.loads((out / "simulation.json").read_bytes()) == found
    assert (out / "simulation.png").read_bytes().startswith(b"\x89PNG")
    assert "NOT PRIVATE" in first.stderr
    assert "NOT PRIVATE" in (out / "simulation.md").read_text()
    _check_statement(run, size=16)
    _check_taken_up_again(common, found, monkeypatch)


def _check_statement(run: pathlib.Path, *, size: int) -> None:
    """The statement of a small run is the accountant's: next to no privacy."""
    stated = CliRunner().invoke(account, [os.fspath(run), "--json"])
    assert stated.exception is None, stated.output
    assert "simulates expected_batch_size=32" in stated.stderr
    fields = json.loads(stated.stdout)
    plan = DpSgdPlan.from_json(fields["plan"])
    assert plan.expected_batch_size == size
    true = accountant.epsilon(
        plan, noise_multiplier=2.5 * size / 32, delta=1e-3
    ).guarantee
    assert fields["epsilon"] == pytest.approx(true)


def _check_taken_up_again(
    common: list[str], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small runs are not made again, and other plans are refused."""
    monkeypatch.setattr("trainer.experiments.comparison.runs.train_here", None)
    again = _simulate(*common)
    assert again.exception is None, again.output
    assert (
        f"{found['simulations'][0]['prediction']['mean']:.4f} predicted" in again.stdout
    )
    other = _simulate(*common, "--num-steps=7")
    assert isinstance(other.exception, InputError)
    assert "they have others" in str(other.exception)


def test_an_unknown_metric_is_refused_with_those_that_are_there() -> None:
    simulator = Simulator(_protocol(metric="f1"), print)
    with pytest.raises(InputError, match=r"metric='f1'.*auc"):
        simulator._value({"auc": 0.5, "log_loss": None, "aggregates": {}})
