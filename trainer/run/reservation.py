"""What a budget reserves of one table, before the first release of it.

A slot is what may be released of one part of the table:

    runs           of one plan, all of which are shown; of the part that trains
    evaluations    metrics of each of these runs, of a part that trains nothing
    statistics     by `dpsgd statistics`, once, of a part that does neither
    search         by `dpsgd tune`, instead of the runs; scores of another part, and
                   metrics of the winner

Formal guarantees:
  - epsilon is that of everything in the slots, whether it is made or not and whatever
    is chosen from earlier results.  A row is in one part, and what is computed from
    others is the same with and without it, or a function of what was released; so that
    it is the largest epsilon of a part.
  - that of the runs: plan and noise of all are fixed before the first, so they are one
    run of as many times its steps.  That of the evaluations: they are one Gaussian
    release.
  - runs or a search are released of the part that trains, never both: each alone has
    the epsilon of the budget.
  - a run of another plan, unit, noise, delta or mechanism is refused, and one that is
    more than were reserved.
  - no two runs share batches, which would be sampled once and not twice.
  - each run's metrics of held-out rows are released once, by `dpsgd evaluate`, and no
    part gives two of metrics, statistics and scores, or one of the last two twice.
  - rows of another table are refused, or of the same one divided into other parts.
    Preparing a table again does not make another one of it: see `source_table`.
  - what no epsilon covers is refused, or named in the claim from then on: metrics of
    `dpsgd train --eval`, initial weights, and experiments.
  - a closed budget has no place for anything; what had one before may go on.  Its
    epsilon stays that of all slots.

Why not that of the used slots: who closes a budget has seen results.  Let two runs be
reserved, and the second not be made if and only if the first model gives a row away.
Wherever one run is stated then, a row is given away, however rarely that is: nothing is
proven for it.  The epsilon of all slots holds for every rule, since who makes fewer
runs shows a part of what all of them would have been.

Public: what `Budget.to_text` and `Budget.said` tell.  Sensitive: digests of the table.

References:
  Why later runs cannot be added by composing what was spent: privacy filters are not
  valid for privacy profiles, arXiv:2602.06756.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shlex
from collections.abc import Sequence
from typing import Any

from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import NAMES, REPLACE_SPECIAL
from accounting.core.plan import PERSISTENT_SHUFFLE, DpSgdPlan
from accounting.core.validation import InputError, check_float, check_int
from accounting.core.versioned_json import header, read_fields
from accounting.statement import EARLIER_RUNS, PrivacyStatement
from pipelines.core.batches.manifest import Manifest
from pipelines.files.paths import StrPath
from pipelines.inputs.source_table import SourceTable
from trainer.run import privacy
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.request import Request
from trainer.settings.train_settings import TrainSettings

HEADER: Any = {"format_name": "dpsgd-budget", "version": 4}
MOST_RUNS = 1_000
_OTHERS = "    - runs, searches and anything else without this budget"
#: Names of slots.
RUNS, EVALUATIONS, STATISTICS = "runs", "evaluations", "statistics"
SEARCH, SCORES = "search", "scores"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """A run that was given a place.

    Attributes:
      run: Digest of the run's random id.
      batches_id: ``Manifest.batches_id`` of its batches.
      folder: Folder of the run, as it was named.
      evaluated_on: Part of the table of which its metrics were released; else empty.
      key: ``key_name`` of its batches; empty of earlier releases.
    """

    run: str
    batches_id: str
    folder: str
    evaluated_on: str = ""
    key: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A search that was given the place of all runs.

    Attributes:
      id: Digest of its random id.
      folder: Its folder, as it was named.
      scored_on: Part of the table by which its runs are scored.
    """

    id: str
    folder: str
    scored_on: str


@dataclasses.dataclass(frozen=True)
class Slot:
    """What may be released of one part of the table.

    Attributes:
      kind: ``RUNS``, ``EVALUATIONS``, ``STATISTICS``, ``SEARCH`` or ``SCORES``.
      part: Part of the table, in words.
      count: How often it may be used.
      used: By what it was.
      epsilon: Upper bound for all uses together.
      noise_multiplier: Of each use; None if it follows from what is asked.
    """

    kind: str
    part: str
    count: int
    used: tuple[str, ...]
    epsilon: float
    noise_multiplier: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Runs of one plan with one noise, and what other parts of the table release.

    Attributes:
      table: Of the rows of every run.
      plan: Of every run.
      unit: Privacy unit and relation, as arguments of ``privacy.plan_statement``.
      num_runs: Reserved runs.
      epsilon: Target for all together.
      delta: Of all together.
      noise_multiplier: Of every run.
      charges: Runs that were charged, in order; of a search, its winner.
      search: The search that was made instead of runs; None for none.
      statistics: Parts that gave statistics -> file of these.
      uncovered: What no epsilon covers, in words.
      is_closed: Whether nothing more has a place.
    """

    table: SourceTable
    plan: DpSgdPlan
    unit: dict[str, Any]
    num_runs: int
    epsilon: float
    delta: float
    noise_multiplier: float
    charges: tuple[Charge, ...] = ()
    search: Search | None = None
    statistics: dict[str, str] = dataclasses.field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    is_closed: bool = False

    @classmethod
    def reserve(
        cls,
        manifest: Manifest,
        table: SourceTable,
        *,
        num_runs: int,
        epsilon: float,
        delta: float,
    ) -> Budget:
        """Returns a budget whose runs together are (epsilon, delta)-private.

        Args:
          manifest: Manifest of the batches of one of the runs.
          table: Table that these are from.
          num_runs: Number of runs, at least 1.
          epsilon: Target for all together, above 0.
          delta: In (0, 1).

        Raises:
          InputError: a value out of range, or a target that no noise meets.
        """
        check_int("runs", num_runs, at_least=1, at_most=MOST_RUNS)
        check_float("epsilon", epsilon, above=0.0)
        if not table.sources:
            raise InputError(
                "Expected batches that know the files of their table; these were made "
                "by an earlier release, or of rows whose _prepared.json you may not "
                "read. Make them again, by `dpsgd prepare` and `dpsgd batches`."
            )
        plan, unit = manifest.plan, privacy.unit_of(manifest.dataset, manifest.plan)
        found = privacy.noise_multiplier(
            _together(plan, num_runs),
            epsilon=epsilon,
            delta=delta,
            description=manifest.dataset,
        )
        return cls(
            table=table,
            plan=plan,
            unit=unit,
            num_runs=num_runs,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=found,
        )

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy of all runs together, as of one run of all their steps."""
        return self._statement(_together(self.plan, self.num_runs))

    @property
    def noise_of_evaluations(self) -> float:
        """Noise multiplier of each run's metrics of held-out rows.

        As many Gaussian releases are exactly one, with noise divided by the root of
        their number.
        """
        from accounting.core.pld.gaussian import gaussian_noise  # after --help

        return gaussian_noise(self.epsilon, self.delta) * math.sqrt(self.num_models)

    @property
    def num_models(self) -> int:
        """Number of models that may be shown and evaluated; one if it was searched."""
        return 1 if self.search else self.num_runs

    @property
    def alone(self) -> PrivacyStatement:
        """The privacy of one of the runs."""
        return self._statement(self.plan)

    def _statement(self, plan: DpSgdPlan) -> PrivacyStatement:
        found: PrivacyStatement = privacy.plan_statement(
            plan,
            noise_multiplier=self.noise_multiplier,
            l2_norm_clip=None,
            delta=self.delta,
            allow_large_delta=True,  # decided when the budget was made
            **self.unit,
        )
        return found

    @property
    def claim(self) -> str:
        """The claim, with what no epsilon covers."""
        relation = NAMES[self.unit.get("neighboring_relation", REPLACE_SPECIAL)]
        epsilon = upper_text(max(each.epsilon for each in self.slots))
        runs = (
            f"All {self.num_runs} runs, their" if not self.search else "The search, its"
        )
        unit = "user" if self.unit else "row"
        found = (
            f"{runs} metrics and statistics together, made or not, are ({epsilon}, "
            f"{self.delta!r})-differentially private under the {relation} relation for "
            f"one {unit} in any one part of the table, an upper bound, whatever is "
            "chosen from earlier ones."
        )
        for each in self.uncovered:
            found += f" No epsilon covers {each}."
        if self.is_closed:
            found += " The budget is closed: nothing more has a place in it."
        return found

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is reserved, and what of it was used."""
        runs = tuple(each.folder for each in self.charges)
        evaluated = tuple(
            f"{each.folder} on {each.evaluated_on}"
            for each in self.charges
            if each.evaluated_on
        )
        trains, count = self.table.part or "all", self.num_models
        epsilon, noise = self.statement.epsilon.guarantee, self.noise_multiplier
        of_all, of_metrics = self.epsilon, self.noise_of_evaluations
        counted = tuple(f"{path} of {part}" for part, path in self.statistics.items())
        if search := self.search:
            of_search, place = (search.folder,), search.scored_on
            return (
                Slot(SEARCH, trains, 1, of_search, of_all, None),
                Slot(SCORES, place, 1, of_search, of_all, None),
                Slot(EVALUATIONS, "held out", count, evaluated, of_all, of_metrics),
                Slot(STATISTICS, "any other", 1, counted, of_all, None),
            )
        return (
            Slot(RUNS, trains, count, runs, epsilon, noise),
            Slot(EVALUATIONS, "held out", count, evaluated, of_all, of_metrics),
            Slot(STATISTICS, "any other", 1, counted, of_all, None),
        )

    def check(
        self, settings: TrainSettings, manifest: Manifest, table: SourceTable
    ) -> None:
        """Refuses a run that has no place in the budget.

        Args:
          settings: Settings of the run.
          manifest: Manifest of its batches.
          table: Table that these are from.

        Raises:
          InputError: another table, plan, unit, noise, delta or mechanism.
        """
        self.check_runs_of(table)
        if settings.method == NON_PRIVATE or privacy.theorem_of_settings(settings):
            raise InputError(
                f"Expected method={settings.method!r} beside --budget to be one with "
                "the noise and the theorem of DP-SGD. Omit --budget, or the method."
            )
        unit = privacy.unit_of(manifest.dataset, manifest.plan)
        for name, found, wanted in (
            ("noise_multiplier", settings.noise_multiplier, self.noise_multiplier),
            ("delta", settings.target_delta, self.delta),
            ("plan", manifest.plan.to_json(), self.plan.to_json()),
            ("privacy unit", unit, self.unit),
        ):
            if found != wanted:
                raise InputError(
                    f"Expected the {name} of the run, {found}, to be that of its "
                    f"budget, {wanted}. Make batches with the same flags as the first "
                    "ones, or omit --budget."
                )

    def check_runs_of(self, table: SourceTable) -> None:
        """Refuses rows that are not of the budget's table and of its part that trains.

        Args:
          table: Table of the rows.

        Raises:
          InputError: they are not.
        """
        if not self.table.is_same(table):
            raise InputError(
                "Expected rows of the table of the budget, divided into the same "
                "parts; these were read from other files, or divided otherwise. "
                "Prepare it from the same files with the same split, or omit --budget."
            )

    def check_other_part(self, table: SourceTable, *, option: str = "--input") -> None:
        """Refuses rows that train, or are not of the budget's table.

        Args:
          table: Table of the rows.
          option: Flag that gave them, for messages.

        Raises:
          InputError: they do, or are not.
        """
        if not self.table.is_held_out(table):
            raise InputError(
                f"Expected {option} of a part of the budget's table that trains "
                "nothing; these rows are of another table, or division into parts, or "
                f"of the part {self.table.part} itself. Give another part of the same "
                "preparation, or omit --budget."
            )

    def marked(self, uncovered: Sequence[str]) -> Budget:
        """Returns the budget with what no epsilon covers, in words, for good."""
        every = tuple(dict.fromkeys((*self.uncovered, *uncovered)))
        return dataclasses.replace(self, uncovered=every)

    def charged(
        self,
        run_id: str,
        batches_id: str,
        folder: str,
        uncovered: Sequence[str] = (),
        *,
        key: str = "",
    ) -> Budget:
        """Returns the budget with a run, which may be in it already.

        Args:
          run_id: Random id of the run.  Sensitive; its digest is kept.
          batches_id: ``Manifest.batches_id`` of its batches.
          folder: Folder of the run.
          uncovered: What no epsilon covers of it, in words.
          key: ``key_name`` of its batches.

        Raises:
          InputError: it is closed, all places are taken, or other runs have these
            batches, or their key: in another layout steps have the same rows.
        """
        charge = Charge(
            run=_digest(run_id), batches_id=batches_id, folder=folder, key=key
        )
        marked = self.marked(uncovered)
        if self.has_run(run_id):
            return marked
        self._check_open()
        if self.search is not None:
            raise InputError(
                "Expected a budget without a search, which has the place of all runs; "
                f"{self.search.folder} is one. Omit --budget, and add epsilon and "
                "delta to those of the budget."
            )
        for each in self.charges:
            if each.batches_id == batches_id or (key and each.key == key):
                raise InputError(
                    f"Expected batches of its own for each run of a budget; these are "
                    f"those of {each.folder}, or have their key. Make others, with "
                    "another key: `dpsgd batches --out` of a new folder."
                )
        if len(self.charges) >= self.num_runs:
            raise InputError(
                f"Expected a free place among the {self.num_runs} of the budget; all "
                "are taken. What is added after results were seen is not covered: its "
                "epsilon and delta add to those of the budget. Omit --budget, and add "
                "them."
            )
        return dataclasses.replace(marked, charges=(*self.charges, charge))

    def has_run(self, run_id: str) -> bool:
        """Whether a run was given a place, by its random id.  Sensitive."""
        return _digest(run_id) in {each.run for each in self.charges}

    def searched(self, search_id: str, part: str, folder: str) -> Budget:
        """Returns the budget with a search, which may be in it already.

        Args:
          search_id: Random id of the search; empty before there is one.  Sensitive.
          part: Part of the table by which its runs are scored.
          folder: Folder of the search.

        Raises:
          InputError: it is closed, runs or another search have the place, or the part
            released something.
        """
        found = Search(id=_digest(search_id), folder=folder, scored_on=part)
        if self.search is not None and self.search.id == found.id:
            return self
        self._check_open()
        if self.search is not None or self.charges:
            taken = self.search or self.charges[0]
            raise InputError(
                "Expected a budget whose part that trains released nothing; it did, in "
                f"{taken.folder}. Omit --budget, and add epsilon and delta to those of "
                "the budget."
            )
        if part in self.statistics:
            raise InputError(
                f"Expected --score of a part without statistics; {part} gave those in "
                f"{self.statistics[part]}, and scores of it would add. Give another "
                "part."
            )
        return dataclasses.replace(self, search=found)

    def with_winner(self, run_id: str, batches_id: str, folder: str) -> Budget:
        """Returns the budget with the best run of its search, to be evaluated.

        Args:
          run_id: Random id of the run.  Sensitive.
          batches_id: ``Manifest.batches_id`` of its batches.
          folder: Folder of the run.
        """
        winner = Charge(run=_digest(run_id), batches_id=batches_id, folder=folder)
        charges = self.charges or (winner,)  # once
        return dataclasses.replace(self, charges=charges)

    def evaluated(self, run_id: str, part: str) -> Budget:
        """Returns the budget with the metrics of a run released.

        Args:
          run_id: Random id of the run.  Sensitive.
          part: Part of the table that they are of.

        Raises:
          InputError: it is closed, the run was not charged, or was evaluated before; or
            the part gave statistics or scores.
        """
        self._check_open()
        scored = self.search and self.search.scored_on
        if part in self.statistics or part == scored:
            what = self.statistics.get(part, "the scores of the search")
            raise InputError(
                f"Expected --input of a part that released nothing else; {part} gave "
                f"{what}, and metrics of it would add. Give another part."
            )
        of_run = _digest(run_id)
        found = [each for each in self.charges if each.run == of_run]
        if not found or found[0].evaluated_on:
            how = "it was evaluated before" if found else "it was trained without it"
            raise InputError(
                f"Expected a run of the budget whose metrics were not released; {how}. "
                "Omit --budget, and add epsilon and delta to those of the budget."
            )
        charges = tuple(
            dataclasses.replace(each, evaluated_on=part) if each.run == of_run else each
            for each in self.charges
        )
        return dataclasses.replace(self, charges=charges)

    def with_statistics(self, part: str, file: str) -> Budget:
        """Returns the budget with statistics of a part released.

        Args:
          part: Part of the table.
          file: Where they are.

        Raises:
          InputError: it is closed, they were released before, or metrics of that part
            were.
        """
        self._check_open()
        known = {each.evaluated_on for each in self.charges} | {*self.statistics}
        if part in known or (self.search and part == self.search.scored_on):
            raise InputError(
                f"Expected --input of a part that released nothing; {part} did, and "
                "statistics of it would add. Give another part, or omit --budget, and "
                "add epsilon and delta to those of the budget."
            )
        statistics = {**self.statistics, part: file}
        return dataclasses.replace(self, statistics=statistics)

    def closed(self) -> Budget:
        """Returns the budget with no place for anything more.

        Raises:
          InputError: it is closed.
        """
        if self.is_closed:
            raise InputError(
                "Expected a budget that is open; it was closed, which is final. `dpsgd "
                "account --budget` states it."
            )
        return dataclasses.replace(self, is_closed=True)

    def _check_open(self) -> None:
        if self.is_closed:
            raise InputError(
                "Expected a budget that is open; it was closed, which is final. What "
                "is released now adds epsilon and delta to those of the budget: omit "
                "--budget, and add them."
            )

    def to_text(self) -> str:
        """Returns claim, slots and statement as lines of text."""
        head = (
            f"  {'slot':<12}{'of the part':<12}{'epsilon':>8}{'places':>8}{'used':>6}"
        )
        lines = [
            f"  {each.kind:<12}{each.part:<12}{upper_text(each.epsilon):>8}"
            f"{each.count:>8}{len(each.used):>6}"
            for each in self.slots
        ]
        used = [f"    - {each.kind}: {one}" for each in self.slots for one in each.used]
        return "\n".join([self.claim, head, *lines, *used, *self._of_runs()])

    def _of_runs(self) -> list[str]:
        """Returns the statement of the runs; of a search, where its own is."""
        if self.search is not None:
            run = shlex.quote(f"{self.search.folder}/run")
            return [f"  statement   of the search: dpsgd account {run}"]
        statement = self.statement.to_text().rstrip("\n").split("\n")[1:]
        alone = upper_text(self.alone.epsilon.guarantee)
        return [
            f"  one run     epsilon {alone} alone, where nobody sees the others.",
            *(_OTHERS if EARLIER_RUNS in line else line for line in statement),
        ]

    def said(self) -> dict[str, Any]:
        """Returns what `to_text` says, as a JSON-serialisable dict."""
        found = {
            "claim": self.claim,
            "slots": [dataclasses.asdict(each) for each in self.slots],
            "uncovered": list(self.uncovered),
            "is_closed": self.is_closed,
        }
        if self.search is not None:
            return found
        return {
            **found,
            "num_runs": self.num_runs,
            "noise_multiplier": self.noise_multiplier,
            "epsilon_of_one": self.alone.epsilon.guarantee,
            "statement": {**self.statement.to_json(), "claim": self.claim},
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of the file."""
        fields = {**dataclasses.asdict(self), "plan": self.plan.to_json()}
        fields["table"]["sources"] = list(self.table.sources)
        return {**header(**HEADER), **fields}

    @classmethod
    def from_json(cls, fields: Any) -> Budget:
        """Returns the budget that ``to_json`` wrote.

        Raises:
          InputError: no budget, of another version, or changed so that its noise no
            longer meets its target.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        found = read_fields(fields, names, kind="budget", **HEADER)
        try:
            found["table"] = SourceTable.from_json(found["table"])
            found["plan"] = DpSgdPlan.from_json(found["plan"])
            found["charges"] = tuple(Charge(**each) for each in found["charges"])
            search = found["search"]
            found["search"] = None if search is None else Search(**search)
            found["uncovered"] = tuple(found["uncovered"])
            budget = cls(**found)
            epsilon = budget.statement.epsilon.guarantee
        except (TypeError, AttributeError):
            raise InputError("Expected a complete budget. Restore the file.") from None
        if epsilon > budget.epsilon or len(budget.charges) > budget.num_runs:
            raise InputError(
                f"Expected the runs of the budget to be {budget.num_runs} with epsilon "
                f"{budget.epsilon!r} at most; the file was changed. Restore it."
            )
        return budget


def _together(plan: DpSgdPlan, count: int) -> DpSgdPlan:
    """Returns the plan of several runs, one after another."""
    if plan.sampler == PERSISTENT_SHUFFLE:
        raise InputError(
            f"Expected sampler={plan.sampler!r} of a budget to be another one: each "
            "run has an order of its own, which no plan describes. Use "
            "truncated-poisson."
        )
    steps, epochs = plan.num_steps * count, plan.num_epochs * count
    return dataclasses.replace(plan, num_steps=steps, num_epochs=epochs)


def _digest(run_id: str) -> str:
    return hashlib.sha256(f"dpsgd budget {run_id}".encode()).hexdigest()[:32]


def uncovered(request: Request) -> tuple[str, ...]:
    """Returns what no epsilon covers of a run, in words.

    Args:
      request: The run.
    """
    metrics = f"the metrics of {request.run}, by --eval"
    of_eval = () if request.held_out is None else (metrics,)
    return (*of_eval, *of_weights(request.run, [request.settings]))


def of_weights(folder: StrPath, settings: Sequence[TrainSettings]) -> tuple[str, ...]:
    """Returns that no epsilon covers initial weights, in words, if there are any.

    Args:
      folder: Folder of a run, or of a search.
      settings: Settings of the run, or of all candidates.
    """
    if all(each.initial_weights is None for each in settings):
        return ()
    return (f"the initial weights of {folder}, which are declared public",)
