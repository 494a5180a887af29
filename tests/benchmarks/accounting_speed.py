"""How long the accountant takes, beside dp_accounting in the same process.

Run:  python -m tests.benchmarks.accounting_speed [--quick]

Prints one line per question: seconds after import, and what was found.  Not a test:
machines differ.  --quick leaves out dp_accounting, which takes a minute or more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import accounting.pld.privacy_profile  # noqa: F401 - loaded here, so that no question pays for it
from accounting import accountant
from accounting.plan import DpSgdPlan
from tests.accounting.published import DELTA, STEPS, criteo_plan


def timed(label: str, question: Callable[[], Any]) -> tuple[Any, float]:
    """Prints and returns the answer and its seconds."""
    start = time.perf_counter()
    answer = question()
    seconds = time.perf_counter() - start
    print(f"{seconds:8.2f} s  {label}: {answer}", flush=True)
    return answer, seconds


def ours(plan: DpSgdPlan) -> str:
    """The noise multiplier for epsilon 5."""
    answer = accountant.noise_multiplier(plan, epsilon=5.0, delta=DELTA)
    return f"necessary {answer.necessary}, sufficient {answer.sufficient}"


def theirs(num_steps: int, rate: float, interval: float) -> float:
    """The noise multiplier by dp_accounting's calibration, to 1e-3."""
    import dp_accounting
    from dp_accounting import mechanism_calibration
    from dp_accounting.pld import pld_privacy_accountant

    def event(noise: float) -> Any:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        sampled = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, num_steps)

    return mechanism_calibration.calibrate_dp_mechanism(
        lambda: pld_privacy_accountant.PLDAccountant(
            value_discretization_interval=interval
        ),
        event,
        target_epsilon=5.0,
        target_delta=DELTA,
        tol=1e-3 * 0.4,
    )


def table() -> str:
    """Nine batch sizes, one and five epochs, four samplers."""
    samplers = ("deterministic", "persistent-shuffle", "dynamic-shuffle", "poisson")
    for batch_size in STEPS:
        for num_epochs in (1, 5):
            for sampler in samplers:
                ours(criteo_plan(sampler, batch_size, num_epochs))
    return f"{2 * len(STEPS) * len(samplers)} noise multipliers"


def allocation(batch_size: int, num_epochs: int) -> str:
    """Balls and bins at the noise that Poisson needs."""
    plan = criteo_plan("balls-and-bins", batch_size, num_epochs)
    poisson = criteo_plan("poisson", batch_size, num_epochs)
    noise = accountant.noise_multiplier(poisson, epsilon=5.0, delta=DELTA).guarantee
    start = time.perf_counter()
    answer = accountant.epsilon(plan, noise_multiplier=noise, delta=DELTA)
    seconds = time.perf_counter() - start
    assert answer.lower is not None
    gap = answer.guarantee / answer.lower - 1
    return (
        f"epsilon {answer.lower:.4f} .. {answer.guarantee:.4f}, gap {gap:.3%}, "
        f"{seconds:.2f} s without finding the noise"
    )


def main() -> None:
    """Runs the questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    timed("import", lambda: __import__("scipy.special").__version__)
    plan = criteo_plan("poisson", 1024, 1)
    _, seconds = timed("Poisson noise, 35,938 steps", lambda: ours(plan))
    if not quick:
        timed("import dp_accounting", lambda: bool(__import__("dp_accounting")))
        for interval in (1e-3, 1e-4):
            _, slow = timed(
                f"dp_accounting's calibration, 35,938 steps, interval {interval:g}",
                lambda size=interval: theirs(35938, 1 / 35938, size),
            )
            print(f"{slow / seconds:8.1f} times as long")
    for batch_size in (65536, 8192):
        for num_epochs in (1, 5):
            label = f"balls-and-bins, {STEPS[batch_size]} steps, {num_epochs} epoch(s)"
            timed(label, lambda b=batch_size, e=num_epochs: allocation(b, e))
    timed("the whole table", table)


if __name__ == "__main__":
    main()
