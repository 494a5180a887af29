"""``dpsgd fit``: one command from a table to a private model and its page."""

from __future__ import annotations

import csv
import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from dpsgd import fit_stages
from pipelines.core.files.locks import locked
from tests.command_line import invoke
from tests.warm_processes import warm_python

pytestmark = pytest.mark.usefixtures("warm_starts")

NUM_ROWS = 4000
#: Rows of the parts, which a hash of their places chooses.
NUM_TRAIN, NUM_TEST = 3194, 419
JOBS = ("clerk", "executive", "farmer", "?")
SCHOOLS = ("HS-grad", "Bachelors", "Masters")
CHOICES = [
    "census.csv", "--label=income", "--classes=<=50K,>50K", "--numeric=age",
    "--category=workclass,education", "--date=joined", "--text=remark", "--epsilon=6",
    "--range=joined:2000-01-01:2023-12-31", "--rows-are-independent",
    "--train=--hidden 8 --embedding-dim 2",
    f"--batch-size={NUM_TRAIN}", "--epochs=40",  # whose epsilon takes no time
]  # fmt: skip


def write_census(path: pathlib.Path) -> None:
    """Rows in the manner of the Adult census, made up, with an AUC of about 0.85."""
    random = np.random.default_rng(0)
    age = random.integers(17, 90, NUM_ROWS)
    job, school = (
        random.integers(0, len(names), NUM_ROWS) for names in (JOBS, SCHOOLS)
    )
    joined = random.integers(2000, 2024, NUM_ROWS)
    effects = np.array([0, 2, -2, 0])[job] + np.array([-1, 0, 1.5])[school]
    odds = -1 + effects + 0.05 * (age - 50)
    rich = random.random(NUM_ROWS) * (1 + np.exp(-odds)) < 1
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["", "age", "workclass", "education", "joined", "remark", "income"]
        writer.writerow(names)
        for row in range(NUM_ROWS):
            years = age[row] if row % 9 else ""
            words = "Paid late, twice" if row % 2 else "Nothing."
            income = ">50K" if rich[row] else "<=50K"
            known = (JOBS[job[row]], SCHOOLS[school[row]])
            day = f"{joined[row]}-03-04"
            writer.writerow([row, years, *known, day, words, income])


def run(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "dpsgd", "fit", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )


def refusal(*arguments: str) -> str:
    with pytest.raises(InputError) as error:
        invoke(["fit", *arguments], catch=False)
    return str(error.value)


def stop(number: int, total: int, title: str, given: Any, **_: Any) -> None:
    """Stands in for ``run_stage``, and ends the command before any work."""
    raise InputError(f"reached {given[0]}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, what a dry run said, and what the command said that went on."""
    folder = tmp_path_factory.mktemp("fit")
    write_census(folder / "census.csv")
    dry = run(folder, *CHOICES, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert {one.name for one in (folder / "census-fit").iterdir()} == {
        "fit.toml", "schema.toml", "first",
    }  # fmt: skip
    return folder, dry.stdout, run(folder, *CHOICES, "--json")


def test_one_command_leads_from_a_table_to_a_model_and_its_page(made: Any) -> None:
    folder, dry, done = made
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["privacy"]["epsilon"] <= 6
    assert found["privacy"]["delta"] == 1e-5  # of 3,194 training rows
    assert found["metrics"]["auc"] > 0.7
    assert found["metrics"]["log_loss"] < found["metrics"]["guessing"]["log_loss"]
    assert "<title>" in (folder / "census-fit" / "report.html").read_text()
    # What it costs stands before any batch is sampled, and each stage as it is typed.
    assert "noise" in dry
    assert f"$ dpsgd plan --num-examples={NUM_TRAIN} --batch-size={NUM_TRAIN}" in dry
    assert "[1/8]" not in done.stderr  # done by the dry run
    assert "$ dpsgd train --batches=census-fit/batches --out" in done.stderr
    # Model and metrics together have the epsilon that was asked for.
    claim = "Model, metrics and ranges together are (6.0000, 1e-05)-differentially"
    assert found["together"].startswith(claim)
    ranges = (folder / "census-fit" / "ranges.toml").read_text()
    assert "by dpsgd statistics, epsilon 6.0000, delta 1e-05" in ranges
    assert not (folder / "census-fit" / "first").exists()


def test_the_raw_table_gives_what_its_prepared_rows_give(
    made: Any, tmp_path: pathlib.Path
) -> None:
    folder, _, _ = made

    def predict(rows: str, *carry: str) -> Any:
        out = tmp_path / "out.parquet"
        line = ["predict", f"{folder}/census-fit/run", f"--input={folder}/{rows}"]
        done = invoke([*line, f"--out={out}", *carry])
        assert done.exit_code == 0, done.output
        table = pq.read_table(out)
        out.unlink()
        return table

    prepared = predict("census-fit/data/test")
    raw = predict("census.csv", "--carry=remark", "--carry=")
    assert raw.column_names == ["remark", "", "predicted", "probability"]
    assert raw[""].to_pylist() == [str(row) for row in range(NUM_ROWS)]
    assert len(prepared) == NUM_TEST
    # Each held-out row is predicted as it is in the table, in its order.
    # Batches of other sizes round otherwise: the nearest is on either side.
    everything = np.sort(np.asarray(raw["probability"]))
    found = prepared["probability"].to_numpy()
    above = np.clip(np.searchsorted(everything, found), 1, NUM_ROWS - 1)
    far = np.abs(everything[[above - 1, above]] - found).min(0)
    np.testing.assert_array_less(far, 1e-5)
    assert np.std(prepared["probability"]) > 0.1
    rich = np.asarray(prepared["probability"]) > 0.5
    assert prepared["predicted"].to_pylist() == [
        ">50K" if each else "<=50K" for each in rich
    ]


def test_given_again_it_goes_on_behind_what_is_done(made: Any) -> None:
    folder, _, done = made
    page, model = (
        folder / "census-fit" / name for name in ("report.html", "run/model.keras")
    )
    page.unlink()
    before = model.stat().st_mtime_ns
    said = model.with_name("privacy.json")
    said.write_text(said.read_text().replace("1e-05", "1e-30"))  # a public file
    again = run(folder, *CHOICES, "--json")
    assert json.loads(again.stdout) == json.loads(done.stdout)
    assert "[8/8]" in again.stderr
    for number in (3, 4, 5, 6, 7):
        assert f"[{number}/8]" not in again.stderr
    assert page.exists()
    assert model.stat().st_mtime_ns == before


def test_other_choices_are_refused_once_something_was_made(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, *_ = made
    monkeypatch.chdir(folder)
    kept = (folder / "census-fit" / "fit.toml").read_bytes()
    assert "hold fit.toml of this command" in refusal(*CHOICES, "--epsilon=4")
    assert (folder / "census-fit" / "fit.toml").read_bytes() == kept


def test_the_file_of_choices_gives_the_same_choices(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, *_ = made
    monkeypatch.chdir(folder)
    arguments = ["fit", "--config=census-fit/fit.toml", "--dry-run"]
    said = invoke(arguments, catch=False)
    assert said.exit_code == 0


def test_users_and_numbers_have_one_epsilon_with_nothing_uncovered(
    tmp_path: pathlib.Path, typed: Callable[..., str]
) -> None:
    lines = ["who,minutes,cost"]
    lines += [f"u{n // 3},{n % 60},{(n * 7 + n % 60) % 99}" for n in range(15_000)]
    (tmp_path / "rides.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "rides.toml").write_text(
        'version = 1\n[columns.who]\nkind = "user"\n[columns.minutes]\n'
        'kind = "numeric"\n[columns.cost]\nkind = "label"\ntask = "regression"\n'
        "range = [0, 99]\n"
    )
    found = json.loads(typed(
        "fit", "rides.csv", "--schema=rides.toml", "--max-examples-per-user=2",
        "--num-examples=9000", "--epsilon=9", "--delta=1e-4", "--batch-size=256",
        "--epochs=1", "--train=--hidden 2", "--of-runs=2", "--json",
    ))  # fmt: skip
    assert found["together"].startswith(
        "Model, metrics and ranges of at most 2 such fits of this table, by one plan "
        "and split, together are (9.0"
    )
    assert found["privacy"]["of_runs"] == 2
    assert "metrics of at most 2 such runs" in found["metrics"]["evaluation"]["claim"]
    assert (
        "of at most 2 runs together" in (tmp_path / "rides-fit/report.html").read_text()
    )
    assert "private for one user, whose rows are in one part" in found["together"]
    assert set(found["metrics"]["intervals"]) == {
        "mean_squared_error", "mean_absolute_error"
    }  # fmt: skip
    assert "mean_squared_error" in found["metrics"]["guessing"]
    assert "for one user" in found["metrics"]["evaluation"]["claim"]
    assert "by dpsgd statistics" in (tmp_path / "rides-fit/ranges.toml").read_text()


def test_a_table_that_grew_since_the_fit_began_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of `val` that gave ranges would train; and so after every later stage."""
    monkeypatch.chdir(tmp_path)
    write_census(tmp_path / "census.csv")
    lines = (tmp_path / "census.csv").read_text().splitlines(keepends=True)

    def grow(number: int, total: int, title: str, given: Any, **_: Any) -> None:
        made = invoke([*given], catch=False)
        assert made.exit_code == 0
        if title == grows_after:
            (tmp_path / "census.csv").write_text("".join([*lines, *lines[1:1001]]))

    monkeypatch.setattr(fit_stages, "run_stage", grow)
    for grows_after in ("compute the noise", "find ranges with differential privacy"):
        (tmp_path / "census.csv").write_text("".join(lines))
        out = f"--out={grows_after.partition(' ')[0]}"
        assert "its files have changed" in refusal(*CHOICES, out)
        assert "its files have changed" in refusal(*CHOICES, out)
        assert not pathlib.Path(out.partition("=")[2], "batches").exists()


# -- choices ---------------------------------------------------------------------------


def test_what_only_a_person_can_know_is_asked_for_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "visits.csv").write_text("patient_id,age,ward\n\0\0,not,a,row\n")
    said = refusal("visits.csv", "--epsilon=3")
    for words in (
        "which column to predict (--label NAME)",
        "the kind of patient_id, age, ward (one of --numeric, --category,",
        "whether a person may have several rows (--user COLUMN of the person's id, or "
        "--rows-are-independent)",
    ):
        assert words in said
    assert not (tmp_path / "visits-fit").exists()


def test_choices_may_change_while_nothing_was_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label that needs classes fails in the first stage; then they are given."""
    write_census(tmp_path / "census.csv")
    monkeypatch.chdir(tmp_path)
    wrong = [one for one in CHOICES if not one.startswith("--classes")]
    assert "Expected stage 1, dpsgd prepare, to succeed" in refusal(*wrong)
    monkeypatch.setattr(fit_stages, "run_stage", stop)
    assert refusal(*CHOICES) == "reached prepare"
    out = tmp_path / "census-fit"
    kept = (out / "fit.toml").read_bytes()
    with locked(out, out):  # as by a fit that has begun its first stage
        assert "no other job to write census-fit" in refusal(*CHOICES, "--epsilon=1")
    assert (out / "fit.toml").read_bytes() == kept
