"""The audited mechanism: known distributions, true claims, and planted faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from accounting import audits
from accounting.claims import shuffle
from accounting.core import accountant
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE
from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.users import BOUNDED, Bounded
from tests.accounting.plans import delta_bounds
from tests.command_line import Result, invoke
from tests.sampler_fields import needed
from tests.trainer.conftest import write_run_folder
from tests.warm_processes import warm_python
from trainer import auditing
from trainer.auditing import CANNOT_SEE, settings_of_run
from trainer.auditing import audit as run_audit
from trainer.core.step import noise
from trainer.run import privacy
from trainer.settings.requests import AuditSettings

DELTA = 1e-5
NOISE = 0.8


def _plan(sampler: str, **more: Any) -> DpSgdPlan:
    fields = {"num_examples": 200, "expected_batch_size": 10, "num_steps": 40}
    return DpSgdPlan(
        sampler=sampler,
        **{**fields, "num_epochs": 2, **needed(sampler, cap=20), **more},
    )


def _settings(**changes: Any) -> AuditSettings:
    fields: dict[str, Any] = {"plan": _plan("poisson"), "trials": 1000}
    more = {"noise_multiplier": NOISE, "delta": DELTA, "confidence": 1 - 1e-6}
    return AuditSettings(**{**fields, **more, **changes})


def _audit(plan: DpSgdPlan, trials: int, **more: Any) -> Any:
    settings = _settings(plan=plan, trials=trials, **{"confidence": 0.999, **more})
    return run_audit(settings).verdict


#: Of the dynamic shuffle ``test_a_shuffle_reaches_its_lower_bound`` tells more.
@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s != "dynamic-shuffle"])
def test_a_true_claim_is_consistent(sampler: str) -> None:
    """Violated with probability at most 1e-6."""
    verdict = _audit(_plan(sampler), 300, confidence=1 - 1e-6)
    assert not verdict.violated, verdict.text


def test_what_is_sold_as_poisson_and_is_not_is_found() -> None:
    """Delta is 0.25 to 0.31 above the claim, with a standard error of 0.03."""
    verdict = _audit(
        _plan("persistent-shuffle"), 1600, claim="poisson", noise_multiplier=0.5
    )
    assert verdict.violated, verdict.text


def _found_deltas(plan: DpSgdPlan, trials: int) -> Iterator[tuple[float, float, float]]:
    """Returns epsilon, delta of the event "score above epsilon", and its error."""
    case = auditing.worst_case(plan)
    scores = [
        auditing.simulate(case, NOISE, trials, real=real) for real in (True, False)
    ]
    for epsilon in (0.1, 0.5, 1.0):
        real, ghost = (np.mean(part > epsilon) for part in scores)
        variance = real * (1 - real) + math.exp(2 * epsilon) * ghost * (1 - ghost)
        found = real - math.exp(epsilon) * ghost
        yield epsilon, found, math.sqrt(variance / trials)


def test_a_shuffle_reaches_its_lower_bound() -> None:
    """Theorem 3.5 of Chua et al.: the canary pulls against all others.

    Five standard errors: an error rate below 1e-6.
    """
    plan = _plan("dynamic-shuffle", num_steps=20, num_epochs=1)
    poisson = dataclasses.replace(plan, sampler="poisson")
    for epsilon, found, error in _found_deltas(plan, 2000):
        least = shuffle.event_delta(NOISE, 20, epsilon, shuffle.MEANS)
        most = accountant.delta(plan, noise_multiplier=NOISE, epsilon=epsilon)
        assert least - 5 * error <= found <= most.guarantee + 5 * error
        claimed = accountant.delta(poisson, noise_multiplier=NOISE, epsilon=epsilon)
        assert found - 5 * error > claimed.guarantee


def test_poisson_stays_on_its_curve() -> None:
    """The score is the likelihood ratio, so its events have exactly the delta."""
    plan = _plan("poisson", num_steps=20, num_epochs=1)
    for epsilon, found, error in _found_deltas(plan, 2000):
        known = delta_bounds(plan, noise_multiplier=NOISE, epsilon=epsilon)
        assert known.lower is not None
        assert known.lower - 5 * error <= found <= known.guarantee + 5 * error


# Faults are missed with a probability below 1e-6: the deltas that are found exceed
# those that are claimed by six and more of their standard deviations.


def test_half_the_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = noise.step_noise
    monkeypatch.setattr(
        noise, "step_noise", lambda *a: [value / 2 for value in drawn(*a)]
    )
    assert _audit(_plan("poisson"), 3000).violated


@pytest.mark.parametrize(("batch_size", "trials"), [(80, 4000), (200, 1000)])
def test_a_higher_rate_is_found(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, trials: int
) -> None:
    """Twice the rate, and a canary in every step."""
    honest, plan = auditing.make_sampler, _plan("poisson", expected_batch_size=40)

    def faulty(plan: DpSgdPlan, *rest: Any) -> Any:
        return honest(dataclasses.replace(plan, expected_batch_size=batch_size), *rest)

    monkeypatch.setattr(auditing, "make_sampler", faulty)
    assert _audit(plan, trials).violated


def test_fresh_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling_keys, noise_keys = [], set()
    sample, draw = auditing.make_sampler, noise.step_noise

    def sampled(plan: DpSgdPlan, key: bytes, *rest: Any) -> Any:
        sampling_keys.append(key)
        return sample(plan, key, *rest)

    def drawn(key: bytes, *rest: Any) -> Any:
        noise_keys.add(key)
        return draw(key, *rest)

    monkeypatch.setattr(auditing, "make_sampler", sampled)
    monkeypatch.setattr(noise, "step_noise", drawn)
    monkeypatch.setattr(auditing, "_MOST_CHUNK", 10)
    case = auditing.worst_case(_plan("poisson"))
    done = []
    scores = auditing.simulate(case, NOISE, 25, real=False, advance=done.append)
    assert len(set(sampling_keys)) == len(sampling_keys) == 25
    assert len(noise_keys) == 3
    assert len(set(scores)) == 25
    assert sum(done) == 25


def test_both_worlds_are_sampled_alike() -> None:
    """For one key the sums differ by one where the canary is, and nowhere else."""
    for sampler in SAMPLERS:
        case = auditing.worst_case(_plan(sampler))
        for key in (bytes(32), bytes(range(32))):
            real, ghost = (
                auditing.sample_sums(case, key, real=real) for real in (True, False)
            )
            assert set(real - ghost) <= {0.0, 1.0}
            if "poisson" not in sampler:
                assert sum(real - ghost) == 2  # epochs


def test_fewer_rows_leave_the_law_of_the_canary() -> None:
    """The canary's step is uniform: chi-square of 20 steps, error rate 1e-6."""
    plan = _plan("dynamic-shuffle", num_examples=10**9, expected_batch_size=5 * 10**7)
    case = auditing.worst_case(plan)
    assert case.plan.num_examples == 40
    assert case.plan.steps_per_epoch == plan.steps_per_epoch == 20
    assert case.scaled is not None
    assert "40 of 1,000,000,000" in case.scaled
    steps = [
        np.flatnonzero(
            auditing.sample_sums(case, number.to_bytes(32, "big"), real=True)
        )[0]
        for number in range(1000)
    ]
    counts = np.bincount(steps, minlength=20)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_a_cap_that_is_not_simulated_is_taken_off() -> None:
    large = {"num_examples": 10_000, "expected_batch_size": 500, "num_steps": 40}
    case = auditing.worst_case(
        _plan("truncated-poisson", truncated_batch_size=550, **large)
    )
    assert case.plan.sampler == "poisson"
    # Binomial(10,000, 1/20): 550 is 2.3 standard deviations out; 40 steps.
    assert case.slack == pytest.approx(40 * stats.binom.sf(550, 10_000, 0.05))
    assert auditing.worst_case(_plan("truncated-poisson")).slack == 0


def _normal(x: np.ndarray, mean: np.ndarray) -> float:
    return float(np.prod(stats.norm.pdf(x, mean, NOISE)))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_score_is_the_likelihood_ratio(sampler: str) -> None:
    """Against a sum over all ways in which the canary can participate."""
    plan = _plan(
        sampler, num_examples=6, expected_batch_size=2, num_steps=6,
        **needed(sampler, cap=6),
    )  # fmt: skip
    means = (2.0, 1.0) if "shuffle" in sampler else (1.0, 0.0)
    x = np.random.default_rng(3).normal(0, 1, 6)
    trials = audits.Trials(
        plan=plan, noise_multiplier=NOISE, observe=lambda step: x[step : step + 1],
        positions=np.array(3), means=means,
    )  # fmt: skip
    found = audits.audit_of(sampler, 1).score(trials)
    ways = []
    if "cyclic" in sampler:  # of one of two groups, in each of its steps by 2/3
        for group, *took in itertools.product((0, 1), repeat=4):
            chance = math.prod(2 / 3 if t else 1 / 3 for t in took) / 2
            steps = np.zeros(6)
            steps[group::2] = took
            ways.append((chance, steps))
    elif "poisson" in sampler:
        for took in itertools.product((0, 1), repeat=6):
            chance = math.prod(1 / 3 if t else 2 / 3 for t in took)
            ways.append((chance, np.array(took)))
    else:
        for first, second in itertools.product(range(3), repeat=2):
            took = np.zeros(6)
            took[[first, 3 + second]] = 1
            same = first == second
            chance = {
                "deterministic": float(first == second == 1),
                "persistent-shuffle": same / 3,
            }.get(sampler, 1 / 9)
            ways.append((chance, took))
    real, ghost = (
        sum(chance * _normal(x, mean * took) for chance, took in ways) for mean in means
    )
    assert found == pytest.approx(math.log(real / ghost), rel=1e-9)


# --- Canaries that are users --------------------------------------------------------


def test_a_true_claim_for_users_is_consistent() -> None:
    """Violated with probability at most 1e-6."""
    settings = _settings(max_examples_per_user=4, trials=600)
    report = run_audit(settings)
    assert not report.verdict.violated, report.verdict.text
    assert report.verdict.claim.max_examples_per_user == 4
    assert report.fields["notes"][-1].startswith("canaries are users with 4 row(s)")
    assert "several rows of one person" not in report.fields["cannot_see"]


def test_users_that_nobody_bounded_are_found() -> None:
    """The claim is for one row per user; canaries have ten."""
    report = run_audit(_settings(canary_rows=10))
    assert report.verdict.violated, report.verdict.text
    assert report.verdict.claim.epsilon < 5
    honest = run_audit(_settings(canary_rows=1))
    assert not honest.verdict.violated
    assert "several rows of one person" in honest.fields["cannot_see"]


# --- Audits of runs -------------------------------------------------------------------


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AuditSettings]:
    """``settings_of(plan, note, model=model, **given)``: of a run with that record."""
    monkeypatch.setattr(privacy, "check_run", lambda *_, **__: (1.0, 1e-5))

    def make(
        plan: DpSgdPlan, note: Bounded | None = None, *, model: Any = None, **given: Any
    ) -> AuditSettings:
        record: Any = SimpleNamespace(
            method="bam", l2_norm_clip=3.0, model=model or {}, selection={}
        )
        dataset = {} if note is None else {BOUNDED: note.to_json()}
        manifest: Any = SimpleNamespace(plan=plan, dataset=dataset)
        return settings_of_run(record, manifest, **given)

    return make


NOTE = Bounded(user_column="u", max_examples_per_user=4, num_examples=99)


def test_the_best_of_several_runs_is_refused() -> None:
    """Seen to fail: the audited claim was the epsilon of one run, which is smaller."""
    selection = {"num_runs": 4, "shape": 1.0}
    record: Any = SimpleNamespace(method="dp-sgd", selection=selection)
    with pytest.raises(InputError, match="the best of several"):
        settings_of_run(record, SimpleNamespace())  # type: ignore[arg-type]


def test_the_audited_relation_is_that_of_the_statement(settings_of: Any) -> None:
    """Empty slots are never drawn, so that bounds with ghosts do not hold."""
    capped = DpSgdPlan(
        sampler="truncated-poisson",
        num_examples=99,
        expected_batch_size=9,
        num_steps=11,
        truncated_batch_size=9,
    )
    assert privacy.relation_of(capped, NOTE) == ADD_OR_REMOVE_ONE
    assert not settings_of(capped).is_of_users
    found = settings_of(capped, NOTE)
    assert found.num_canary_rows == NOTE.max_examples_per_user
    assert found.neighboring_relation == ADD_OR_REMOVE_ONE
    count = NOTE.max_examples_per_user
    claim = audits.claim(capped, NOISE, DELTA, count, found.neighboring_relation)
    stated = accountant.epsilon(
        capped,
        noise_multiplier=NOISE,
        delta=DELTA,
        neighboring_relation=ADD_OR_REMOVE_ONE,
        max_examples_per_user=count,
    )
    assert claim.epsilon == stated.guarantee


# -- `dpsgd audit`: verdicts, exit codes and refusals ----------------------------------


PLAN = (
    "--num-examples=400", "--batch-size=20", "--epochs=1", "--delta=1e-5",
    "--confidence=0.999999",
)  # fmt: skip


def _typed(*arguments: str) -> Result:
    return invoke(["audit", *arguments])


def _json(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = _typed(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, json.loads(result.stdout)


def _error(*arguments: str) -> str:
    result = _typed(*arguments)
    assert isinstance(result.exception, InputError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_the_exit_code_of_a_refuted_claim_reaches_the_shell(root: pathlib.Path) -> None:
    """Missed with a probability below 1e-6: it is found by over five deviations."""
    command = [
        warm_python(), "-m", "dpsgd", "audit", "--sampler=deterministic",
        "--claim=poisson", *PLAN, "--noise-multiplier=0.5", "--trials=1500",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "verdict: VIOLATED" in done.stdout
    assert "claimed, by the accounting of poisson: epsilon <= " in done.stdout


@pytest.fixture
def run(tmp_path: pathlib.Path, small_batches: Any) -> pathlib.Path:
    return write_run_folder(tmp_path / "run", small_batches, l2_norm_clip=4.0)


def test_a_run_that_releases_something_else_is_refused(
    tmp_path: pathlib.Path, small_batches: Any
) -> None:
    run = write_run_folder(
        tmp_path / "mix",
        small_batches,
        method="model-mix",
        method_settings={"mix_width": 0.1, "linf_factor": 4},
    )
    assert "method='model-mix' to be one of dp-sgd, bam, dp-sat" in _error(str(run))


def test_a_run_is_audited_with_what_it_executed(
    run: pathlib.Path, small_batches: Any
) -> None:
    code, fields = _json(str(run), "--trials=200", "--confidence=0.999999")
    assert code == 0
    assert fields["audited"] == small_batches.manifest.plan.to_json()
    assert fields["cannot_see"] == list(CANNOT_SEE)
    assert fields["claim"]["noise_multiplier"] == 1.5
    assert fields["claim"]["delta"] == 1e-3
    assert "sampler" in _error(str(run), "--sampler=poisson")
    code, fields = _json(str(run), "--trials=200", "--delta=1e-4", "--claim=poisson")
    assert fields["claim"]["delta"] == 1e-4
    assert fields["claim"]["plan"]["sampler"] == "poisson"
