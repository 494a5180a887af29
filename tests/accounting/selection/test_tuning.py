"""What tuning costs: more than one run, and less than all of them together."""

from __future__ import annotations

import json
import math

from accounting.claims.selection import Tuning
from accounting.core import accountant
from accounting.core.plan import together
from tests.accounting.plans import make_plan
from tests.command_line import invoke

PLAN = make_plan("poisson", 16_000, 256, 126)
ASKED = Tuning(plan=PLAN, num_runs=8, delta=1e-6)
FLAGS = (
    *("--num-examples", "16000", "--batch-size", "256", "--epochs", "2"),
    *("--delta", "1e-6", "--runs", "8"),
)


def test_the_noise_of_the_best_was_itself_verified_to_meet_the_target():
    found = ASKED.for_epsilon(3.0)
    assert found == ASKED.at_noise(found.noise_multiplier, found.runs)
    assert 2.99 < found.epsilon <= 3.0
    one, every = (
        accountant.noise_multiplier(together(PLAN, n), epsilon=3.0, delta=1e-6)
        for n in (1, 8)
    )
    assert one.guarantee < found.noise_multiplier < every.guarantee


def test_plan_prints_the_price_as_json():
    found = invoke(["plan", *FLAGS, "--noise-multiplier", "2", "--json"])
    price = json.loads(found.output)["price"]
    assert price["mean"] > 8
    assert 0 < price["epsilon"] < math.inf
