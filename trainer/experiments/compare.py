"""Compares runs that differ in sampler, method, noise or settings, in one table.

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
from trainer.experiments.comparison import noise as compare_noise
from trainer.experiments.comparison.report import Comparison, report
from trainer.experiments.comparison.results import summarise
from trainer.experiments.comparison.runs import (
    Runs,
    Say,
    settled,
    silent,
    training_data,
)
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
    settings = settled(settings)
    dataset = training_data(settings)
    num_examples = dataset.num_examples
    compare_noise.check_plans(settings, num_examples)
    for delta in settings.deltas:
        if warning := deltas.warning(delta, num_examples):
            say(warning)
    cases, notes = compare_noise.find_cases(
        settings, num_examples, say, dataset.bounded
    )
    for note in notes:
        say(note)
    runs = Runs(settings, say)
    asked = list(itertools.product(cases, range(settings.seeds)))
    for case, seed in asked:
        plan = case.batches.plan(num_examples)
        runs.make_batches(case.name_of_batches(seed), case.batches, plan)
    left = [runs.unfinished(case.trial(seed)) for case, seed in asked]
    say(f"{len(left) - left.count(None)} of {len(left)} runs are left")
    results = [(case, runs.run(case.trial(seed))) for case, seed in asked]
    return report(summarise(results, metric=settings.metric), notes)
