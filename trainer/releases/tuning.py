"""``tune``: the best of a random number of runs, of which nothing else is shown.

    OUT/tuning.json         what was asked, its price, and in the end the winner; public
    OUT/run, OUT/batches    the winner: a run as of `dpsgd train`, and its batches
    OUT/private/runs.json   which candidate is when, and the best so far; secret
    OUT/private/TOKEN/      batches and run of one candidate, until the end

Formal guarantees:
  - The number of runs and the candidates are drawn uniformly before the first run, and
    once: a search that was stopped goes on with them.
  - Each run has batches by a key of their own, and the noise with which the best run
    has the stated epsilon, by `accounting.claims.selection`.  All runs are on the same
    rows: others are refused.
  - A score is a function of one Gaussian release of held-out rows.  Two data sets that
    differ in a held-out row have the same models, and the score takes the place of the
    run: the same theorem gives the best score its epsilon.  If no row is both scored
    and trained on, model and score together have the larger epsilon.
  - A run that ends for good (see ``checkpoints``), or whose score is missing or no
    number, has the worst score.  Runs with equal scores are exchangeable, so that the
    first of them is one at random.
  - A run that lost leaves nothing when the next begins, and at the end nothing is left
    but the winner and its score.
  - Neither messages nor names of folders tell how many runs there are, or how far the
    search is.  Nor do the winner's files, since each run has a process of its own,
    whose counters start anew, and names of its own (see ``own_numbers``).
  - *Not* covered: how long the search took; copies of training rows in --score; what a
    file system keeps of removed files; who edits OUT.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from accounting import profiles
from accounting.claims.selection import NumberOfRuns, Tuning, law_of, noise_of_best
from accounting.core.intervals import upper_text
from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import InputError, check_choice, header
from pipelines.batches.folder import MANIFEST_NAME, PRIVATE_NAME
from pipelines.core.files.locks import LOCK_NAME, locked
from pipelines.files import processes
from pipelines.files.outputs import make_private_folder
from pipelines.files.storage import pretty_json, read_json, write_atomically
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.inputs.source_table import table_of
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from pipelines.tables.kinds import REGRESSION
from trainer.core.run import run_record
from trainer.core.run.checkpoints import has_ended
from trainer.model.evaluation import HeldOut
from trainer.model.metrics import BINARY, CLASSES, LOWER_IS_BETTER, OTHER, SQUARED_ERROR
from trainer.prediction.chosen_model import choose
from trainer.releases import evaluate
from trainer.report.progress import Reporter, Silent
from trainer.run import privacy
from trainer.run.preflight import check_files_of, is_finished, with_loss
from trainer.settings.methods import NON_PRIVATE
from trainer.settings.requests import Request
from trainer.settings.train_settings import TrainSettings

NAME, STATE_NAME = "tuning.json", "runs.json"
AUTO = "auto"
#: Task -> its scores, the one of ``AUTO`` first.
_SCORES = {
    BINARY: ("auc", "log_loss", "accuracy"),
    CLASSES: ("accuracy", "log_loss"),
    OTHER: (SQUARED_ERROR,),
}
_HEADER: Any = {"format_name": "dpsgd-tuning", "version": 1}
_TRAIN = "trainer.train:train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """A search that can be executed.

    Attributes:
      out: Folder for the results.
      batches: How each run samples.
      candidates: Settings of the runs, with their noise.
      price: Price of the scores.
      described: The fields of ``NAME`` before there is a winner.
    """

    out: pathlib.Path
    batches: BatchSettings
    candidates: tuple[TrainSettings, ...]
    law: NumberOfRuns
    asked: dict[str, Any]
    described: dict[str, Any]


def check(
    source: str,
    scored: pathlib.Path,
    out: pathlib.Path,
    *,
    candidates: Sequence[TrainSettings],
    batches: BatchSettings,
    num_runs: int,
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
      score: A metric of the task; auto is AUC, accuracy of more than two classes, or
        the squared error of a number.
      say: Gets a line for each step of the search for the noise.

    Raises:
      InputError: name, value, bound, remedy.
    """
    dataset = list_blocks(source)
    plan = batches.plan(dataset.num_examples)
    settings = _settled(candidates, dataset)
    task, num_rows = settings[0].task, _check_scored(scored, dataset)
    scores = _SCORES[task]
    check_choice("by", score, (AUTO, *scores))
    asked: dict[str, Any] = {
        "input": source,
        "scored": str(scored),
        "plan": plan.to_json(),
        "batches": dataclasses.asdict(batches),
        "candidates": [dataclasses.asdict(each) for each in settings],
        "num_runs": num_runs,
        "score": scores[0] if score == AUTO else score,
    }
    asked = json.loads(json.dumps(asked, default=str))  # as it is read again
    # A row that scores has epsilon and delta of a row that trains.
    epsilon, delta = settings[0].target_epsilon or 0, settings[0].target_delta or 0
    of_runs = Tuning(plan=plan, num_runs=num_runs, delta=delta)
    num_classes = dataset.description.get("label", {}).get("num_classes")
    rows, where = evaluate.kept_rows(task, num_classes or 2), f"--score {scored}"
    # One score alone needs less noise than the best of several.
    evaluate.check_rows(rows, gaussian_noise(epsilon, delta), num_rows, where)
    described = begun(out, asked) or _priced(of_runs, asked, say)
    price = described["price"]
    evaluate.check_rows(rows, price["noise_of_score"], num_rows, where)
    noisy = {
        "target_epsilon": None,
        "noise_multiplier": price["noise_multiplier"],
        "selection": (num_runs, price["shape"]),
    }
    return TuneRequest(
        out=out,
        batches=batches,
        candidates=tuple(dataclasses.replace(each, **noisy) for each in settings),
        law=law_of(num_runs, price["shape"]),
        asked=asked,
        described=described,
    )


def _check_scored(scored: pathlib.Path, dataset: Dataset) -> int:
    """Returns the number of rows that score, which train nothing, or refuses them."""
    columns, described = dataset.columns, dataset.description
    digests = dataset.footers.values()
    held_out = HeldOut(scored, columns, described, digests, option="--score")
    evaluate.check_unit(None, held_out, scored)
    of_score = table_of(list_blocks(os.fspath(scored), of_numbers=False))
    table_of(dataset).check_apart(of_score, "--score")
    return held_out.num_rows


def _settled(
    candidates: Sequence[TrainSettings], dataset: Dataset
) -> list[TrainSettings]:
    """Returns the candidates with their losses, or refuses one that is not covered."""
    if dataset.bounded is not None:
        raise privacy.no_search_of_users()
    settings = [with_loss(each, dataset.description) for each in candidates]
    label = dataset.description.get("label", {})
    epsilon, delta = settings[0].target_epsilon, settings[0].target_delta
    for each in settings:
        if each.method == NON_PRIVATE or privacy.theorem_of_settings(each):
            raise InputError(
                f"Expected method={each.method!r} to have the theorem of DP-SGD, from "
                "which that of the best of several runs follows. Take another --method."
            )
        target = each.target_epsilon, each.target_delta
        if (*target, each.noise_multiplier, each.of_runs) != (epsilon, delta, None, 1):
            raise InputError(
                "Expected candidates with one epsilon and delta, no --noise-multiplier "
                f"and of_runs=1, not {each.of_runs}: the theorem gives all one epsilon."
            )
        check_files_of(each)
        if each.task == OTHER and label.get("task") != REGRESSION:
            raise InputError(
                f"Expected loss={each.loss!r} to predict one of two or more classes, "
                "or a number whose range the schema has: nothing bounds what one row "
                "adds to another score. Give the label a range in the schema."
            )
    return settings


def begun(out: pathlib.Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of a search that began in a folder; None of a new one.

    Args:
      out: Folder of the search.
      asked: What it is known by.

    Raises:
      InputError: another search began there, or there is something else.
    """
    if (out / NAME).exists():
        found: dict[str, Any] = read_json(out / NAME)
        if found != {**found, **header(**_HEADER), "asked": asked}:
            raise InputError(
                f"Expected --out {out} to be of this very search; it is of one with "
                "other settings. Give the same, or another --out."
            )
        return found
    if out.exists() and (
        not out.is_dir() or {each.name for each in out.iterdir()} - {LOCK_NAME}
    ):
        raise InputError(
            f"Expected --out {out} to be new, or of a stopped search. Choose another."
        )
    return None


def _priced(
    of_runs: Tuning, asked: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the fields of ``NAME``, with noise and law."""
    epsilon, delta = asked["candidates"][0]["target_epsilon"], of_runs.delta
    say(f"{len(asked['candidates'])} candidates; computing the noise of each run")
    found = of_runs.for_epsilon(epsilon, say)
    noise = noise_of_best(
        profiles.gaussian,
        found.runs,
        epsilon=epsilon,
        delta=delta,
        guess=1.5 * gaussian_noise(epsilon, delta),
        say=lambda text: say(f"score: {text}"),
    )
    price = {**found.to_json(), "delta": delta, "noise_of_score": noise}
    both = upper_text(max(found.epsilon, epsilon))
    claim = (
        f"Model and best score together are ({both}, {delta!r})-differentially private "
        f"for one row of --input or --score under {evaluate.relations(None)}, if none "
        "is in both. Other releases of the rows of --score, such as ranges or metrics, "
        "add their epsilon and delta."
    )
    fields = {"asked": asked, "price": price, "claim": claim, "winner": None}
    return {**header(**_HEADER), **fields}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """Where a search is.  Sensitive.

    Attributes:
      runs: Token and index of the candidate of every run.
      rows: Digests of the training rows and of those that score.
      done: Number of runs that are scored.
      best: Index of the best run so far, -1 for none.
      score: Score of the run, of which larger ones are better; None if it is the worst.
      metrics: Metrics of the run's release: value, and interval.
    """

    runs: list[tuple[str, int]]
    rows: tuple[str, ...] = ()
    done: int = 0
    best: int = -1
    score: float | None = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


def _drawn(request: TuneRequest) -> _State:
    """Returns the state before the first run."""
    return _State(
        runs=[
            (secrets.token_hex(8), secrets.randbelow(len(request.candidates)))
            for _ in range(request.law.draw(secrets.randbits(64)))
        ],
        rows=_rows_of(request),
    )


def _rows_of(request: TuneRequest) -> tuple[str, ...]:
    folders = request.asked["input"], request.asked["scored"]
    return tuple(list_blocks(folder, of_numbers=False).digest for folder in folders)


def tune_checked(request: TuneRequest, reporter: Reporter) -> dict[str, Any]:
    """Searches for the best candidate, privately; returns the fields of ``NAME``.

    A finished search only says again what it found.

    Args:
      request: From `tuning.check`.
      reporter: Receives lines of progress, which say nothing about the runs.

    Raises:
      InputError: a candidate is refused by `dpsgd train`.
      StoppedError: SIGTERM or SIGINT arrived; the same request continues the search.
    """
    private = request.out / PRIVATE_NAME
    request.out.mkdir(parents=True, exist_ok=True)
    with locked(request.out, request.out):
        # Another process may have begun or ended it since the request was checked.
        at_present = begun(request.out, request.asked) or request.described
        if at_present["winner"] is not None:
            shutil.rmtree(private, ignore_errors=True)  # it was killed before
            return at_present
        write_atomically(request.out / NAME, pretty_json(request.described))
        make_private_folder(private)
        path = private / STATE_NAME
        state = _State(**read_json(path)) if path.exists() else _drawn(request)
        write_atomically(path, pretty_json(dataclasses.asdict(state)))
        num_steps = request.asked["plan"]["num_steps"]
        reporter.say(
            f"searching: {request.law.mean:.1f} runs of {num_steps} steps are expected;"
            " how many there are is secret, so that no progress is shown"
        )
        while state.done < len(state.runs):
            _forget(private, state)
            if tuple(state.rows) != _rows_of(request):
                raise InputError(
                    "Expected the rows of --input and --score to be as the search in "
                    f"{request.out} began; they have changed. Restore them, or begin "
                    "another search, whose epsilon adds."
                )
            score, metrics = _scored(request, state)
            found: dict[str, Any] = {"done": state.done + 1}
            if state.best < 0 or _order(score) > _order(state.score):
                found |= {"best": state.done, "score": score, "metrics": metrics}
            state = dataclasses.replace(state, **found)
            write_atomically(path, pretty_json(dataclasses.asdict(state)))
        return _published(request, state)


def _order(score: float | None) -> float:
    return -math.inf if score is None else score


def _forget(private: pathlib.Path, state: _State) -> None:
    """Removes all runs but the best and the next one, which may have begun."""
    kept = {state.runs[place][0] for place in (state.best, state.done) if place >= 0}
    for path in private.iterdir():
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path)


def _scored(request: TuneRequest, state: _State) -> tuple[float | None, dict[str, Any]]:
    """Makes batches and a run, and returns its score and the metrics of its release."""
    token, candidate = state.runs[state.done]
    folder = request.out / PRIVATE_NAME / token
    run, batches = folder / "run", folder / "batches"
    if not (batches / MANIFEST_NAME).exists():
        folder.mkdir(exist_ok=True)
        source = request.asked["input"]
        processes.call(MAKE_BATCHES, source, str(batches), request.batches)
    settings = request.candidates[candidate]
    asked = Request(settings=settings, batches=batches, run=run)
    while not is_finished(run):
        if has_ended(run):
            return None, {}
        try:
            processes.call(_TRAIN, asked)
        except InputError:
            if not has_ended(run):
                raise
    return _score(request, run)


def _score(
    request: TuneRequest, run: pathlib.Path
) -> tuple[float | None, dict[str, Any]]:
    asked, chosen = request.asked, choose(run)
    evaluate.check_task(chosen)
    _, manifest = run_record.read_run(run)
    columns = manifest.columns
    scored = HeldOut(asked["scored"], columns, manifest.dataset, option="--score")
    noise = request.described["price"]["noise_of_score"]
    found, _ = evaluate.estimated(scored, chosen, noise, Silent())
    metrics: dict[str, Any] = {
        name: {"value": each.value, "interval": each.interval}
        for name, each in found.metrics.items()
        if each is not None and math.isfinite(each.value)
    }
    value: float | None = metrics.get(asked["score"], {}).get("value")
    return (-value if value and asked["score"] in LOWER_IS_BETTER else value), metrics


def _published(request: TuneRequest, state: _State) -> dict[str, Any]:
    """Moves the winner out of ``private``, and removes what is left there."""
    private = request.out / PRIVATE_NAME
    token, candidate = state.runs[state.best]
    run = private / token / "run"
    if has_ended(run) and not is_finished(run):
        raise InputError(
            f"Expected a run of the search in {request.out} to reach its last step; an "
            "error of its values or code has ended each for good. Begin another search "
            "with other --learning-rate or --or, whose epsilon adds."
        )
    for name in ("batches", "run"):
        if (private / token / name).exists():
            os.rename(private / token / name, request.out / name)
    winner = {
        "candidate": candidate,
        "settings": request.asked["candidates"][candidate],
        "metrics": state.metrics,
    }
    found = {**request.described, "winner": winner}
    write_atomically(request.out / NAME, pretty_json(found))
    shutil.rmtree(private)
    return found
