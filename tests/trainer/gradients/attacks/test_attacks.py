"""No accepted model, loss or view lets one row move a step's sum beyond its bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.trainer.gradients.attacks import (
    custom_gradients,
    hidden_writes,
    honest,
    keras_layers,
    keras_variables,
    losses,
    mixing,
    other_state,
    python_state,
    views,
    writes,
)
from tests.trainer.gradients.attacks.catalogue import Case
from tests.trainer.gradients.attacks.harness import (
    compositions,
    faults_of,
    later_faults_of,
    made_model,
    outcome_of,
    step_of,
)
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, choose_path

CASES: dict[str, Case] = {
    **writes.CASES,
    **hidden_writes.CASES,
    **other_state.CASES,
    **python_state.CASES,
    **keras_layers.CASES,
    **keras_variables.CASES,
    **mixing.CASES,
    **custom_gradients.CASES,
    **losses.CASES,
    **views.CASES,
    **honest.CASES,
    **honest.NEIGHBOURS,
}


#: What the plain suite always has, beside a sixth of the others.
ALWAYS = (
    "write: moving mean of a trainable weight",
    "write: rare ids counted",
    "write: largest id so far gates",
    "write: a huge value opens a gate",
    "write: nested modules",
    "hidden write: result of a function thrown away",
    "hidden write: cond on a rare id",
    "hidden write: control dependencies",
    "hidden write: custom gradient forward",
    "state: size of a table",
    "python: ids numbered in a dict",
    "python: rows mix if their number is known",
    "python: rows mix for rare ids if their number is known",
    "python: rows mix from trace 3 on",
    "python: rows mix in batches of the step",
    "gradient: writes backward if rare",
    "loss: rare outputs in a weight",
    "view: rare rows in a variable",
    "view: python that claims no state",
    "variable: written after a stateless scope",
    "variable: seed counted by rare ids",
    "variable: uniform of the global generator",
    "variable: weight of tensorflow",
    "variable: overwritten with its gradient",
    "variable: dense of mixed_bfloat16",
    "keras: added loss",
    "keras: loss added in training",
    "keras: mask of all rows",
    "view: image flip",
    "view: pipeline",
)
#: In the plain suite; some of each kind of row.
FEW = ("ordinary", "a rare id first", "huge last")


def faults(case: Case, base: str, names: Sequence[str]) -> list[str]:
    """Returns what is wrong with an accepted case."""
    built = step_of(case, base)
    if case.remembers:
        return later_faults_of(built, step_of(case, base))
    return faults_of(built, names) + ["it was accepted"] * case.leaks


def assert_refused_or_bounded(case: Case, base: str, names: Sequence[str]) -> bool:
    """A refusal is one line with a reason; an accepted case has no fault.

    Returns:
      Whether the case was accepted.
    """
    refusal, found = outcome_of(lambda: faults(case, base, names))
    assert not found
    if refusal is not None:
        assert not case.honest, refusal
        assert "\n" not in refusal, refusal
        assert len(refusal) > 40, refusal
    return refusal is None


def may_take_one_pass(case: Case) -> bool:
    """Returns whether one pass would compute a case, were it accepted.

    Any other case of both paths is refused, or computed one example at a time, and that
    ``test_so_it_is_one_example_at_a_time`` tries.
    """
    _, paths = outcome_of(lambda: [choose_path(made_model(case, ONE_PASS, [])[0])])
    return paths == [ONE_PASS]


PLAIN = [name for i, name in enumerate(CASES) if i % 6 == 0 or name in ALWAYS]
#: Cases that can be computed on both paths; the model of any other decides its path.
OF_BOTH_PATHS = [name for name, case in CASES.items() if case.network is not None]
#: One example at a time, ``test_converted_operations`` tries what mixes, too: of three
#: such cases, one.
ALONE = [
    name
    for i, name in enumerate(OF_BOTH_PATHS)
    if i % 3 == 0 or not name.startswith("mixing:")
]
#: The first batch that a step sees has rare rows.
BACKWARDS = list(compositions())[::-1]


@pytest.mark.parametrize("name", PLAIN)
def test_one_row_is_bounded_or_the_model_is_refused(name: str) -> None:
    assert_refused_or_bounded(CASES[name], ONE_PASS, FEW)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(OF_BOTH_PATHS) - set(PLAIN)))
def test_so_it_is_for_further_models(name: str) -> None:
    if may_take_one_pass(CASES[name]):
        assert_refused_or_bounded(CASES[name], ONE_PASS, FEW)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALONE)
def test_so_it_is_one_example_at_a_time(name: str) -> None:
    assert_refused_or_bounded(CASES[name], SINGLE_EXAMPLES, BACKWARDS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(CASES) - set(OF_BOTH_PATHS)))
def test_so_it_is_for_models_of_one_path(name: str) -> None:
    # The plain suite tries its cases with these rows.
    if name in PLAIN or assert_refused_or_bounded(CASES[name], ONE_PASS, FEW):
        assert_refused_or_bounded(CASES[name], ONE_PASS, BACKWARDS)
