"""How long the accountant takes, side by side with two other libraries.

Run:  python -m examples.benchmarks.accounting_speed [--dp-accounting PYTHON]
          [--pld-accounting PYTHON]

PYTHON is the interpreter of an environment of its own, with dp-accounting 0.6 or
PLD_accounting 2.0; what is not given is left out.  Prints a line per question: the
processor's seconds after import, and the answer.  Not a test: machines differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import time
from collections.abc import Callable

import accounting.core.pld.privacy_profile  # noqa: F401 - loaded here, so that no question pays for it
from accounting.core import accountant
from accounting.core.plan import DpSgdPlan

#: Of the published setting.
DELTA = 2.7e-8
#: Questions to balls and bins: noise, steps of an epoch, epochs, delta.
ALLOCATIONS = [
    (0.5472, 562, 1, DELTA),
    (0.585, 562, 5, DELTA),
    (0.4698, 4492, 1, DELTA),
    (20.0, 100, 500, 1e-6),
    (581.0, 1000, 100, 1e-8),
]
#: Noise for Poisson batches at epsilon 5: steps, each with probability 1 / steps.
POISSON = [562, 4492, 35938]

THEIR_POISSON = """
import json, sys, time
import dp_accounting
from dp_accounting import mechanism_calibration
from dp_accounting.pld import pld_privacy_accountant as pld

steps, delta = json.loads(sys.argv[1])

def event(noise):
    step = dp_accounting.PoissonSampledDpEvent(
        1 / steps, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(step, steps)

start = time.process_time()
found = mechanism_calibration.calibrate_dp_mechanism(
    lambda: pld.PLDAccountant(value_discretization_interval=1e-4),
    event, 5.0, delta, tol=4e-4)
print(json.dumps([time.process_time() - start, f"{found:.6f}"]))
"""
THEIR_ALLOCATION = """
import json, sys, time
import PLD_accounting

noise, steps, epochs, delta = json.loads(sys.argv[1])
start = time.process_time()
high, low = PLD_accounting.gaussian_allocation_epsilon_range(
    delta=delta, sigma=noise, num_steps=steps, num_epochs=epochs)
print(json.dumps([time.process_time() - start, f"{low:.6g} .. {high:.6g}"]))
"""


def timed(question: Callable[[], str]) -> tuple[float, str]:
    """Returns the processor's seconds, and the answer."""
    start = time.process_time()
    answer = question()
    return time.process_time() - start, answer


def poisson(steps: int) -> str:
    """The noise multiplier for epsilon 5."""
    plan = DpSgdPlan(
        sampler="poisson",
        num_examples=1024 * steps,
        expected_batch_size=1024,
        num_steps=steps,
    )
    found = accountant.noise_multiplier(plan, epsilon=5.0, delta=DELTA)
    return f"{found.guarantee:.6f}"


def allocation(noise: float, steps: int, epochs: int, delta: float) -> str:
    """Both bounds on epsilon of balls and bins."""
    plan = DpSgdPlan(
        sampler="balls-and-bins",
        num_examples=1024 * steps,
        expected_batch_size=1024,
        num_steps=steps * epochs,
        num_epochs=epochs,
    )
    found = accountant.epsilon(plan, noise_multiplier=noise, delta=delta)
    return f"{found.lower:.6g} .. {found.guarantee:.6g}"


def theirs(python: str, program: str, question: object) -> tuple[float, str]:
    """Asks another library in its own environment."""
    command = [python, "-c", program, json.dumps(question)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return float("nan"), "failed: " + result.stderr.strip().splitlines()[-1]
    seconds, answer = json.loads(result.stdout.splitlines()[-1])
    return seconds, answer


def report(who: str, what: str, found: tuple[float, str]) -> None:
    """Prints one line."""
    print(f"{found[0]:8.2f} s  {who:15} {what}: {found[1]}", flush=True)


def main() -> None:
    """Asks the questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp-accounting", metavar="PYTHON")
    parser.add_argument("--pld-accounting", metavar="PYTHON")
    asked = parser.parse_args()
    for steps in POISSON:
        what = f"Poisson noise, {steps} steps"
        report("dpsgd", what, timed(functools.partial(poisson, steps)))
        if asked.dp_accounting:
            found = theirs(asked.dp_accounting, THEIR_POISSON, [steps, DELTA])
            report("dp_accounting", what, found)
    for question in ALLOCATIONS:
        noise, steps, epochs, _ = question
        what = f"balls and bins, {epochs} x {steps} steps, noise {noise:g}"
        report("dpsgd", what, timed(functools.partial(allocation, *question)))
        if asked.pld_accounting:
            found = theirs(asked.pld_accounting, THEIR_ALLOCATION, question)
            report("PLD_accounting", what, found)


if __name__ == "__main__":
    main()
