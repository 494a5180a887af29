"""The runs of a search, one after another, and the one that is left.

    OUT/private/runs.json    which candidate is when, and the best so far; secret
    OUT/private/TOKEN/       batches and run of one of them

Formal guarantees:
  - number of runs, candidates and names of folders are drawn before the first run, and
    once: a search that is killed goes on with them.
  - all runs are of the same noise, rows and code, by which the theorem has one law for
    all: a search is refused from the moment that these, or ``tuning.NAME``, have
    changed.
  - a run with a smaller score than an earlier one leaves nothing when the next begins,
    and at the end nothing is left but the winner; equal scores are of runs that are
    exchangeable, so that the first of them is one at random.
  - a score that is missing or no number is the worst.
  - messages and names of folders tell neither how many runs there are nor how far the
    search is; nor do the winner's files, since each run has a process of its own, whose
    counters start anew, and names of its own (see ``own_numbers``).
  - *not* covered: how long it took; what a file system keeps of removed files.

Public: ``tuning.NAME``, run and batches of the winner.  Sensitive: all else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
import secrets
import shutil
from typing import Any

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.batches.folder import (
    MANIFEST_NAME,
    PRIVATE_NAME,
    read_checksums,
    read_manifest,
)
from pipelines.files import separate_process
from pipelines.files.folders import make_private_folder
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.locks import in_use, locked
from pipelines.files.storage import write_atomically
from pipelines.inputs.parquet_blocks import list_row_groups
from pipelines.job.batch_settings import MAKE_BATCHES
from trainer.core.run import run_record
from trainer.model.evaluation import HeldOut
from trainer.model.metrics import LOWER_IS_BETTER
from trainer.model.user_code import digest_of_source, functions_of
from trainer.prediction.chosen_model import choose
from trainer.releases import evaluate
from trainer.releases.tuning import (
    NAME,
    STATE_NAME,
    TuneRequest,
    begun,
    changed,
    check,
)
from trainer.report.progress import Reporter, Silent
from trainer.run.preflight import is_finished
from trainer.settings.request import Request

_TRAIN = "trainer.train:train"
_RUN, _BATCHES = "run", "batches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """Where a search is.  Sensitive.

    Attributes:
      runs: Token and index of the candidate of every run.
      made_of: ``_made_of`` the request.
      done: Number of runs that are scored.
      best: Index of the best run so far, -1 for none.
      score: Its score, of which larger ones are better; None if it is the worst.
      metrics: Of its release: value, and interval.
    """

    runs: list[tuple[str, int]]
    made_of: str = ""
    done: int = 0
    best: int = -1
    score: float | None = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def drawn(cls, request: TuneRequest) -> _State:
        """Returns the state before the first run."""
        count = request.law.draw(secrets.randbits(64))
        return cls(
            runs=[
                (secrets.token_hex(8), secrets.randbelow(len(request.candidates)))
                for _ in range(count)
            ],
            made_of=_made_of(request),
        )

    def after(self, score: float | None, metrics: dict[str, Any]) -> _State:
        """Returns the state with one more run.

        Args:
          score: Of the run, larger is better; None for the worst.
          metrics: Of its release.
        """
        known = -math.inf if self.score is None else self.score
        better = self.best < 0 or (-math.inf if score is None else score) > known
        best = self if not better else dataclasses.replace(
            self, best=self.done, score=score, metrics=metrics
        )  # fmt: skip
        return dataclasses.replace(best, done=self.done + 1)


def tune(*args: Any, reporter: Reporter | None = None, **settings: Any) -> Any:
    """Searches for the best candidate, privately; returns the fields of ``NAME``.

    Args:
      *args: As for `tuning.check`.
      reporter: Receives progress; None for none.
      **settings: As for `tuning.check`.

    Raises:
      InputError: name, value, bound, remedy.
    """
    return tune_checked(check(*args, **settings), reporter or Silent())


def tune_checked(request: TuneRequest, reporter: Reporter) -> dict[str, Any]:
    """Does what ``tune`` does, for a request that is already checked.

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
        # Another one may have begun, or ended, since the request was checked.
        at_present = begun(request.out, request.described["asked"])
        if at_present not in (None, request.described):
            raise in_use(request.out)
        if request.described["winner"] is not None:
            shutil.rmtree(private)  # it was killed while it did so
            return request.described
        write_atomically(request.out / NAME, pretty_json(request.described))
        make_private_folder(private, remedy="Choose another --out.")
        path = private / STATE_NAME
        state = _read(path) if path.exists() else _State.drawn(request)
        _write(path, state)
        reporter.say(
            f"searching: {request.law.mean:.1f} runs of {request.plan.num_steps} steps "
            "are expected; how many there are is secret, so that no progress is shown"
        )
        _check_unchanged(request, state)
        while state.done < len(state.runs):
            _forget(private, state)
            found = _scored(request, state)
            _check_unchanged(request, state)  # before the run counts
            state = state.after(*found)
            _write(path, state)
        return _published(request, state)


def _made_of(request: TuneRequest) -> str:
    """Returns a digest of the noise, rows, weights and code of a search.  Sensitive."""
    specs = {
        spec for each in request.candidates for spec in functions_of(each).values()
    }
    files = {each.initial_weights for each in request.candidates} - {None}
    weights = {str(file): pathlib.Path(file).read_bytes() for file in files if file}
    return fingerprint(
        {
            "described": request.described,
            "rows": list_row_groups(request.source).digest,
            "scored": list_row_groups(os.fspath(request.scored)).digest,
            "code": {spec: digest_of_source(spec) for spec in specs},
            "weights": {n: hashlib.sha256(d).hexdigest() for n, d in weights.items()},
        }
    )


def _check_unchanged(request: TuneRequest, state: _State) -> None:
    if state.made_of != _made_of(request):
        raise changed(request.out)


def _read(path: pathlib.Path) -> _State:
    return _State(**read_json(path))


def _write(path: pathlib.Path, state: _State) -> None:
    write_atomically(path, pretty_json(dataclasses.asdict(state)))


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
    run, batches = folder / _RUN, folder / _BATCHES
    if not (batches / MANIFEST_NAME).exists():
        folder.mkdir(exist_ok=True)
        separate_process.call(
            MAKE_BATCHES, request.source, str(batches), request.batches
        )
    if read_manifest(batches).plan != request.plan:
        raise InputError(
            f"Expected --input {request.source} to be as the search began; it has "
            "another number of rows. Restore it, or begin another search."
        )
    if not is_finished(run):
        request_of_run = Request(
            settings=request.candidates[candidate],
            batches=batches,
            held_out=None,
            run=run,
        )
        separate_process.call(_TRAIN, request_of_run)
    return _score(request, run, batches)


def _score(
    request: TuneRequest, run: pathlib.Path, batches: pathlib.Path
) -> tuple[float | None, dict[str, Any]]:
    _, manifest = run_record.read_run(run)
    inputs = read_checksums(batches).inputs
    chosen = choose(run)
    evaluate.check_task(chosen, manifest)
    asked = evaluate.EvaluateRequest(
        held_out=HeldOut(request.scored, manifest, inputs, option="--score"),
        chosen=chosen,
        method="",
        price=request.price,
        largest_loss=None,
        unit=evaluate.unit_of(manifest),
    )
    found, _ = evaluate.estimated(asked, Silent())
    metrics: dict[str, Any] = {
        name: {"value": each.value, "interval": each.interval}
        for name, each in found.metrics.items()
        if each is not None and math.isfinite(each.value)
    }
    value: float | None = metrics.get(request.score, {}).get("value")
    return (-value if value and request.score in LOWER_IS_BETTER else value), metrics


def _published(request: TuneRequest, state: _State) -> dict[str, Any]:
    """Moves the winner out of ``private``, and removes what is left there."""
    private = request.out / PRIVATE_NAME
    token, candidate = state.runs[state.best]
    for name in (_BATCHES, _RUN):
        if (private / token / name).exists():
            os.rename(private / token / name, request.out / name)
    winner = {
        "candidate": candidate,
        "settings": request.described["asked"]["candidates"][candidate],
        "score": request.score,
        "metrics": state.metrics,
    }
    found = {**request.described, "winner": winner}
    write_atomically(request.out / NAME, pretty_json(found))
    shutil.rmtree(private)
    return found
