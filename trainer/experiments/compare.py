"""Compares runs that differ in sampler, method, noise or settings, in one table.

    OUT/tables/                           tables of bounded users: ``comparison.levels``
    OUT/batches/, OUT/runs/               each made once: ``comparison.runs``
    OUT/comparison.json, .md, .png        the table

Every seed has its own batches, initial weights and noise.  The noise multipliers are
computed first; then the batches, which runs share, are made; then the runs.

Formal guarantees:
  - All errors that can be found without TensorFlow are raised before any batch is made;
    held-out files that do not match the training examples, before any noise is
    computed.
  - A comparison that was stopped or killed resumes with the same settings, or with
    longer lists: finished batches and runs are not made again, and an unfinished run
    continues where it was.

Public: what the runs publish.  Choosing among runs on the same data costs privacy that
no statement of a single run covers.
"""

from __future__ import annotations

import itertools

from accounting.core import deltas
from pipelines.users.bound_folder import refuse_text
from trainer.experiments.comparison import noise as compare_noise
from trainer.experiments.comparison.case import Case, without_repetition
from trainer.experiments.comparison.levels import (
    DataSet,
    find_data_sets,
    make_table,
)
from trainer.experiments.comparison.report import Comparison, report
from trainer.experiments.comparison.results import summarise
from trainer.experiments.comparison.runs import Runs, Say, mark, settled, silent
from trainer.settings.comparison_settings import ComparisonSettings


def compare(settings: ComparisonSettings, say: Say = silent) -> Comparison:
    """Makes all batches and runs that are not done yet, and returns the table.

    Args:
      settings: Settings of the experiment.
      say: Called with each line of progress.

    Raises:
      InputError: before any batch is made, if the trainer would refuse a run; later, if
        existing batches or runs have other settings.
    """
    if settings.users is not None:
        refuse_text(settings.source, settings.users.user_column)
    settings = settled(settings)
    data_sets = find_data_sets(settings)
    for data in data_sets:
        compare_noise.check_plans(data.settings, data.num_examples)
    for delta in settings.deltas:
        if warning := deltas.warning(
            delta, min(data.num_examples for data in data_sets)
        ):
            say(warning)
    cases, notes = _find_cases(data_sets, say)
    mark(settings)
    runs = Runs(settings, say)
    trials = list(itertools.product(cases, range(settings.seeds)))
    for data in data_sets:
        make_table(settings, data, say)
    for (case, data), seed in trials:
        plan = case.batches.plan(data.num_examples)
        name = case.name_of_batches(seed)
        runs.make_batches(name, case.batches, plan, data.settings.source)
    asked = [(case, seed) for (case, _), seed in trials]
    left = [runs.unfinished(case.trial(seed)) for case, seed in asked]
    say(f"{len(left) - left.count(None)} of {len(left)} runs are left")
    results = [(case, runs.run(case.trial(seed))) for case, seed in asked]
    return report(summarise(results, metric=settings.metric), notes)


def _find_cases(
    data_sets: list[DataSet], say: Say
) -> tuple[list[tuple[Case, DataSet]], list[str]]:
    """Returns the cases on each data set, and notes on those left out."""
    found, notes = list[tuple[Case, DataSet]](), dict[str, None]()
    for data in data_sets:
        cases, more = compare_noise.find_cases(
            data.settings, data.num_examples, say, data.bounded
        )
        found += [(case, data) for case in cases]
        notes |= dict.fromkeys(more)
    without_repetition(case for case, _ in found)
    for note in notes:
        say(note)
    return found, list(notes)
