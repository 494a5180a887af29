"""A thousand answers of the accountant: every sampler, relation and unit.

The name of an answer is its question, as JSON.  An answer is a number, or the word
``refused``.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

from accounting.core import accountant
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    RELATIONS,
    REPLACE_SPECIAL,
)
from accounting.core.plan import SAMPLERS, DpSgdPlan
from accounting.core.validation import InputError
from tests.frozen.compare import Answers

REFUSED = "refused"
NUM_QUESTIONS = 1000
#: Cyclic samplers, which came later, have answers of Poisson sampling.
_SAMPLERS = [name for name in SAMPLERS if "cyclic" not in name]
#: Asked about of every plan in turn.
_QUANTITIES = ("epsilon", "delta", "noise_multiplier")


def question(seed: int) -> dict[str, Any]:
    """Returns plan, quantity, relation and unit of a question.

    Args:
      seed: Its number; samplers, relations and quantities take turns.
    """
    rng = random.Random(f"frozen {seed}")

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    sampler = _SAMPLERS[seed % len(_SAMPLERS)]
    steps_per_epoch, epochs = round(log_uniform(2, 5000)), rng.choice((1, 1, 2, 5, 20))
    size = round(log_uniform(1, 1e5))
    plan = {
        "sampler": sampler,
        "num_examples": size * steps_per_epoch,
        "expected_batch_size": size,
        "num_steps": steps_per_epoch * epochs,
        "num_epochs": epochs,
    }
    if sampler == "truncated-poisson":
        cap = size + math.ceil(rng.uniform(0, 9) * math.sqrt(size))
        plan["truncated_batch_size"] = min(cap, plan["num_examples"])
    asked: dict[str, Any] = {"neighboring_relation": rng.choice(RELATIONS)}
    if rng.random() < 0.3:
        asked["neighboring_relation"] = rng.choice((REPLACE_SPECIAL, ADD_OR_REMOVE_ONE))
        asked["max_examples_per_user"] = rng.choice((2, 3, 5, 20))
    quantity = _QUANTITIES[seed // len(_SAMPLERS) % 3]
    if quantity != "noise_multiplier":
        asked["noise_multiplier"] = float(f"{log_uniform(0.3, 30):.3g}")
    if quantity != "epsilon":
        asked["epsilon"] = float(f"{log_uniform(0.1, 20):.3g}")
    if quantity != "delta":
        asked["delta"] = float(f"{log_uniform(1e-12, 1e-4):.3g}")
    return {"plan": plan, "quantity": quantity, **asked}


def _answer(name: str) -> Any:
    asked = json.loads(name)
    plan = DpSgdPlan(**asked.pop("plan"))
    try:
        found = getattr(accountant, asked.pop("quantity"))(plan, **asked)
    except InputError:
        return REFUSED
    value = found.guarantee
    return [value] if math.isfinite(value) else str(value)


def answer(names: list[str] | None) -> Answers:
    """Answers the thousand questions, or those of the names."""
    if names is None:
        every = (question(seed) for seed in range(NUM_QUESTIONS))
        names = [json.dumps(one, sort_keys=True) for one in every]
    return {name: _answer(name) for name in names}
