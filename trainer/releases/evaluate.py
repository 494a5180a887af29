"""``evaluate``: metrics of a run on held-out rows, under an epsilon of their own.

    RUN/metrics.json    metrics, intervals, baseline and claim; public

Formal guarantees of the metrics:
  - They are (epsilon, delta)-private for one held-out row or user under zero-out, as
    functions of one Gaussian release.  For users there are two releases, of which the
    first gives the sensitivity of the second: see `most_rows`.
  - Model and metrics together are private at the larger epsilon of both, at one delta,
    if no held-out row was trained on, scored runs, or gave statistics: a row that was
    trained on changes the model alone, and a held-out row changes the metrics alone.
    Files that the batches of the run were sampled from are refused, and so are rows of
    the same table that were prepared again, unless they are of another part.  Copies of
    rows, and rows that scored runs or gave statistics, are not noticed.
  - A prediction is a function of its own row, whatever the model does with a batch:
    rows are predicted one at a time.
  - If runs were declared together (``of_runs``), all of this holds for the metrics of
    all these runs, and for all their models.
  - A run is evaluated once: metrics that exist are neither replaced nor added to, and
    nothing is shown before they are on disk.  A damaged record is refused.
  - The privacy unit is that of the run: a row or, for rows that `dpsgd prepare` kept, a
    user.  The number of rows of users is released with noise, and shown nowhere else;
    where noise hides it, no metric is stated.  Users who are not bounded are refused.
  - *Not* covered: an error for a file that cannot be read, after which nothing is
    released; how long the evaluation took; other evaluations of the same rows.

Formal guarantees of its price:
  - The noise is that of one Gaussian mechanism with the stated epsilon and delta.  For
    N runs that were declared together, it is that of N Gaussian mechanisms which
    together have this epsilon and delta: N Gaussian releases of one sensitivity are
    exactly one, with the noise of each divided by the root of N.
  - The number of rows of users is not public.  It is released first, and bounds the
    sensitivity of the other sums: see `most_rows`.

Public: settings, number of rows (not of users' rows), metrics.json.  Sensitive: rows
and predictions.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import statistics
from typing import Any

import numpy as np

from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    NAMES,
    REPLACE_SPECIAL,
)
from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import InputError, check_float, header
from pipelines.batches.folder import PRIVATE_NAME, read_checksums, read_manifest
from pipelines.core.files.locks import locked
from pipelines.core.users import Bounded
from pipelines.files.storage import pretty_json, read_json, write_atomically
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.inputs.source_table import SourceTable, table_of
from trainer.core.run import run_record
from trainer.core.run.run_record import RunRecord
from trainer.model.evaluation import HeldOut
from trainer.model.metrics import BINARY, CLASSES, LABEL, OTHER
from trainer.prediction.chosen_model import ChosenModel, choose
from trainer.releases import estimates
from trainer.releases.estimates import Count, Estimates
from trainer.releases.held_out_sums import (
    HeldOutNumbers,
    HeldOutRows,
    KeptRows,
    NoisySum,
    default_cap,
    release,
)
from trainer.report.progress import Reporter, Silent
from trainer.report.run_files import (
    METRICS_NAME,
    PREDICTION,
    PROBABILITIES,
    PROBABILITY,
)
from trainer.run import privacy

#: Largest standard deviation of the noise of an accuracy, or of a squared error as a
#: share of the largest variance.
_MOST_NOISE = 0.05
#: Share of delta for a bound on the number of rows of users.
_OF_ROWS = 0.01
#: The others change what was trained, too: a model is a function of its ranges, and the
#: best of several of the rows that scored them.
_APART = "if none that is held out was trained on, scored runs, or gave statistics"


def kept_rows(task: str, num_classes: int = 0, most: int | None = None) -> KeptRows:
    """Returns what is kept of held-out rows, before there are any.

    Args:
      task: "binary", "classes", or "other" of a regression.
      num_classes: Number of classes, at least 2; 0 of a regression.
      most: Largest number of rows of one user; None if the unit is a row.
    """
    if task == OTHER:
        return HeldOutNumbers(most=most)
    return HeldOutRows(task, num_classes, default_cap(num_classes), most)


def least_rows(rows: KeptRows, noise_multiplier: float) -> int:
    """Returns the number of held-out rows of which noise leaves something.

    Args:
      rows: What is kept of them.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
    """
    return math.ceil(rows.noise_of_one(noise_multiplier) / _MOST_NOISE)


def check_rows(
    rows: KeptRows, noise_multiplier: float, num_rows: int, where: str
) -> None:
    """Refuses so few held-out rows that noise would hide every metric.

    Args:
      rows: What is kept of the held-out rows.
      noise_multiplier: As for `least_rows`.
      num_rows: Number of the held-out rows, or a bound on it.
      where: The flag that names them, with its value.

    Raises:
      InputError: there are fewer rows than `least_rows`.
    """
    least = least_rows(rows, noise_multiplier)
    if num_rows < least:
        raise InputError(
            f"Expected at least {least} rows in {where}, for noise to leave something "
            f"of their metrics; it has at most {num_rows}. Give more, or a larger "
            "epsilon of them."
        )


def relations(bounded: Bounded | None) -> str:
    """Returns the neighbouring relations under which sums of rows are private."""
    relation = NAMES[REPLACE_SPECIAL]
    if bounded is None:
        return f"the {relation} relation"
    # The number of rows is not public, so that both relations move the sums alike.
    return f"the {relation} and the {NAMES[ADD_OR_REMOVE_ONE]} relation"


def _units(bounded: Bounded | None) -> tuple[str, str]:
    """Returns the privacy unit of the metrics with its relation, and its name."""
    if bounded is None:
        return f"one held-out row under {relations(None)}", "row"
    return f"{bounded.unit}, under {relations(bounded)}", "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPrice:
    """What an evaluation costs.

    Attributes:
      epsilon: Epsilon of the metrics, or of those of all runs that were declared
        together.
      delta: Delta of metrics and models.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
      claim: The claim in two sentences.
      of_rows: Part of delta for a bound on the number of rows by a release of it.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    claim: str
    of_rows: float = 0.0

    @classmethod
    def of_one(
        cls,
        epsilon: float,
        delta: float,
        *,
        of_run: float,
        bounded: Bounded | None = None,
        of_runs: int = 1,
    ) -> EvaluationPrice:
        """Returns the price of a run's only evaluation.

        Args:
          epsilon: Epsilon of the metrics of all runs, above 0.
          delta: In (0, 1).
          of_run: Epsilon of the models of all runs, at that delta.
          bounded: How the users of held-out rows are bounded; None if the unit is a
            row.
          of_runs: Number of runs that were declared together.
        """
        both = upper_text(max(epsilon, of_run))
        unit, one = _units(bounded)
        metrics, models = "These metrics", "Model"
        if of_runs != 1:
            metrics = f"The metrics of at most {of_runs:,} such runs together"
            models = "Their models"
        claim = (
            f"{metrics} are ({upper_text(epsilon)}, {delta!r})-differentially "
            f"private for {unit}. {models} and metrics together are ({both}, {delta!r})"
            f"-differentially private for one {one}, {_APART}."
        )
        of_rows = delta * _OF_ROWS if bounded else 0.0
        noise = gaussian_noise(epsilon, delta - of_rows) * math.sqrt(of_runs)
        return cls(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise,
            claim=claim,
            of_rows=of_rows / of_runs,  # each may fall short
        )


def most_rows(rows: Count, bounded: Bounded, of_rows: float) -> int:
    """Returns a bound on the number of rows, with and without any one user.

    It is the public one, or that of a release of the number: n with noise of standard
    deviation s, plus k, plus as many s as normal noise falls short by with probability
    ``of_rows``.  So with that probability at most the sums that are bounded by it have
    another sensitivity, for either of two neighbours: given that it holds, number and
    sums are one Gaussian mechanism with (epsilon, delta - of_rows), and events where it
    does not add ``of_rows``.

    Args:
      rows: The number, with noise.
      bounded: How users are bounded.
      of_rows: Part of delta for the bound; 0 for the public one.
    """
    if not of_rows:
        return bounded.num_examples
    sides = -statistics.NormalDist().inv_cdf(of_rows)
    # Noise is rounded to integers.
    most = math.ceil(rows.value + rows.most + sides * rows.noise + 1)
    return max(1, min(bounded.num_examples, most))


#: Of models that predict one label.
_OUTPUTS = ((PROBABILITY,), (PROBABILITIES,), (PREDICTION,))
_ESTIMATES = {
    BINARY: estimates.of_binary,
    CLASSES: estimates.of_classes,
    OTHER: estimates.of_numbers,
}
_HEADER: Any = {"format_name": "dpsgd-evaluation", "version": 1}


def evaluate(
    run: str | os.PathLike[str],
    batches: str | os.PathLike[str],
    table: str | os.PathLike[str],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    allow_large_delta: bool = False,
    average: str | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Evaluates a finished run on held-out rows, privately; returns the metrics.

    Args:
      run: Folder of the run, trained without held-out examples.
      batches: Folder of the batches that it was trained on.
      table: Held-out rows: a folder, a file or a glob of Parquet with the columns of
        the batches.
      epsilon: Of the metrics, for one held-out row; that of the run if None.
      delta: Of metrics and run; that of the run if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      average: Weights to evaluate, as for `predict.predict`; None for the last ones.
      reporter: Receives progress; None for none.

    Raises:
      InputError: name, value, bound, remedy.
    """
    folder, reporter = pathlib.Path(run), reporter or Silent()
    chosen = choose(folder, average=average)
    record, manifest = run_record.read_run(folder)
    check_task(chosen)
    digests = _digests_of(batches, record)
    held_out = HeldOut(
        table, manifest.columns, manifest.dataset, digests, option="--input"
    )
    bounded = held_out.bounded
    check_unit(Bounded.of(manifest.dataset), held_out, table)
    trained = SourceTable.from_json(read_checksums(batches).table)
    trained.check_apart(
        table_of(list_blocks(os.fspath(table), of_numbers=False)), "--input"
    )
    _check_new(folder)
    stated = privacy.run_statement(
        record, manifest, delta=delta, allow_large_delta=allow_large_delta
    )
    of_run = stated.epsilon.guarantee
    asked = of_run if epsilon is None else epsilon
    check_float("epsilon", asked, above=0)
    price = EvaluationPrice.of_one(
        asked, stated.delta, of_run=of_run, bounded=bounded, of_runs=record.of_runs
    )
    reporter.say("loading TensorFlow")
    with locked(folder / PRIVATE_NAME, folder):
        _check_new(folder)
        noise, of_rows = price.noise_multiplier, price.of_rows
        found = estimated(held_out, chosen, noise, reporter, of_rows=of_rows)
        metrics = {"method": record.method, **_fields(*found, chosen, price)}
        write_atomically(folder / METRICS_NAME, pretty_json(metrics))
    return metrics


def check_task(chosen: ChosenModel) -> None:
    """Accepts a model whose losses have a public bound.

    Raises:
      InputError: it predicts something else than one label, or nothing bounds it.
    """
    if chosen.serving.outputs not in _OUTPUTS or chosen.target is None:
        raise InputError(
            f"Expected {chosen.run} to predict one label; its metrics have no public "
            "bound. Give `dpsgd train --eval`, whose metrics no epsilon covers."
        )
    if chosen.serving.task == OTHER and chosen.target.range is None:
        raise InputError(
            f"Expected the label of {chosen.run} to have a public range, which bounds "
            "the errors of the numbers that it predicts. Give it a range in the "
            "schema, and prepare, batch and train again."
        )


def check_unit(
    of_run: Bounded | None, held_out: HeldOut, table: str | os.PathLike[str]
) -> None:
    """Refuses held-out rows whose privacy unit is not that of the run.

    Of users by another column, or who are not bounded, nothing bounds how many rows of
    one user of the run are held out.

    Args:
      of_run: How the users of the training rows are bounded; None if the unit is a row.
      held_out: The rows.
      table: Where they are.

    Raises:
      InputError: the units differ.
    """
    wanted, unit = (
        "a row" if each is None else f"a user by column {each.user_column}"
        for each in (of_run, held_out.bounded)
    )
    if wanted != unit:
        raise InputError(
            f"Expected {held_out.option} {table} to have the privacy unit of the run, "
            f"{wanted}; it is {unit}. Give a part of the same preparation; of users "
            "`dpsgd prepare --bound-held-out` makes it."
        )


def _digests_of(batches: str | os.PathLike[str], record: RunRecord) -> frozenset[str]:
    """Returns the digests of the files that the run's batches were sampled from."""
    if read_manifest(batches).fingerprint != record.manifest_fingerprint:
        raise InputError(
            f"Expected --batches {batches} to be those of the run; their manifest is "
            "another. Give the folder that the run was trained on."
        )
    return frozenset(read_checksums(batches).inputs)


def _check_new(run: pathlib.Path) -> None:
    path = run / METRICS_NAME
    if not path.exists():
        return
    by = "`dpsgd evaluate`" if "evaluation" in read_json(path) else "--eval"
    raise InputError(
        f"Expected {run} to have no metrics; it has those of {by} in {METRICS_NAME}, "
        f"and each evaluation is a release of its own. `dpsgd report {run}` shows them."
    )


def estimated(
    held_out: HeldOut,
    chosen: ChosenModel,
    noise_multiplier: float,
    reporter: Reporter,
    *,
    of_rows: float = 0.0,
) -> tuple[Estimates, float]:
    """Returns the metrics of one release, and the largest loss that counts.

    Args:
      held_out: The rows.
      chosen: The model, which ``check_task`` accepted.
      noise_multiplier: Noise standard deviation over the sensitivity of all sums.
      reporter: Receives progress.
      of_rows: See `most_rows`.
    """
    bounded, target = held_out.bounded, chosen.target
    # Progress would tell how many rows users have.
    rows = _read(held_out, chosen, noise_multiplier, Silent() if bounded else reporter)
    if bounded is None:
        count, at_most = Count(value=held_out.num_rows), None
    else:
        count = _count(release({"rows": rows.count()}, noise_multiplier), bounded)
        at_most = most_rows(count, bounded, of_rows)
    released = release(rows.sums(at_most), noise_multiplier)
    found, unit = _ESTIMATES[chosen.serving.task](released, count, rows.cap), 1.0
    if target is not None and target.range is not None:
        unit = target.half_range
        found = found.in_units(unit)
    if count.value < least_rows(rows, noise_multiplier):
        found = found.without_metrics()
    return found, rows.cap * unit**2


def _count(released: dict[str, NoisySum], bounded: Bounded) -> Count:
    found, most = released["rows"], bounded.max_examples_per_user
    return Count(value=max(1.0, float(found.values[0])), noise=found.stddev, most=most)


def _read(
    held_out: HeldOut, chosen: ChosenModel, noise_multiplier: float, reporter: Reporter
) -> KeptRows:
    """Returns all rows."""
    # Here, because TensorFlow takes seconds to load: the checks precede it.
    from trainer.prediction.exported_model import load

    predict, (output, *_) = load(chosen, are_secret=True), chosen.serving.outputs
    rows, done = None, 0
    reporter.start(held_out.num_rows, done=0)
    for columns in held_out.batches():
        labels, found = columns[LABEL], predict(columns)[output]
        if rows is None:
            rows = _kept(held_out, chosen.serving.task, labels, found)
            bounded = held_out.bounded
            most = bounded.num_examples if bounded else held_out.num_rows
            check_rows(rows, noise_multiplier, most, held_out.option)
        rows.add(np.asarray(labels), found)
        done += len(found)
        reporter.advance(done)
    reporter.stop()
    assert rows is not None  # there are rows
    return rows


def _kept(
    held_out: HeldOut, task: str, labels: np.ndarray, predictions: np.ndarray
) -> KeptRows:
    """Returns what is kept of rows such as these."""
    bounded = held_out.bounded
    if task == OTHER and not labels.size == predictions.size == len(labels):
        raise InputError(
            "Expected one number in each label and prediction, for a metric with a "
            "public bound. Give `dpsgd train --eval`, whose metrics no epsilon covers."
        )
    return kept_rows(
        task,
        2 if task == BINARY else predictions.shape[-1],
        bounded.max_examples_per_user if bounded else None,
    )


def _fields(
    found: Estimates, cap: float, chosen: ChosenModel, price: EvaluationPrice
) -> dict[str, Any]:
    """Returns the fields of metrics.json but for the method."""
    known = {name: each for name, each in found.metrics.items() if each is not None}
    return {
        "examples": "held-out",
        **{n: None if e is None else e.value for n, e in found.metrics.items()},
        "num_examples": round(found.num_rows),
        "guessing": found.guessing,
        "aggregates": {},
        "intervals": {name: each.interval for name, each in known.items()},
        "evaluation": {
            **header(**_HEADER),
            **dataclasses.asdict(price),
            "weights": chosen.average,
            "largest_loss": cap,
            "larger_losses": None if found.capped is None else found.capped.value,
        },
    }
