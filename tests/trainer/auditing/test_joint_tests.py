"""Several kinds of runs under one confidence: no dilution, and the error is shared."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from accounting.auditing import audit
from tests.accounting.plans import make_plan
from tests.trainer.auditing import joint_tests
from tests.trainer.auditing.joint_tests import Evidence
from tests.trainer.auditing.residuals import Check

GAUSSIAN = make_plan("deterministic", 1, 1, 1)
GOOD = Check(name="good", expected=1.0, worst=1.01, p_value=0.5)
BAD = Check(name="bad noise", expected=1.0, worst=0.5, p_value=1e-9)


@pytest.fixture(scope="module")
def claim() -> audit.AuditedClaim:
    return audit.claim(GAUSSIAN, 1.0, 1e-5)


def _evidence(name: str, *checks: Check, true_noise: float, trials: int) -> Evidence:
    """Scores of one Gaussian step under the claim of noise multiplier 1."""
    random = np.random.default_rng()
    real, ghost = (random.normal(mean, true_noise, trials // 2) for mean in (1, 0))
    return Evidence(name=name, real=real, ghost=ghost, checks=checks)


def _none(name: str, *checks: Check) -> Evidence:
    return Evidence(name=name, real=np.zeros(0), ghost=np.zeros(0), checks=checks)


def test_a_fault_of_one_kind_is_not_diluted_by_another(
    claim: audit.AuditedClaim,
) -> None:
    """Ten times as many trials of a kind with more noise; pooled they would hide it."""
    bad = _evidence("lazy", true_noise=0.4, trials=2000)
    good = _evidence("dense", true_noise=3.0, trials=20_000)
    verdict = joint_tests.judge(claim, [good, bad], confidence=0.999)
    assert [one.violated for one in verdict.judged] == [False, True]
    assert verdict.violated
    assert verdict.closest is verdict.judged[1].verdict
    assert verdict.text.startswith("VIOLATED: ")
    assert verdict.trials == 22_000
    pooled = audit.judge(
        claim,
        np.random.default_rng(0).permutation(np.concatenate([good.real, bad.real])),
        np.random.default_rng(1).permutation(np.concatenate([good.ghost, bad.ghost])),
        confidence=0.999,
    )
    assert not pooled.violated


def test_the_error_is_shared_by_all_statements(claim: audit.AuditedClaim) -> None:
    """Two verdicts and two sets of checks: a quarter each."""
    kinds = [
        _evidence("a", GOOD, true_noise=1.0, trials=400),
        _evidence("b", true_noise=1.0, trials=400),
        _none("c", GOOD, GOOD),
    ]
    verdict = joint_tests.judge(claim, kinds, confidence=0.999)
    for one in verdict.judged[:2]:
        assert one.verdict is not None
        assert one.verdict.findings[-1].confidence == pytest.approx(1 - 0.00025)
    for share, found in ((0.99, True), (1.01, False)):
        # Two checks share the quarter.
        check = Check(name="x", expected=0.0, worst=1.0, p_value=share * 0.001 / 8)
        kinds[2] = _none("c", GOOD, check)
        verdict = joint_tests.judge(claim, kinds, confidence=0.999)
        assert verdict.judged[2].violated is found


def test_false_alarms_of_all_kinds_together(claim: audit.AuditedClaim) -> None:
    """Of 200 audits at 60 % at most 40 % are violated; error rate 1e-6."""
    random, alarms = np.random.default_rng(), 0
    for _ in range(200):
        checks = [
            Check(name="uniform", expected=0.0, worst=1.0, p_value=random.random())
            for _ in range(3)
        ]
        kinds = [
            _evidence("a", checks[0], true_noise=1.0, trials=200),
            _none("b", *checks[1:]),
        ]
        alarms += joint_tests.judge(claim, kinds, confidence=0.6).violated
    assert alarms <= stats.binom.ppf(1 - 1e-6, 200, 0.4)


def test_a_check_alone_refutes_the_mechanism(claim: audit.AuditedClaim) -> None:
    kinds = [
        _evidence("dense", GOOD, true_noise=1.0, trials=400),
        _none("lazy, few", GOOD, BAD),
    ]
    verdict = joint_tests.judge(claim, kinds, confidence=1 - 1e-6)
    assert verdict.violated
    assert verdict.text == (
        "VIOLATED: this is not the mechanism whose epsilon is claimed, with confidence "
        "99.9999 %. Found: bad noise (lazy, few): 0.5 instead of 1."
    )
    fields = json.loads(json.dumps(verdict.to_json()))
    assert fields["violated"]
    assert fields["verdict"] == verdict.text
    assert [run["contradicted"] for run in fields["runs"]] == [[], ["bad noise"]]
    assert [run["violated"] for run in fields["runs"]] == [False, True]
    assert fields["runs"][1]["checks"][1]["p_value"] == 1e-9
