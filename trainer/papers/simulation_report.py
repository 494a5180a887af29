"""A simulation as JSON, as a table, as Markdown and as a plot."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.model.metrics import in_words
from trainer.papers.settings import LEVEL
from trainer.papers.simulation import Protocol, Simulation, best, best_simulated
from trainer.report.plots import DASHES, MARKERS, drawn
from trainer.report.report import Report, Table

TITLE = "Small batches for large: the same total amount of noise"
NOT_PRIVATE = (
    "NOT PRIVATE: the simulated runs have next to no noise, and no epsilon is claimed "
    "for them. Simulate on public data, or account for each run as a release."
)
_HEURISTIC = (
    "So eta does not determine epsilon here; what remains is a heuristic of how "
    "training behaves."
)


def report(
    protocol: Protocol, simulations: Sequence[Simulation], statement: Any
) -> Report:
    """Returns the report of a simulation.

    Args:
      protocol: What was simulated.
      simulations: One for each learning rate.
      statement: The privacy statement of the reference.
    """
    found = _Found(protocol, simulations, statement)
    headings = ["rate", "batch", "noise", "epsilon", found.metric]
    return Report(
        stem="simulation",
        title=TITLE,
        tables=[Table(headings=headings, rows=list(found.rows()), left=[4])],
        notes=found.notes(),
        fields=found.fields(),
        draw={"simulation.png": found.plot},
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """The results of a simulation, in words, as JSON and drawn; see `report`."""

    protocol: Protocol
    simulations: Sequence[Simulation]
    statement: Any

    @property
    def metric(self) -> str:
        return in_words(self.protocol.settings.metric)

    @property
    def epsilon(self) -> str:
        """The epsilon of the reference, rounded up."""
        found = self.statement.epsilon.upper
        if found is None or not math.isfinite(found):
            return "none"
        return f"≤ {math.ceil(found * 100) / 100:.2f}"

    @functools.cached_property
    def tan(self) -> Any:
        """TAN's estimate for the reference."""
        return self.protocol.reference.estimate(delta=self.protocol.settings.delta)

    def fields(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, without an epsilon of small runs."""
        protocol, settings = self.protocol, self.protocol.settings
        return {
            "reference": {
                "plan": protocol.reference.plan.to_json(),
                "noise_multiplier": protocol.reference.noise_multiplier,
                "privacy": self.statement.to_json(),
                "tan": {
                    "eta": self.tan.eta,
                    "epsilon_estimate": self.tan.epsilon,
                    "is_guarantee": False,
                    "warning": self.tan.warning,
                },
            },
            "method": settings.training.method,
            "metric": settings.metric,
            "simulations": [one.to_json() for one in self.simulations],
            "best_learning_rate": self._best.learning_rate,
            "best_learning_rate_simulated": self._best_simulated.learning_rate,
            "cost_in_reference_runs": protocol.cost,
            "notes": self.notes(),
        }

    @property
    def _best(self) -> Simulation:
        return best(self.simulations, self.protocol.settings.metric)

    @property
    def _best_simulated(self) -> Simulation:
        return best_simulated(self.simulations, self.protocol.settings.metric)

    def notes(self) -> list[str]:
        """Returns the notes that explain the table, most important first."""
        settings, plan = self.protocol.settings, self.protocol.reference.plan
        runs = sum(len(p.values) for one in self.simulations for p in one.points)
        return [
            NOT_PRIVATE,
            f"The reference, {plan.expected_batch_size:,} expected rows in "
            f"{plan.num_steps:,} steps at noise multiplier "
            f"{self.protocol.reference.noise_multiplier!r}, has epsilon "
            f"{self.epsilon} at delta {settings.delta!r}, by the accountant. TAN's "
            f"closed form estimates {self.tan.epsilon:.2f} (eta {self.tan.eta:.4f}).",
            *([f"{self.tan.warning} {_HEURISTIC}"] if self.tan.warning else []),
            "Rate: learning rate. Predicted: value of the line through the simulated "
            f"runs, with the {100 * LEVEL:g} % interval of one more run, "
            "if the line holds.",
            f"The {runs} simulated runs take the gradients of "
            f"{100 * self.protocol.cost:.3g} % of the examples of one reference run.",
            *(
                f"At learning rate {one.learning_rate:g} the points deviate from a "
                f"line (p = {one.line.lack_of_fit:.2g}): prediction and interval are "
                "in doubt."
                for one in self.simulations
                if one.bends
            ),
            *(self._choice_notes() if len(self.simulations) > 1 else ()),
        ]

    def _choice_notes(self) -> Iterator[str]:
        yield (
            f"Best predicted: learning rate {self._best.learning_rate:g}. The best of "
            f"{len(self.simulations)} looks better than it is."
        )
        if self._best_simulated is not self._best:
            yield (
                f"At {self.protocol.batch_sizes[-1]:,}, the largest simulated size, "
                f"learning rate {self._best_simulated.learning_rate:g} is best. Trust "
                "it rather than the line, if the metric cannot go on growing as the "
                "line does."
            )
        yield (
            "Choosing on private data costs privacy that no statement of a single run "
            "covers."
        )

    def rows(self) -> Iterator[list[str]]:
        """Yields the rows of the table."""
        reference = self.protocol.reference
        for one in self.simulations:
            rate = f"{one.learning_rate:g}"
            for point in one.points:
                spread = "" if point.stddev is None else f" ±{point.stddev:.4f}"
                noise, value = f"{point.noise_multiplier:.3g}", f"{point.mean:.4f}"
                size = f"{point.expected_batch_size:,}"
                yield [rate, size, noise, "none", value + spread]
            size = f"{reference.plan.expected_batch_size:,}"
            large = [rate, size, f"{reference.noise_multiplier:.3g}", self.epsilon]
            yield [*large, one.predicted]

    # -- plot ----------------------------------------------------------------------

    def plot(self, path: pathlib.Path) -> None:
        """Draws runs, their lines, and intervals."""
        reference = self.protocol.reference
        size = reference.plan.expected_batch_size
        title = (
            f"Simulated runs are not private\n{reference.plan.num_steps:,} steps, eta "
            f"{self.tan.eta:.4g}; at batch size {size:,} noise multiplier "
            f"{reference.noise_multiplier:.4g}, epsilon {self.epsilon} at delta "
            f"{self.protocol.settings.delta!r}"
        )
        with drawn(path, (7.5, 5), title) as (figure, [axes]):
            for index, one in enumerate(self.simulations):
                # Shifted slightly, so that runs and intervals do not hide each other.
                shift = 1.04 ** (index - (len(self.simulations) - 1) / 2)
                self._draw(axes, one, index, shift)
            ticks = [*self.protocol.batch_sizes, size]
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("expected batch size, at the same total amount of noise")
            axes.set_ylabel(f"held-out {self.metric}")
            axes.plot([], [], "x", color="0.3", label="one simulated run")
            figure.legend(loc="outside lower center", fontsize="small", handlelength=4)

    def _draw(self, axes: Any, one: Simulation, index: int, shift: float) -> None:
        color, marker = f"C{index}", MARKERS[index % len(MARKERS)]
        dashes = DASHES[(index + 1) % len(DASHES)]
        for point in one.points:
            places = [point.expected_batch_size * shift] * len(point.values)
            axes.plot(places, point.values, "x", color=color, markersize=6)
        found, level = one.prediction, one.prediction.confidence
        large = self.protocol.reference.plan.expected_batch_size
        ends = (self.protocol.batch_sizes[0], large)
        line = [one.line.predict(end, confidence=level).mean for end in ends]
        axes.plot([end * shift for end in ends], line, dashes, color=color, lw=1)
        rate = f"learning rate {one.learning_rate:g}"
        axes.errorbar(
            [large * shift], [found.mean], yerr=[found.upper - found.mean], ls=dashes,
            color=color, marker=marker, linewidth=1, markersize=5, capsize=4,
            label=f"{rate}: {one.predicted}",
        )  # fmt: skip
