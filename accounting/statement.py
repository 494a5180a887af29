"""The privacy statement of a run: the claim, its theorem, and what it does not cover.

Epsilon is never stated alone.  A statement has delta, the neighbouring relation, the
sampler, the noise, the kind of bound and its theorem, the accountant with its version,
discretisation and direction of error, what it relies on without a check, and the
outputs that the claim does not cover.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from accounting import profiles
from accounting.core import intervals, sampler_registry
from accounting.core import neighboring_relation as relations
from accounting.core.claim import AUTO_CLIP, RELIANCES, Claim, claim_of
from accounting.core.intervals import lower_text, upper_text
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import delta_weakness, installed_version
from accounting.profiles import TradeOff

if TYPE_CHECKING:
    from accounting.core.claim import MethodWording

STATEMENT_VERSION = 1
#: The versions with which the tests compare the accountant, as in the lock files; the
#: installed version may be another.
REFERENCE_ACCOUNTANT = "dp-accounting 0.4.3 and 0.6.0"

_PESSIMISM = (
    "every approximation (grid, truncated tails, wrap-around, rounding) is added to "
    "the upper bound"
)

#: The default of ``gradients``.
DP_SGD_GRADIENTS = "DP-SGD: per-example gradients"

CERTIFIED = (
    "certified: the reference sampler made the same bytes from key, plan and input"
)

EVALUATION = (
    "the evaluation set, and everything computed from it; it must share no example "
    "with the training set"
)
#: Rows are drawn once for all runs on the same batches, whose epsilons do not add.
SHARED_BATCHES = (
    "The batches may have been used by other runs: for these and this one together "
    "nothing is proven."
)
EARLIER_RUNS = "hyper-parameter search and earlier runs on the same data"
OTHER_RUNS = "runs on the same data other than the {count} of the claim"
#: Outputs of a training run that no privacy statement covers.
NOT_COVERED = (
    "training losses and metrics, clip fractions and batch statistics",
    "gradient norms",
    "realised batch sizes and weights, and which example was in which step",
    EARLIER_RUNS,
    EVALUATION,
    "the sampling key and the noise, which must stay secret",
)


def _wording(plan: DpSgdPlan, relation: str, count: int) -> sampler_registry.Wording:
    wording = relations.brought(plan.sampler, relation, count).wording
    if wording is None:
        sampler_registry.refuse(
            plan.sampler,
            "the wording of its privacy statement",
            "Give its Sampler a Wording, or ask the accountant alone.",
        )
    return wording


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement(Claim):
    """A privacy claim, with everything that a reader needs to check it.

    Attributes:
      gradients: The method and what it clips, in words.  It clips a function of one
        example and of earlier releases.
      learned_before: What was learned from the examples before training, without
        privacy.
      batches_used_before: Whether another run may have used the batches.
    """

    gradients: str = DP_SGD_GRADIENTS
    learned_before: tuple[str, ...] = ()
    batches_used_before: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """The theorems behind epsilon, and behind the bounds on attacks."""
        found = self.trade_off
        return (*super().methods, *(found.methods if found else ()))

    @property
    def relation_text(self) -> str:
        """Definition of neighbouring data sets, and the condition on their size."""
        number = self._wording.num_examples
        text = relations.TEXTS[self.neighboring_relation]
        if self._is_for_users:
            text = relations.TEXTS_OF_USER.get(self.neighboring_relation, text)
        return f"{text}; {number}"

    @property
    def privacy_unit(self) -> str:
        """The privacy unit: the example or user whose presence is hidden."""
        if self.unit is not None:
            return self.unit
        if not self._is_for_users:
            return "one example"
        return (
            f"one user, who must have at most {self.max_examples_per_user} examples: "
            "drop the others before batches are made"
        )

    @property
    def _is_for_users(self) -> bool:
        return self.unit is not None or self.max_examples_per_user > 1

    @property
    def _wording(self) -> sampler_registry.Wording:
        relation, count = self.neighboring_relation, self.max_examples_per_user
        return _wording(self.plan, relation, count)

    @property
    def weakness(self) -> str | None:
        """A warning if ``delta`` is at least ``1 / num_examples``, else None."""
        return delta_weakness(self.delta, self.plan.num_examples)

    @property
    def mechanism(self) -> str:
        """The mechanism in words."""
        words = self._own_words
        clipped, released = (words.clipped, words.released) if words else ("", "")
        clipped = f"clipped to l2_norm_clip,{clipped}"
        deviation = "noise_multiplier * l2_norm_clip"
        if self.l2_norm_clip == AUTO_CLIP:
            clipped = (
                "in units of the step's clip norm, with one more coordinate for the "
                "count that it follows, clipped to norm 1,"
            )
            deviation = "noise_multiplier"
        return (
            f"{self.gradients} {clipped} summed, {self._noise(deviation)}, "
            f"divided by the constant expected_batch_size{released}"
        )

    def _noise(self, deviation: str) -> str:
        """The noise of a step in words, given its deviation if it is independent."""
        bands = self.plan.bands
        if bands is None:
            return (
                f"Gaussian noise of standard deviation {deviation} added once per step"
            )
        return (
            f"noise of {bands} bands added once per step (BandMF, Choquette-Choo et "
            "al. 2023: Gaussian noise of standard deviation "
            f"{deviation} * |c|, less c_j times the noise of the j-th step before, "
            f"with c the first {bands} coefficients of ((1 - x) (1 - x/2))^(-1/2))"
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Outputs of the run that the claim does not cover."""
        words = self._own_words
        of_method = words.not_covered if words else ()
        of_one = words.earlier if words and words.earlier else EARLIER_RUNS
        several = OTHER_RUNS.format(count=self.of_runs)
        earlier = of_one if self.of_runs == 1 else several
        known = (earlier if each == EARLIER_RUNS else each for each in NOT_COVERED)
        return (*known, *of_method, *self.learned_before)

    @property
    def discretization(self) -> str:
        """How the bounds are computed."""
        words = self._own_words
        own = words.discretization if words else None
        return self._wording.discretization if own is None else own

    @property
    def _own_words(self) -> MethodWording | None:
        return None if self.theorem is None else self.theorem.wording(self.epsilon)

    @property
    def trade_off(self) -> TradeOff | None:
        """Bounds on membership tests; None without a guarantee."""
        if not self.is_guarantee:
            return None
        epsilon = self.epsilon.guarantee
        # A theorem is asked for its claim alone, not for a privacy profile.
        if self.theorem is not None:
            return TradeOff(((epsilon, self.delta),))
        return profiles.trade_off_of_claim(
            self.plan_of_all,
            noise_multiplier=self.noise_multiplier,
            epsilon=epsilon,
            delta=self.delta,
            neighboring_relation=self.neighboring_relation,
            max_examples_per_user=self.max_examples_per_user,
        )

    @property
    def claim(self) -> str:
        """The claim in one sentence, or that there is none."""
        if self.is_guarantee:
            weakness, one_of = self.weakness, ""
            if self.of_runs > 1:
                one_of = (
                    f"that of one of at most {self.of_runs:,} runs of this plan on "
                    "this table, which together are "
                )
            return (
                f"The released model is {one_of}"
                f"({upper_text(self.epsilon.guarantee)}, "
                f"{self.delta!r})-differentially private under the "
                f"{relations.NAMES[self.neighboring_relation]} relation"
                f"{self._for_users}, {self._bound}."
                + (f" {weakness}" if weakness else "")
                + (f" {SHARED_BATCHES}" if self.batches_used_before else "")
            )
        if self.epsilon.upper is None:
            return (
                "No guarantee is claimed: no upper bound is known for these batches. "
                f"Epsilon is at least {lower_text(self.epsilon.lower or 0.0)} "
                f"at delta {self.delta!r}."
            )
        return (
            f"No guarantee is claimed: no finite epsilon is proven at {self.delta!r}."
        )

    @property
    def runs(self) -> str | None:
        """What epsilon of several runs is of, in words; None for one run."""
        if self.of_runs == 1:
            return None
        return (
            f"at most {self.of_runs:,}, declared before the first, with this plan and "
            "noise, each on batches of its own, whether they are made or not; they are "
            f"one run of {self.plan_of_all.num_steps:,} steps"
        )

    @property
    def _for_users(self) -> str:
        if self.unit is not None:
            return " for users"
        count = self.max_examples_per_user
        if count == 1:
            return ""
        return (
            f" for users with at most {count} examples, which nothing here enforces: "
            "who has more is not protected"
        )

    @property
    def _bound(self) -> str:
        if self.epsilon.kind == intervals.EXACT:
            return "exactly"
        if self.epsilon.lower is None:
            return "an upper bound"
        return f"an upper bound; no proof can go below {lower_text(self.epsilon.lower)}"

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        found = self.trade_off
        return {
            "version": STATEMENT_VERSION,
            "claim": self.claim,
            "is_guarantee": self.is_guarantee,
            "epsilon": _finite(self.epsilon.upper),
            "epsilon_lower_bound": _finite(self.epsilon.lower),
            "delta": self.delta,
            "weakness": self.weakness,
            "bound": self.epsilon.kind,
            "theorem": self.epsilon.method,
            "lower_bound_theorem": self.epsilon.lower_method,
            "neighboring_relation": self.neighboring_relation,
            "neighboring_relation_text": self.relation_text,
            "privacy_unit": self.privacy_unit,
            "mechanism": self.mechanism,
            "sampling": self._wording.sampling,
            "plan": self.plan.to_json(),
            "plan_fingerprint": self.plan.fingerprint,
            "of_runs": self.of_runs,
            "runs": self.runs,
            "sampling_probability": str(self.plan.sampling_probability),
            "noise_multiplier": self.noise_multiplier,
            "l2_norm_clip": self.l2_norm_clip,
            "accountant": f"dpsgd {installed_version('dpsgd')}",
            "reference_accountant": REFERENCE_ACCOUNTANT,
            "discretization": self.discretization,
            "pessimism": _PESSIMISM,
            "attacks": found and found.to_json(),
            "batches_certified": self.batches_certified,
            "relies_on": list(self.relies_on),
            "not_covered": list(self.not_covered),
        }

    def to_text(self) -> str:
        """Returns the statement as lines of text."""
        fields = self.to_json()
        plan = self.plan
        lines = [
            self.claim,
            f"  mechanism   {fields['mechanism']}.",
            f"  sampling    {fields['sampling']}.",
            f"  relation    {self.relation_text} ({self.neighboring_relation}).",
            f"  unit        {fields['privacy_unit']}; {self._number()}.",
            f"  steps       T={plan.num_steps:,} in {plan.epochs_in_words}, "
            f"q={plan.sampling_probability}, "
            f"expected batch size {plan.expected_batch_size:,}{self._cap()}.",
            *([] if self.runs is None else [f"  runs        {self.runs}."]),
            f"  noise       multiplier {self.noise_multiplier!r}, clip "
            f"{'not stated' if self.l2_norm_clip is None else self.l2_norm_clip}.",
            f"  bound       {fields['bound']}: {fields['theorem']}.",
            f"  accountant  {fields['accountant']}, tested against "
            f"{fields['reference_accountant']}; {fields['discretization']}; "
            f"{_PESSIMISM}.",
            *self._attacks(),
            *self._reliances(),
            "  not covered",
            *(f"    - {item}" for item in self.not_covered),
        ]
        return "\n".join(lines) + "\n"

    def _attacks(self) -> list[str]:
        if (found := self.trade_off) is None:
            return []
        unit = "the examples of a user were" if self._is_for_users else "an example was"
        replaced = self.neighboring_relation == relations.REPLACE_ONE
        return [f"  attacks     {found.to_text(unit, replaced=replaced)}."]

    def _reliances(self) -> list[str]:
        texts = {**RELIANCES, **self.claims}
        return [
            *([f"  batches     {CERTIFIED}."] if self.batches_certified else []),
            *(f"  relies on   the {name}: {texts[name]}." for name in self.relies_on),
        ]

    def _number(self) -> str:
        zero_out = self.neighboring_relation == REPLACE_SPECIAL
        return f"n={self.plan.num_examples:,}{' slots' if zero_out else ''}"

    def _cap(self) -> str:
        size, bands = self.plan.truncated_batch_size, self.plan.bands
        groups = "" if bands is None else f" of one of {bands:,} groups in turn"
        return groups + ("" if size is None else f", at most B={size:,}")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def privacy_statement(
    plan: DpSgdPlan, *, gradients: str = DP_SGD_GRADIENTS, **asked: Any
) -> PrivacyStatement:
    """Returns the statement for a run that executed ``plan``, or for several.

    Args:
      plan: What was executed.
      gradients: The method and what it clips, in words.  It must clip a function of one
        example and of earlier releases.
      **asked: As for `claim_of`: noise, delta, clip, theorem, relation, unit, runs.

    Raises:
      InputError: as for `claim_of`, or a sampler without wording.
    """
    # Refused before epsilon is computed, which may take seconds.
    relation = asked.get("neighboring_relation", REPLACE_SPECIAL)
    _wording(plan, relation, asked.get("max_examples_per_user", 1))
    return PrivacyStatement(**vars(claim_of(plan, **asked)), gradients=gradients)
