"""A simulation as JSON, as a table, as Markdown and as a plot."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from accounting.plots import new_figure
from pipelines.files.json_files import pretty_json
from pipelines.files.storage import write_atomically
from trainer.experiments.simulation import (
    Protocol,
    Simulation,
    best,
    best_simulated,
    undecided,
)
from trainer.model.metrics import in_words
from trainer.report import tables
from trainer.report.plots import DASHES, MARKERS, write_png

TITLE = "Small batches for large: the same total amount of noise"
NOT_PRIVATE = (
    "NOT PRIVATE: the simulated runs have next to no noise, and no epsilon is claimed "
    "for them. Simulate on public data, or account for each run as a release."
)
_HEURISTIC = (
    "So eta does not determine epsilon here; what remains is a heuristic of how "
    "training behaves."
)


class Report:
    """The report of a simulation.

    Args:
      protocol: What was simulated.
      simulations: One for each learning rate.
      statement: The privacy statement of the reference.
    """

    def __init__(
        self, protocol: Protocol, simulations: Sequence[Simulation], statement: Any
    ) -> None:
        self._protocol, self._settings = protocol, protocol.settings
        self._simulations = simulations
        self._statement = statement
        self._tan = protocol.reference.estimate(delta=self._settings.delta)
        self._best = best(simulations, self._settings.metric)
        self._best_simulated = best_simulated(simulations, self._settings.metric)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, without an epsilon of small runs."""
        protocol = self._protocol
        return {
            "reference": {
                "plan": protocol.reference.plan.to_json(),
                "noise_multiplier": protocol.reference.noise_multiplier,
                "privacy": self._statement.to_json(),
                "tan": {
                    "eta": self._tan.eta,
                    "epsilon_estimate": self._tan.epsilon,
                    "is_guarantee": False,
                    "warning": self._tan.warning,
                },
            },
            "method": self._settings.training.method,
            "metric": self._settings.metric,
            "weights": self._settings.weights,
            "simulations": [_simulation_json(one) for one in self._simulations],
            "best_learning_rate": self._best.learning_rate,
            "best_learning_rate_simulated": self._best_simulated.learning_rate,
            "cost_in_reference_runs": protocol.cost,
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Returns the notes that explain the table, most important first."""
        return [
            NOT_PRIVATE,
            self._reference_note(),
            *([f"{self._tan.warning} {_HEURISTIC}"] if self._tan.warning else []),
            self._interval_note(),
            self._cost_note(),
            *self._bend_notes(),
            *self._choice_notes(),
        ]

    def _reference_note(self) -> str:
        plan = self._protocol.reference.plan
        found = _rounded_up(self._statement.epsilon.upper)
        return (
            f"The reference, {plan.expected_batch_size:,} expected rows in "
            f"{plan.num_steps:,} steps at noise multiplier "
            f"{self._protocol.reference.noise_multiplier:.4f}, has epsilon {found} at "
            f"delta {self._settings.delta:g}, by the accountant. TAN's closed form "
            f"estimates {self._tan.epsilon:.2f} (eta {self._tan.eta:.4f})."
        )

    def _interval_note(self) -> str:
        sure = 100 * self._settings.confidence
        return (
            f"Rate: learning rate. Predicted: value of the line through the simulated "
            f"runs, with the {sure:g} % interval of one more run, if the line holds."
        )

    def _cost_note(self) -> str:
        runs = sum(len(p.values) for one in self._simulations for p in one.points)
        return (
            f"The {runs} simulated runs take the gradients of "
            f"{100 * self._protocol.cost:.3g} % of the examples of one reference run."
        )

    def _bend_notes(self) -> list[str]:
        return [
            f"At learning rate {one.learning_rate:g} the points deviate from a line (p "
            f"= {one.line.lack_of_fit:.2g}): prediction and interval are in doubt."
            for one in self._simulations
            if one.bends
        ]

    def _choice_notes(self) -> list[str]:
        if len(self._simulations) == 1:
            return []
        others = undecided(self._simulations, self._settings.metric)
        rates = ", ".join(f"{one.learning_rate:g}" for one in others)
        return [
            f"Best predicted: learning rate {self._best.learning_rate:g}. The best of "
            f"{len(self._simulations)} looks better than it is."
            + (f" Its interval overlaps with that of {rates}: " if others else "")
            + ("the simulation does not decide between them." if others else ""),
            *self._disagreement(),
            "Choosing on private data costs privacy that no statement of a single run "
            "covers.",
        ]

    def _disagreement(self) -> list[str]:
        if self._best_simulated is self._best:
            return []
        return [
            f"At {self._protocol.batch_sizes[-1]:,}, the largest simulated size, "
            f"learning rate {self._best_simulated.learning_rate:g} is best. Trust it "
            "rather than the line, if the metric cannot go on growing as the line does."
        ]

    # -- table ---------------------------------------------------------------------

    def _headings(self) -> list[str]:
        metric = in_words(self._settings.metric)
        return ["rate", "batch", "noise", "epsilon", metric]

    def _rows(self) -> list[list[str]]:
        return [row for one in self._simulations for row in self._rows_of(one)]

    def _rows_of(self, one: Simulation) -> list[list[str]]:
        rate, reference = f"{one.learning_rate:g}", self._protocol.reference
        rows = []
        for point in one.points:
            spread = "" if point.stddev is None else f" ±{point.stddev:.4f}"
            noise = f"{point.noise_multiplier:.3g}"
            value = f"{point.mean:.4f}{spread}"
            rows.append([rate, f"{point.batch_size:,}", noise, "none", value])
        large = [rate, f"{reference.plan.expected_batch_size:,}"]
        large.append(f"{reference.noise_multiplier:.3g}")
        large.append(_rounded_up(self._statement.epsilon.upper))
        rows.append([*large, prediction_text(one)])
        if one.actual is not None:
            rows.append([*large, actual_text(one)])
        return rows

    def markdown(self, *, picture: str) -> str:
        """Returns table and notes as Markdown, with a link to the plot."""
        table = tables.markdown(self._headings(), self._rows())
        notes = "\n".join(f"- {note}" for note in self.notes())
        return f"# {TITLE}\n\n{table}\n\n{notes}\n\n![{TITLE}]({picture})\n"

    def show(self) -> None:
        """Prints table and notes."""
        headings = self._headings()
        tables.show(
            TITLE,
            headings,
            self._rows(),
            left=range(4, len(headings)),
            notes=self.notes(),
        )

    def write(self, out: pathlib.Path) -> dict[str, Any]:
        """Writes simulation.json, .md and .png; returns the first."""
        fields = self.to_json()
        write_atomically(out / "simulation.json", pretty_json(fields))
        self.plot(out / "simulation.png")
        text = self.markdown(picture="simulation.png")
        write_atomically(out / "simulation.md", text.encode())
        return fields

    # -- plot ----------------------------------------------------------------------

    def plot(self, path: pathlib.Path) -> None:
        """Draws runs, their lines, intervals, and a hollow marker for the reference."""
        figure, axes = new_figure(7.5, 5)
        for index, one in enumerate(self._simulations):
            # Shifted slightly, so that runs and intervals do not hide each other.
            shift = 1.04 ** (index - (len(self._simulations) - 1) / 2)
            style = {
                "color": f"C{index}", "ls": DASHES[(index + 1) % len(DASHES)],
                "marker": MARKERS[index % len(MARKERS)],
            }  # fmt: skip
            self._draw(axes, one, style, shift)
        large = self._protocol.reference.plan.expected_batch_size
        ticks = [*self._protocol.batch_sizes, large]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("expected batch size, at the same total amount of noise")
        axes.set_ylabel(f"held-out {in_words(self._settings.metric)}")
        axes.grid(alpha=0.3)
        axes.plot([], [], "x", color="0.3", label="one simulated run")
        figure.legend(loc="outside lower center", fontsize="small", handlelength=4)
        axes.set_title(self._title(), fontsize="medium")
        write_png(figure, path)

    def _title(self) -> str:
        reference = self._protocol.reference
        found = _rounded_up(self._statement.epsilon.upper)
        return (
            f"Simulated runs are not private\n{reference.plan.num_steps:,} steps, eta "
            f"{self._tan.eta:.4g}; at batch size "
            f"{reference.plan.expected_batch_size:,} noise multiplier "
            f"{reference.noise_multiplier:.4g}, epsilon {found} at delta "
            f"{self._settings.delta:g}"
        )

    def _draw(
        self, axes: Any, one: Simulation, style: dict[str, str], shift: float
    ) -> None:
        protocol, found, color = self._protocol, one.prediction, style["color"]
        large = protocol.reference.plan.expected_batch_size
        for point in one.points:
            places = [point.batch_size * shift] * len(point.values)
            axes.plot(places, point.values, "x", color=color, markersize=6)
        ends = (protocol.batch_sizes[0], large)
        line = [
            one.line.predict(end, confidence=self._settings.confidence).mean
            for end in ends
        ]
        places = [end * shift for end in ends]
        axes.plot(places, line, style["ls"], color=color, linewidth=1)
        rate = f"learning rate {one.learning_rate:g}"
        axes.errorbar(
            [large * shift], [found.mean], yerr=[found.upper - found.mean], **style,
            linewidth=1, markersize=5, capsize=4,
            label=f"{rate}: {prediction_text(one)}",
        )  # fmt: skip
        if one.actual is not None:
            axes.plot(
                [large * shift], [one.actual], style["marker"], color=color,
                fillstyle="none", markersize=10, label=f"{rate}: {actual_text(one)}",
            )  # fmt: skip


def prediction_text(one: Simulation) -> str:
    """Returns the prediction with its interval, in words."""
    found = one.prediction
    return f"{found.mean:.4f} predicted ({found.lower:.4f} to {found.upper:.4f})"


def actual_text(one: Simulation) -> str:
    """Returns the metric of the reference run, and whether the interval contains it."""
    where = "inside" if one.holds else "OUTSIDE"
    return f"{one.actual:.4f} trained: {where} the interval"


def _rounded_up(epsilon: float | None) -> str:
    if epsilon is None or not math.isfinite(epsilon):
        return "none"
    return f"≤ {math.ceil(epsilon * 100) / 100:.2f}"


def _simulation_json(one: Simulation) -> dict[str, Any]:
    line, found = one.line, one.prediction
    return {
        "learning_rate": one.learning_rate,
        "points": [
            {
                "expected_batch_size": point.batch_size,
                "noise_multiplier": point.noise_multiplier,
                "is_private": False,
                "values": list(point.values),
                "mean": point.mean,
                "stddev": point.stddev,
            }
            for point in one.points
        ],
        "intercept": line.intercept,
        "slope": line.slope,
        "residual_stddev": line.residual_stddev,
        "lack_of_fit": line.lack_of_fit,
        "prediction": {
            "mean": found.mean,
            "lower": found.lower,
            "upper": found.upper,
            "confidence": found.confidence,
        },
        "actual": one.actual,
        "interval_holds_actual": one.holds,
    }
