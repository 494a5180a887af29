"""``tune``: the best of a random number of runs, of which nothing else is shown.

    OUT/tuning.json    what was asked, its price, and at the end the winner; public
    OUT/run            the winner: a run as of `dpsgd train`
    OUT/batches        its batches
    OUT/private        all else, until the end

Formal guarantees:
  - each run has a candidate that is drawn uniformly, batches by a key of their own, and
    noise by another; the noise is that with which the best of them has the stated
    epsilon, by `accounting.claims.selection`.
  - a score is a function of one Gaussian release of held-out rows.  For one of these
    rows models do not differ and the score is the run, so that the same theorem gives
    the best score its epsilon.
  - if no row is scored and trained on, model and score together have the larger
    epsilon.
  - what is published is the winner and its score.  `tuning_runs` keeps the rest secret.
  - price and claim are those that were computed when it began: an edited ``NAME`` is
    refused, before its first run, between runs and at the end.
  - *not* covered: how long it took; copies of training rows in --score.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from accounting.claims.selection.best_of import noise_of_best
from accounting.claims.selection.number_of_runs import NumberOfRuns
from accounting.claims.selection.selected import law_of
from accounting.composition import parts
from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import NAMES, REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.pld.gaussian import gaussian_noise
from accounting.core.validation import InputError, check_choice, check_float
from accounting.core.versioned_json import header
from accounting.planning.tuning import BEST, Tuning
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.files.json_files import read_json
from pipelines.files.locks import LOCK_NAME
from pipelines.inputs.parquet_blocks import Dataset, list_blocks, list_row_groups
from pipelines.inputs.source_table import table_of
from pipelines.job.batch_settings import BatchSettings
from pipelines.tables.schema.column_kinds import REGRESSION
from pipelines.tables.schema.schema import DATASET_NAME
from trainer.model.evaluation import bounded_users, check_files
from trainer.model.metrics import BINARY, CLASSES, OTHER, SQUARED_ERROR
from trainer.releases.held_out_sums import KeptRows
from trainer.releases.price import Price, check_rows, kept_rows
from trainer.run import privacy
from trainer.run.preflight import check_files_of, with_loss
from trainer.settings.method_settings import NON_PRIVATE
from trainer.settings.train_settings import TrainSettings

NAME, STATE_NAME = "tuning.json", "runs.json"
AUTO, AUC, LOG_LOSS, ACCURACY = "auto", "auc", "log_loss", "accuracy"
SCORES = (AUTO, AUC, LOG_LOSS, ACCURACY, SQUARED_ERROR)
#: Task -> its scores, the one of ``AUTO`` first.
_SCORES = {
    BINARY: (AUC, LOG_LOSS, ACCURACY),
    CLASSES: (ACCURACY, LOG_LOSS),
    OTHER: (SQUARED_ERROR,),
}
_HEADER: Any = {"format_name": "dpsgd-tuning", "version": 1}
#: A search for the noise of scores starts at so many times that of one score.
_GUESS = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """A search that can be executed.

    Attributes:
      source: Training rows.
      scored: Held-out rows.
      out: Folder for the results.
      batches: How each run samples.
      plan: The plan that follows from it.
      candidates: Settings of the runs, with their noise.
      law: Law of the number of runs.
      score: One of ``SCORES`` but ``AUTO``.
      price: Of the scores.
      described: The fields of ``NAME`` before there is a winner.
    """

    source: str
    scored: pathlib.Path
    out: pathlib.Path
    batches: BatchSettings
    plan: DpSgdPlan
    candidates: tuple[TrainSettings, ...]
    law: NumberOfRuns
    score: str
    price: Price
    described: dict[str, Any]


def check(
    source: str,
    scored: pathlib.Path,
    out: pathlib.Path,
    *,
    candidates: Sequence[TrainSettings],
    batches: BatchSettings,
    num_runs: int,
    epsilon_of_score: float | None = None,
    delta_of_score: float | None = None,
    score: str = AUTO,
    say: Callable[[str], None] = lambda text: None,
) -> TuneRequest:
    """Returns the checked request, with its price.

    Args:
      source: Training Parquet: a folder, a file or a quoted glob.
      scored: Held-out Parquet of the same columns, which trains nothing.
      out: New folder, or of a stopped search.
      candidates: Settings with one target epsilon and delta, which are those of the
        whole search for a training row.
      batches: How each run samples.
      num_runs: N: a candidate of the best tenth is tried as surely as by N runs.
      epsilon_of_score: Of the best score, for one of its rows; at most that of the
        model, which it is if None.
      delta_of_score: Of the best score; at most that of the model, which it is if None.
      score: One of ``SCORES``; auto is AUC, accuracy of more than two classes, or the
        squared error of a number.
      say: Gets a line for each step of the search for the noise.

    Raises:
      InputError: name, value, bound, remedy.
    """
    check_choice("score", score, SCORES)
    dataset = list_blocks(source)
    plan = batches.plan(dataset.num_examples)
    settings = _settled(candidates, dataset)
    task = settings[0].task
    files, num_rows = check_files(
        scored,
        dataset.columns,
        dataset.description,
        dataset.footers.values(),
        option="--score",
    )
    if bounded_users(files, "--score") is not None:
        raise InputError(
            f"Expected the users of --score {scored} not to be bounded, since the "
            "privacy unit of --input is a row. Give rows that `dpsgd bound` did not "
            "choose."
        )
    of_score = table_of(list_row_groups(os.fspath(scored)))
    table_of(dataset).check_apart(of_score, "--score")
    score = _score_of(score, task)
    asked = _asked(
        source, scored, settings, batches, plan,
        num_runs=num_runs,
        score=score,
        **_of_score(settings[0], epsilon_of_score, delta_of_score),
    )  # fmt: skip
    of_runs = Tuning(plan=plan, num_runs=num_runs, delta=settings[0].target_delta or 0)
    # One score alone needs less noise than the best of several.
    alone = gaussian_noise(asked["epsilon_of_score"], asked["delta_of_score"])
    rows, where = _kept(task, dataset), f"--score {scored}"
    check_rows(rows, alone, num_rows, where)
    described = begun(out, asked)
    if described is None:
        described = _priced(of_runs, asked, say)
    elif not _is_sealed(out, described):
        priced = _priced(of_runs, asked, say)
        if described != {**priced, "winner": described["winner"]}:
            raise changed(out)
    found = _request(described, settings, source, scored, out, batches)
    check_rows(rows, found.price.noise_multiplier, num_rows, where)
    return found


def _of_score(
    settings: TrainSettings, epsilon: float | None, delta: float | None
) -> dict[str, float | None]:
    """Returns epsilon and delta of the best score, by default those of the model.

    Raises:
      InputError: one is larger than that of the model, which a row that scores would
        then not have.
    """
    given = {"epsilon_of_score": epsilon, "delta_of_score": delta}
    of_model = settings.target_epsilon, settings.target_delta
    for (name, value), most in zip(given.items(), of_model, strict=True):
        if value is not None:
            check_float(name, value, above=0.0, at_most=most)
        given[name] = value or most
    return given


def _request(
    described: dict[str, Any],
    settings: Sequence[TrainSettings],
    source: str,
    scored: pathlib.Path,
    out: pathlib.Path,
    batches: BatchSettings,
) -> TuneRequest:
    """Returns the request of a search whose price is known."""
    asked, price = described["asked"], described["price"]
    noisy = {
        "target_epsilon": None,
        "noise_multiplier": price["noise_multiplier"],
        "selection": (asked["num_runs"], price["shape"]),
    }
    return TuneRequest(
        source=source,
        scored=scored,
        out=out,
        batches=batches,
        plan=DpSgdPlan.from_json(asked["plan"]),
        candidates=tuple(dataclasses.replace(each, **noisy) for each in settings),
        law=law_of(asked["num_runs"], price["shape"]),
        score=asked["score"],
        price=Price(
            epsilon=asked["epsilon_of_score"],
            delta=asked["delta_of_score"],
            noise_multiplier=price["noise_of_score"],
            claim=described["claim"],
        ),
        described=described,
    )


def _settled(
    candidates: Sequence[TrainSettings], dataset: Dataset
) -> list[TrainSettings]:
    """Returns the candidates with their losses, or refuses one that is not covered."""
    if dataset.bounded is not None:
        raise privacy.no_search_of_users()
    settings = [with_loss(each, dataset.description) for each in candidates]
    if not settings:
        raise InputError("Expected candidates to choose from; got none.")
    for each in settings:
        if each.method == NON_PRIVATE or privacy.theorem_of_settings(each):
            raise InputError(
                f"Expected method={each.method!r} to have the theorem of DP-SGD, from "
                "which that of the best of several runs follows. Take another --method."
            )
        if each.of_runs != 1:
            raise InputError(
                f"Expected of_runs={each.of_runs} to be 1 of a search: its theorem "
                "gives one epsilon, of which those of several searches add. Omit it."
            )
        if each.noise_multiplier is not None:
            raise InputError(
                "Expected --epsilon of the search, and no --noise-multiplier. Omit it."
            )
        if (each.target_epsilon, each.target_delta) != (
            settings[0].target_epsilon, settings[0].target_delta,
        ):  # fmt: skip
            raise InputError("Expected one epsilon and delta of all candidates.")
        check_files_of(each)
        if each.task == OTHER and not _has_range(dataset):
            raise InputError(
                f"Expected loss={each.loss!r} to predict one of two or more classes, "
                "or a number whose range the schema has: nothing bounds what one row "
                "adds to another score. Give the label a range in the schema."
            )
    return settings


def _has_range(dataset: Dataset) -> bool:
    """Returns whether labels are numbers with a public range."""
    description = dataset.description
    return (
        description.get("name") == DATASET_NAME
        and description["label"]["task"] == REGRESSION
    )


def _kept(task: str, dataset: Dataset) -> KeptRows:
    label = dataset.description.get("label", {})
    return kept_rows(task, label.get("num_classes") or 2)


def _score_of(score: str, task: str) -> str:
    known = _SCORES[task]
    if score == AUTO:
        return known[0]
    if score not in known:
        raise InputError(
            f"Expected --by {score} to be a score of the task {task!r}. Give "
            f"{' or '.join(known)}."
        )
    return score


def _asked(
    source: str,
    scored: pathlib.Path,
    settings: Sequence[TrainSettings],
    batches: BatchSettings,
    plan: DpSgdPlan,
    **others: Any,
) -> dict[str, Any]:
    """Returns what a search is known by when it goes on, as JSON."""
    fields: dict[str, Any] = json.loads(
        json.dumps(
            {
                "input": source,
                "scored": str(scored),
                "plan": plan.to_json(),
                "batches": dataclasses.asdict(batches),
                "candidates": [dataclasses.asdict(each) for each in settings],
                **others,
            },
            default=str,
        )
    )
    return fields


def begun(out: pathlib.Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of a search that began in a folder; None of a new one.

    Args:
      out: Folder of the search.
      asked: What it is known by.

    Raises:
      InputError: another search began there, it is finished, or there is something
        else.
    """
    path = out / NAME
    if not path.exists():
        names = [each.name for each in out.iterdir()] if out.is_dir() else []
        if (out.exists() and not out.is_dir()) or names not in ([], [LOCK_NAME]):
            raise InputError(
                f"Expected --out {out} to be new, or of a stopped search. Choose "
                "another."
            )
        return None
    found: dict[str, Any] = read_json(path)
    if found != {**found, **header(**_HEADER), "asked": asked}:
        raise InputError(
            f"Expected --out {out} to be of this very search; it is of one with other "
            "settings. Give the same, or another --out."
        )
    # With a private folder it was killed while it removed that.
    if found["winner"] is not None and not (out / PRIVATE_NAME).exists():
        raise InputError(
            f"Expected --out {out} to be unfinished; its winner is in {out}/run. A "
            "second search is a second release, whose epsilon adds. Choose another "
            "--out for it."
        )
    return found


def _is_sealed(out: pathlib.Path, described: dict[str, Any]) -> bool:
    """Whether a digest in the private folder tells if a search was edited.

    There is none before the first run, and none when there is a winner.
    """
    return described["winner"] is None and (out / PRIVATE_NAME / STATE_NAME).exists()


def changed(out: pathlib.Path) -> InputError:
    """Returns the refusal of a search that is not as it began in ``out``."""
    return InputError(
        f"Expected {NAME}, the rows of --input and --score, and the code and weights "
        f"of the candidates, to be as the search in {out} began; they have changed. "
        "Restore them, or begin another search, whose epsilon adds."
    )


def _priced(
    of_runs: Tuning, asked: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the fields of ``NAME``, with noise and law."""
    epsilon, delta = asked["candidates"][0]["target_epsilon"], of_runs.delta
    of_score, delta_of_score = asked["epsilon_of_score"], asked["delta_of_score"]
    say(f"{len(asked['candidates'])} candidates; computing the noise of each run")
    found = of_runs.for_epsilon(BEST, epsilon, say)
    assert found.runs is not None  # of `BEST`
    noise = noise_of_best(
        parts.gaussian,
        found.runs,
        epsilon=of_score,
        delta=delta_of_score,
        guess=_GUESS * gaussian_noise(of_score, delta_of_score),
        say=lambda text: say(f"score: {text}"),
    )
    price = {
        "epsilon": found.epsilon,
        "delta": delta,
        "noise_multiplier": found.noise_multiplier,
        "noise_of_score": noise,
        **found.to_json()["number_of_runs"],
    }
    both = max(found.epsilon, of_score)
    claim = (
        f"The best score is ({upper_text(of_score)}, {delta_of_score!r})-"
        "differentially private for one row of --score under the "
        f"{NAMES[REPLACE_SPECIAL]} relation. Model and score together are "
        f"({upper_text(both)}, {delta!r})-differentially private for one row, if none "
        "is trained on and scored. Other releases of the rows of --score, such as "
        "ranges or metrics, add their epsilon and delta."
    )
    begun = {"asked": asked, "price": price, "claim": claim, "winner": None}
    return {**header(**_HEADER), **begun}
