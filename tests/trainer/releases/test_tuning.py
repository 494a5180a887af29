"""``tune``: the best of a random number of runs, of which nothing else is left."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scipy import stats

from accounting import profiles
from accounting.claims.selection import (
    NumberOfRuns,
    Tuning,
    as_good_as,
    epsilon_of_best,
)
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.job.batch_settings import BatchSettings
from tests.trainer.conftest import make_rows, write_held_out
from tests.trainer.run.whole_runs import Planted, Said, private_settings
from trainer.core import claim_names
from trainer.core.run import run_record
from trainer.releases import evaluate, tuning
from trainer.report.progress import Silent
from trainer.run import privacy
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

pytestmark = pytest.mark.usefixtures("warm_starts")

DELTA, EPSILON, RUNS = 1e-3, 4.0, 2
#: Number of runs that a search of these tests draws.
COUNT = 3
BATCHES = BatchSettings(expected_batch_size=20, num_steps=6, sampler="poisson")
SECRET = "runs.json"


def _candidates(**changes: Any) -> list[TrainSettings]:
    fields = {"target_epsilon": EPSILON, "noise_multiplier": None, **changes}
    fields["target_delta"] = DELTA
    return [private_settings(learning_rate=rate, **fields) for rate in (0.01, 0.1)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Rows to train on, and others to score."""
    found = tmp_path_factory.mktemp("tuning")
    write_held_out(found / "train", make_rows(200, seed=1))
    write_held_out(found / "val", make_rows(400, seed=2))
    return found


def _price_of(asked: dict[str, Any]) -> dict[str, Any]:
    """A search before its winner, at some price."""
    price = {
        "epsilon": EPSILON, "delta": DELTA, "noise_multiplier": 1.0,
        "noise_of_score": 1.0, "shape": 1.0,
    }  # fmt: skip
    begun = {"asked": asked, "price": price, "claim": "", "winner": None}
    return {**tuning.header(**tuning._HEADER), **begun}


@pytest.fixture(scope="module", autouse=True)
def noise_is_known() -> Iterator[None]:
    """Of the runs of ``EPSILON``; the tests of ``Tuning`` search for noise."""

    def price(self: Tuning, epsilon: float, *_: Any) -> Any:
        found = self.at_noise(0.64631)
        assert 0.999 * epsilon < found.epsilon <= epsilon == EPSILON
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tuning, "for_epsilon", functools.cache(price))
        yield


@pytest.fixture
def trains_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains in this process, which has TensorFlow; returns what calls a function."""
    call = tuning.processes.call

    def called(function: str, *arguments: Any) -> Any:
        here = function == tuning._TRAIN
        return train(*arguments) if here else call(function, *arguments)

    monkeypatch.setattr(tuning.processes, "call", called)
    return called


def checked(root: pathlib.Path, out: pathlib.Path, **changes: Any) -> Any:
    """The request of a search, or its refusal."""
    given: dict[str, Any] = {
        "candidates": _candidates(), "batches": BATCHES, "num_runs": RUNS,
        "scored": "val", **changes,
    }  # fmt: skip
    scored = root / given.pop("scored")
    return tuning.check(str(root / "train"), scored, out, **given)


@dataclasses.dataclass
class Seen:
    """What a search did, as it did it."""

    noises: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    folders: list[set[str]] = dataclasses.field(default_factory=list)
    tokens: list[str] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    numbers: list[list[bytes]] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)


def _watched(
    root: pathlib.Path,
    out: pathlib.Path,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    die_at: int | None = None,
) -> tuple[dict[str, Any], Seen]:
    """Searches with a number of runs, and returns what is published, and what was."""
    seen, release, estimated = Seen(), evaluate.release, evaluate.estimated

    def look(sums: Any, noise: float) -> Any:
        seen.noises.append(noise)
        return release(sums, noise)

    def note(scored: Any, chosen: Any, *more: Any) -> Any:
        run = chosen.run
        if die_at == len(seen.tokens):
            raise Planted
        seen.tokens.append(run.parent.name)
        seen.folders.append({p.name for p in run.parent.parent.iterdir() if p.is_dir()})
        record, _ = run_record.read_run(run)
        seen.rates.append(record.optimizer["learning_rate"])
        batches = run.parent / "batches" / "private" / "sampling.key"
        seen.keys.append(batches.read_bytes())
        graph = (run / "saved_model" / "saved_model.pb").read_bytes()
        seen.numbers.append(sorted(set(re.findall(rb"__inference_[a-z_]+_\d+", graph))))
        found = estimated(scored, chosen, *more)
        seen.scores.append(found[0].metrics["accuracy"].value)
        seen.losses.append(found[0].metrics["log_loss"].value)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "release", look)
        patched.setattr(evaluate, "estimated", note)
        patched.setattr(NumberOfRuns, "draw", lambda *_: count)
        reporter = Said()
        try:
            request = checked(root, out, score="accuracy")
            found = tuning.tune_checked(request, reporter)
        finally:
            seen.said = reporter.lines
    return found, seen


@pytest.fixture(scope="module")
def search(
    root: pathlib.Path, warm_starts: None
) -> tuple[pathlib.Path, dict[str, Any], Seen]:
    """A search of ``COUNT`` runs that is finished."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        found, seen = _watched(root, root / "out", COUNT, monkeypatch)
    return root / "out", found, seen


def test_each_run_has_batches_and_noise_of_its_own_and_the_noise_of_the_theorem(
    search: Any,
) -> None:
    _, found, seen = search
    assert len(seen.tokens) == len(set(seen.tokens)) == COUNT
    assert len(set(seen.keys)) == COUNT
    assert set(seen.rates) <= {0.01, 0.1}
    price, law = found["price"], as_good_as(RUNS, found["price"]["shape"] or math.inf)
    plan = DpSgdPlan.from_json(found["asked"]["plan"])
    run = profiles.run(plan, price["noise_multiplier"])
    assert epsilon_of_best(run, law, DELTA) == price["epsilon"] <= EPSILON * 1.00001


def test_candidates_are_drawn_uniformly_and_runs_by_their_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "_rows_of", lambda _: ())
    law = as_good_as(4, 3.0)
    request: Any = type("Request", (), {"law": law, "candidates": [None] * 5})
    drawn = [tuning._drawn(request) for _ in range(2_000)]
    picked = Counter(one for state in drawn for _, one in state.runs)
    # Each of the two tests fails once in ten million times.
    assert stats.chisquare([picked[one] for one in range(5)]).pvalue > 1e-7
    counts = Counter(min(len(state.runs), 12) for state in drawn)
    chances = [*law.probabilities[:11], law.probabilities[11:].sum()]
    seen = [counts[number] for number in range(1, 13)]
    assert stats.chisquare(seen, [2_000 * one for one in chances]).pvalue > 1e-7
    # Seen to fail if the number is always the expected one.
    always = [2_000.0 if number == round(law.mean) else 0.0 for number in range(1, 13)]
    assert stats.chisquare(always, [2_000 * one for one in chances]).pvalue < 1e-7


def test_a_score_is_of_one_gaussian_release_with_the_noise_of_the_theorem(
    search: Any,
) -> None:
    _, found, seen = search
    price = found["price"]
    assert seen.noises == [price["noise_of_score"]] * COUNT
    law = as_good_as(RUNS, price["shape"] or math.inf)
    score = profiles.gaussian(price["noise_of_score"])
    assert epsilon_of_best(score, law, DELTA) <= EPSILON
    less = profiles.gaussian(0.99 * price["noise_of_score"])
    assert epsilon_of_best(less, law, DELTA) > EPSILON


def test_the_statement_of_the_winner_is_that_of_the_whole_search(search: Any) -> None:
    out, found, _ = search
    record, manifest = run_record.read_run(out / "run")
    stated = privacy.run_statement(record, manifest, delta=None)
    assert stated.epsilon.guarantee == found["price"]["epsilon"]
    assert claim_names.SELECTION in stated.relies_on
    one = dataclasses.replace(record, selection={})
    alone = privacy.run_statement(one, manifest, delta=None).epsilon.guarantee
    assert alone < 0.97 * stated.epsilon.guarantee
    assert (
        f"({math.ceil(1e4 * found['price']['epsilon']) / 1e4:.4f}, 0.001)"
        in (found["claim"])
    )


def test_nothing_is_left_but_the_winner_and_its_score(search: Any) -> None:
    out, found, seen = search
    assert {path.name for path in out.iterdir()} == {"tuning.json", "run", "batches"}
    best = max(range(COUNT), key=seen.scores.__getitem__)
    assert found["winner"]["metrics"]["accuracy"]["value"] == seen.scores[best]
    record, _ = run_record.read_run(out / "run")
    settings = found["winner"]["settings"]
    assert record.optimizer["learning_rate"] == settings["learning_rate"]
    assert settings["learning_rate"] == seen.rates[best]
    text = (out / "tuning.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(found))
    # Losses have all digits; accuracies are short, and may stand in another number.
    assert f"{seen.losses[best]}" in text
    lost = [loss for place, loss in enumerate(seen.losses) if place != best]
    assert len({*lost, seen.losses[best]}) == COUNT
    assert not any(f"{loss}" in text for loss in lost)
    assert not any(token in text for token in seen.tokens)


def test_the_model_does_not_tell_how_many_runs_were_before_it(search: Any) -> None:
    _, _, seen = search
    first, *later = seen.numbers
    assert first
    assert later == [first] * (COUNT - 1)


def test_a_run_that_lost_is_gone_when_the_next_begins(search: Any) -> None:
    _, _, seen = search
    for place, folders in enumerate(seen.folders):
        earlier = range(place)
        best = max(earlier, key=seen.scores.__getitem__, default=place)
        assert folders == {seen.tokens[best], seen.tokens[place]}


def test_a_killed_search_goes_on_with_the_runs_that_were_drawn(
    root: pathlib.Path,
    search: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    trains_here: Any,
) -> None:
    out, (_, found, _) = tmp_path / "out", search
    monkeypatch.setattr(tuning, "_priced", lambda *_: {**found, "winner": None})
    with pytest.raises(Planted):
        _watched(root, out, 2, monkeypatch, die_at=1)
    drawn = json.loads((out / "private" / SECRET).read_text())
    assert drawn["done"] == 1
    assert (out / "private").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(tuning, "_priced", None)  # the price is not asked for again
    _, seen = _watched(root, out, 5, monkeypatch)
    assert seen.tokens == [drawn["runs"][1][0]]
    again, seen = _watched(root, out, 2, monkeypatch)
    assert again["winner"] == json.loads((out / "tuning.json").read_text())["winner"]
    assert not seen.tokens  # it only says what it found


@pytest.mark.parametrize("changed", ["train", "val"])
def test_a_search_goes_on_with_the_rows_that_it_began_with(
    changed: str,
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for part in ("train", "val"):
        shutil.copytree(root / part, tmp_path / part)
    monkeypatch.setattr(tuning, "_priced", lambda _, asked, __: _price_of(asked))
    request = checked(tmp_path, tmp_path / "out")
    scored = []

    def score(*_: Any) -> Any:
        if not scored:
            shutil.rmtree(tmp_path / changed)
            num_rows = {"train": 200, "val": 400}[changed]
            write_held_out(tmp_path / changed, make_rows(num_rows, seed=8))
        scored.append(0.5)
        return 0.5, {}

    monkeypatch.setattr(NumberOfRuns, "draw", lambda *_: 2)
    monkeypatch.setattr(tuning, "_scored", score)
    for _ in range(2):  # at once, and given again
        with pytest.raises(InputError, match=r"as the search in .* began"):
            tuning.tune_checked(request, Silent())
    assert scored == [0.5]


@pytest.mark.parametrize("bad", [("0.01",), ("0.01", "0.1")])
def test_a_run_that_ends_for_good_scores_worst(
    bad: tuple[str, ...],
    root: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    trains_here: Callable[..., Any],
) -> None:
    """Seen to fail: its error ended the search, which never went on."""
    monkeypatch.setattr(tuning, "_priced", lambda _, asked, __: _price_of(asked))
    monkeypatch.setattr(NumberOfRuns, "draw", lambda *_: 3 - len(bad))
    places = iter((0, 1))
    monkeypatch.setattr(tuning.secrets, "randbelow", lambda _: next(places))
    request = checked(root, tmp_path / "out", score="accuracy")
    trained = []

    def called(function: str, *arguments: Any) -> Any:
        if function != tuning._TRAIN:
            return trains_here(function, *arguments)
        asked = arguments[0]
        trained.append(f"{asked.settings.learning_rate}")
        if trained[-1] in bad:
            huge = dataclasses.replace(asked.settings, learning_rate=1e38)
            asked = dataclasses.replace(asked, settings=huge)
        return trains_here(function, asked)

    monkeypatch.setattr(tuning.processes, "call", called)
    if len(bad) == 2:
        for _ in range(2):  # given again, no run is made again
            with pytest.raises(InputError, match="reach its last step"):
                tuning.tune_checked(request, Silent())
        assert len(trained) == 1
        return
    winner = tuning.tune_checked(request, Silent())["winner"]
    assert (winner["candidate"], trained) == (1, ["0.01", "0.1"])
    assert run_record.read_run(tmp_path / "out/run")[0].complete


def test_lines_of_progress_do_not_depend_on_the_number_of_runs(
    root: pathlib.Path,
    search: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, found, seen = search
    monkeypatch.setattr(tuning, "_priced", lambda *_: {**found, "winner": None})
    monkeypatch.setattr(tuning, "_scored", lambda *_: (0.5, {}))
    for count in (1, 9):
        _, other = _watched(root, tmp_path / f"{count}", count, monkeypatch)
        assert other.said == seen.said != []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"candidates": [private_settings()]}, "candidates with one epsilon"),
        ({"candidates": _candidates(method="model-mix", optimizer="sgd",
                                    l2_norm_clip=1.0, mix_width=0.1)},
         "method='model-mix' to have the theorem of DP-SGD"),
        ({"candidates": [*_candidates(), *_candidates(target_epsilon=1.0)]},
         "candidates with one epsilon"),
        ({"batches": dataclasses.replace(BATCHES, sampler="balls-and-bins",
                                         num_epochs=1, num_steps=None)},
         "sampler='balls-and-bins' of several runs"),
        ({"score": "mean_squared_error"}, "by='mean_squared_error' to be one of auto"),
    ],
)  # fmt: skip
def test_wrong_searches_are_refused(
    changes: dict[str, Any], says: str, root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(InputError, match=says):
        checked(root, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()
