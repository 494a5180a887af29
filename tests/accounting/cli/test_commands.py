"""``dpsgd plan``: a table for people, JSON for machines, one line for mistakes."""

import json
import re
import shlex

import pytest

from accounting.cli import plan_answers
from accounting.comparison import Answer, Line, Question
from accounting.core.intervals import Bounds, NoiseBounds
from tests.command_line import invoke

pytestmark = pytest.mark.usefixtures("answers_once")

FLAGS = "--num-examples 10000 --batch-size 100 --epochs 2 --epsilon 2 --delta 1e-5"
QUESTION = FLAGS.split()


#: Of four steps per epoch: quick for every sampler.
SMALL = ["--num-examples", "400", *QUESTION[2:]]
#: Epsilon of the same is quicker than noise.
AT_NOISE = [*SMALL[:6], "--noise-multiplier", "2", "--delta", "1e-5"]


def run(*arguments):
    result = invoke(["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_has_every_sampler():
    text = run(*AT_NOISE)
    for sampler in ("deterministic", "dynamic-shuffle", "poisson", "balls-and-bins"):
        assert sampler in text
    assert "delta=1e-05, zero-out relation" in text


def test_another_relation_leaves_out_what_is_not_accounted_for():
    base = [*SMALL, "--relation", "add_or_remove_one"]
    text = run(*base, "--sampler", "poisson")
    assert "add-or-remove relation" in text
    answers = json.loads(run(*base, "--json"))
    assert answers["question"]["neighboring_relation"] == "ADD_OR_REMOVE_ONE"
    assert answers["question"]["num_steps"] == 8
    row, capped, bins = answers["answers"]
    [same] = json.loads(run(*SMALL, "--json", "--sampler", "poisson"))["answers"]
    assert row == same
    assert capped["sampler"] == "truncated-poisson"
    assert bins["sampler"] == "balls-and-bins"


def test_bands_are_shown_by_the_rule_or_as_given():
    def found(*asked: str) -> dict[str, int | None]:
        answers = json.loads(run("--json", *asked))["answers"]
        return {each["sampler"]: each["plan"].get("bands") for each in answers}

    assert "cyclic" not in run(*SMALL)  # nothing to gain
    given = found(*SMALL, "--bands", "4")
    assert given["cyclic-poisson"] == given["truncated-cyclic-poisson"] == 4
    assert given["poisson"] is None
    long = "--num-examples 6000 --batch-size 100 --epochs 1 --epsilon 2 --delta 1e-6"
    by_rule = found(*long.split())
    assert (by_rule["truncated-cyclic-poisson"], by_rule["poisson"]) == (8, None)
    as_batches = (*SMALL, "--bands", "4", "--sampler")
    assert found(*as_batches, "poisson") == {"cyclic-poisson": 4}


def test_a_sweep_shows_where_the_order_flips():
    """At 16 a shuffle needs more than Poisson batches, at 32 less: arXiv 2411.04205."""
    text = run(
        *("--num-examples", "36800000", "--batch-size", "65536"),
        *("--epochs", "1", "--epsilon", "5", "--delta", "2.7e-8", "--json"),
        *("--sweep", "epsilon", "--values", "16,32"),
        "--sampler=persistent-shuffle,poisson",
    )
    shuffled, poisson = (line["points"] for line in json.loads(text)["lines"])
    noise = "noise_multiplier"
    assert poisson[0][noise]["sufficient"] < shuffled[0][noise]["necessary"]
    assert shuffled[1][noise]["sufficient"] < poisson[1][noise]["sufficient"]


def test_a_sweep_at_given_noise_answers_epsilon_or_delta():
    base = [*QUESTION[:6], "--delta", "1e-5", "--noise-multiplier", "2", "--json"]
    base += ["--sampler", "deterministic", "--sweep"]
    [line] = json.loads(run(*base, "epochs", "--values", "2,1"))["lines"]
    assert [point["value"] for point in line["points"]] == [1, 2]
    one, two = (point["epsilon"]["upper"] for point in line["points"])
    assert 0 < one < two
    values = f"{one!r},{two!r}"
    [line] = json.loads(run(*base, "epsilon", "--values", values))["lines"]
    found = [point["delta"]["upper"] for point in line["points"]]
    # QUESTION has two epochs.
    assert found[0] > 1e-5 >= found[1] * (1 - 1e-6)
    # Six digits of a delta, rounded to nearest, would be one that is not proven.
    base.remove("--json")
    assert "1.234564e-06 " in run(*base, "delta", "--values", "1.234564e-6")


def test_mixing_is_shown_beside_dp_sgd():
    flags = ["--mix-width=0.1,0.2", "--linf-factor=4", "--l2-norm-clip=1", "--json"]
    rows = json.loads(run(*SMALL, *flags))["answers"]
    assert [row["name"] for row in rows] == [
        "poisson", "poisson, ModelMix 0.1, p=4", "poisson, ModelMix 0.2, p=4",
    ]  # fmt: skip
    noise = [row["noise_multiplier"]["sufficient"] for row in rows]
    assert noise == sorted(set(noise), reverse=True)


def test_total_noise_is_held_and_its_closed_form_shown():
    base = [*QUESTION[:4], "--num-steps", "200", "--delta", "1e-5"]
    base += ["--noise-multiplier", "4", "--tan", "--sweep", "noise-multiplier"]
    base += ["--values", "1,4", "--also-num-steps", "50"]
    lines = json.loads(run(*base, "--json"))["lines"]
    assert [line["name"] for line in lines] == [
        "poisson, 200 steps", "poisson, 50 steps",
    ]  # fmt: skip
    sizes = [[p["plan"]["expected_batch_size"] for p in e["points"]] for e in lines]
    assert sizes == [[25, 100], [50, 200]]
    etas = {p["tan_estimate"]["eta"] for e in lines for p in e["points"]}
    assert max(etas) == pytest.approx(min(etas), rel=1e-12)
    text = run(*base)
    assert "total noise 1/eta with eta=0.025" in text
    assert "an estimate and no guarantee" in text


def test_commands_of_the_page_get_to_their_work(root, small_plan, monkeypatch):
    class StartedError(Exception):
        pass

    def started(*_):
        raise StartedError

    monkeypatch.setattr("accounting.comparison.answer", started)
    monkeypatch.setattr("accounting.comparison.answer_for", started)
    plan = small_plan("poisson")
    monkeypatch.setattr("accounting.comparison.checked_plan", lambda *_: plan)
    page = (root / "docs" / "papers.md").read_text()
    commands = re.findall(r"^dpsgd plan ((?:.*\\\n)*.*)", page, re.M)
    assert len(commands) > 7
    for command in commands:
        arguments = shlex.split(command.replace("\\\n", " "))
        found = invoke(["plan", *arguments]).exception
        assert isinstance(found, StartedError), command


def test_a_lower_bound_alone_is_printed_rounded_down_and_as_no_guarantee(small_plan):
    plan = small_plan("poisson")
    epsilon = Bounds(upper=None, lower=1.23456, method="m")
    noise = NoiseBounds(sufficient=None, necessary=1.23456, method="m")
    for given, bounds in (("noise_multiplier", epsilon), ("epsilon", noise)):
        schedule = {"num_steps": plan.num_steps, "num_epochs": plan.num_epochs}
        size = {"num_examples": 100, "expected_batch_size": 10}
        asked = Question(**schedule, **size, delta=1e-5, **{given: 1.0})
        answer = Answer(
            question=asked, line=Line(sampler="poisson"), plan=plan, bounds=bounds
        )
        value, bound = plan_answers.value_cells(answer)
        assert value == ">= 1.2345"
        assert bound == "lower bound only: no guarantee"
