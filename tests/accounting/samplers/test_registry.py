"""A sampler from outside goes all the way; what it does not bring is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting import audits, statement
from accounting.audits import Audit
from accounting.core import accountant, sampler_registry
from accounting.core import plan as plans
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.neighboring_relation import (
    REPLACE_SPECIAL,
)
from accounting.core.plan import (
    DpSgdPlan,
    check_epochs,
)
from accounting.core.pld import dominating_pairs
from accounting.core.validation import InputError
from pipelines.batches.folder import read_batches
from pipelines.batches.verify import verify
from pipelines.core import choices
from pipelines.core.choices import BlockSpan, Choices, PlanSampler, make_sampler
from pipelines.core.keys import Stream, derive
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.poisson_batching import write_batches
from pipelines.job.sizing import make_layout
from tests.command_line import invoke
from tests.sampler_fields import may_register
from trainer import auditing

NAME = "all-or-nothing"
PLAN = {
    "sampler": NAME, "num_examples": 60, "expected_batch_size": 30, "num_steps": 41,
}  # fmt: skip


# One coin per step decides for all rows at once.  Who sees a sum of other examples sees
# the coin: nothing is amplified, and each of T steps is a Gaussian mechanism at most.


def _noise(plan: DpSgdPlan, noise_multiplier: float) -> float:
    return noise_multiplier / math.sqrt(plan.num_steps)


def _delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> Bounds:
    value = dominating_pairs.gaussian_delta(_noise(plan, noise_multiplier), epsilon)
    return Bounds(upper=value, method="the coins are revealed")


def _epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
    value = dominating_pairs.gaussian_epsilon(_noise(plan, noise_multiplier), delta)
    return Bounds(upper=value, method="the coins are revealed")


def _noise_multiplier(plan: DpSgdPlan, epsilon: float, delta: float) -> NoiseBounds:
    value = dominating_pairs.gaussian_noise(epsilon, delta) * math.sqrt(plan.num_steps)
    return NoiseBounds(sufficient=value, method="the coins are revealed")


def _assign(sampler: PlanSampler, block: BlockSpan) -> Choices:
    plan, key = sampler.plan, sampler.key
    coins = Stream(derive(key, "coins", plan.fingerprint)).words(plan.num_steps)
    heads = np.flatnonzero(coins < np.uint64(int(plan.sampling_probability * 2**64)))
    step, row = np.divmod(np.arange(len(heads) * block.num_rows), block.num_rows)
    order = Stream(derive(key, "order", plan.fingerprint, block.label))
    return row, heads[step], order.words(len(row))


LEAST = sampler_registry.Sampler(
    epsilon=_epsilon,
    delta=_delta,
    noise_multiplier=_noise_multiplier,
    closed_form=True,
    relations=(REPLACE_SPECIAL,),
)
WHOLE = dataclasses.replace(
    LEAST,
    wording=sampler_registry.Wording(
        sampling="one coin per step, for all examples at once",
        discretization="none, closed form",
    ),
)
AUDIT = Audit(worst_case=audits.own_block, score=audits.independent_steps)
RULES = plans.PlanRules(once_per_epoch=False)

Register = Callable[..., DpSgdPlan]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers a toy sampler until the test ends, and returns a plan of it."""
    may_register(monkeypatch)
    monkeypatch.setattr(choices, "_SAMPLERS", dict(choices._SAMPLERS))
    monkeypatch.setattr(audits, "_AUDITS", dict(audits._AUDITS))

    def register(
        sampler: sampler_registry.Sampler = WHOLE,
        assigns: bool = True,
    ) -> DpSgdPlan:
        sampler_registry.register(NAME, RULES, sampler)
        if assigns:
            choices.register(NAME, _assign)
        return DpSgdPlan(**PLAN)  # type: ignore[arg-type]

    return register


@pytest.fixture
def table(tmp_path: pathlib.Path) -> str:
    """60 rows in blocks of 25, 25 and 10."""
    (tmp_path / "input").mkdir()
    ids = pa.table({"id": np.arange(60)})
    pq.write_table(ids, tmp_path / "input" / "part.parquet", row_group_size=25)
    return str(tmp_path / "input")


def test_a_sampler_from_outside_is_planned_accounted_for_and_stated(
    registered: Register,
) -> None:
    with pytest.raises(InputError, match=f"sampler='{NAME}' to be one of"):
        DpSgdPlan(**PLAN)  # type: ignore[arg-type]
    plan = registered()
    assert DpSgdPlan.from_json(plan.to_json()) == plan
    assert plan.largest_batch_size is None
    check_epochs(plan)
    noise = accountant.noise_multiplier(plan, epsilon=2.0, delta=1e-5).guarantee
    found = accountant.epsilon(plan, noise_multiplier=noise, delta=1e-5).guarantee
    assert found == pytest.approx(2.0)
    same = DpSgdPlan(
        **{**PLAN, "sampler": "poisson", "expected_batch_size": 60}  # type: ignore
    )
    assert found == accountant.epsilon(same, noise_multiplier=noise, delta=1e-5).upper
    said = statement.privacy_statement(plan, noise_multiplier=noise, delta=1e-5)
    assert "one coin per step, for all examples at once" in said.to_text()
    assert said.to_json()["discretization"] == "none, closed form"
    assert said.relies_on == ("added sampler",)  # its bound is not of the core
    assert said.is_guarantee


def test_a_sampler_from_outside_is_sampled_and_packed(
    registered: Register, table: str, tmp_path: pathlib.Path
) -> None:
    """That all 41 coins fall alike has probability 2^-40."""
    plan, dataset = registered(), list_blocks(table)
    steps: list[dict[int, list[int]]] = []
    for out in (tmp_path / "one", tmp_path / "two"):
        layout = make_layout(plan, dataset)
        write_batches(
            dataset=dataset, layout=layout, out=out, key_file=tmp_path / "sampling.key"
        )
        assert verify(out).findings == ()
        found: dict[int, list[int]] = {step: [] for step in range(plan.num_steps)}
        for batch in read_batches(out):
            found[batch.step].extend(batch.columns["id"][batch.weight == 1].tolist())
        steps.append(found)
    assert steps[0] == steps[1]
    sizes = {len(ids) for ids in steps[0].values()}
    assert sizes == {0, 60}
    assert all(sorted(ids) == list(range(60)) for ids in steps[0].values() if ids)


def test_a_sampler_from_outside_is_audited(registered: Register) -> None:
    """A true claim is found violated with probability 1e-6 at most."""
    plan = registered()
    audits.register(NAME, AUDIT)
    claim = audits.claim(plan, 3.0, 1e-5)
    case = auditing.worst_case(plan)
    scores = [auditing.simulate(case, 3.0, 200, real=real) for real in (True, False)]
    assert scores[0].mean() > scores[1].mean()
    verdict = audits.judge(claim, *scores, confidence=1 - 1e-6, slack=case.slack)
    assert not verdict.violated, verdict.text


ASKED_AT_ONE = {"noise_multiplier": 1.0, "delta": 1e-5}
#: What a sampler may bring, in words -> what asks for it.
QUESTIONS: dict[str, Callable[[DpSgdPlan], object]] = {
    "a smallest cap": lambda plan: accountant.truncation_of(plan.sampler),
    "the wording": lambda plan: statement.privacy_statement(plan, **ASKED_AT_ONE),
    "a worst case and a score": auditing.worst_case,
    "an assignment of rows": lambda plan: make_sampler(plan, bytes(32), []),
}


@pytest.mark.parametrize("brought", QUESTIONS)
def test_what_a_sampler_does_not_bring_is_refused(
    registered: Register, brought: str
) -> None:
    plan = registered(LEAST, assigns=False)
    with pytest.raises(InputError, match=f"to provide {brought}") as error:
        QUESTIONS[brought](plan)
    assert f"sampler={NAME!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_means_one_sampler(registered: Register) -> None:
    registered()
    for taken in (NAME, "poisson"):
        with pytest.raises(InputError, match="not to be registered yet"):
            sampler_registry.register(taken, RULES, WHOLE)
        with pytest.raises(InputError, match="not to be registered yet"):
            choices.register(taken, _assign)
    audits.register(NAME, AUDIT)
    for taken in (NAME, "poisson"):
        with pytest.raises(InputError, match="not to have an audit yet"):
            audits.register(taken, AUDIT)
    with pytest.raises(InputError, match="sampler='unheard-of' to be one of"):
        choices.register("unheard-of", _assign)
    with pytest.raises(InputError, match="sampler='unheard-of' to be one of"):
        audits.register("unheard-of", AUDIT)


ASKED = (
    "--num-examples=60", "--batch-size=30", "--delta=1e-3", f"--sampler={NAME}",
)  # fmt: skip


def test_a_sampler_from_outside_is_a_choice_of_the_commands(
    registered: Register,
) -> None:
    registered()
    given = ["--num-steps=2", "--noise-multiplier=2", "--json"]
    said = invoke(["account", *ASKED, *given])
    fields = json.loads(said.output)
    assert fields["theorem"] == "the coins are revealed"
    planned = invoke(["plan", *ASKED, "--epochs=1", "--epsilon=3", "--json"])
    assert NAME in planned.output, planned.exception
