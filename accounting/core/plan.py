"""The plan: a public, frozen, serialisable description of how batches are sampled.

A plan says everything about sampling that an accountant needs, and nothing that an
adversary may not know.  The pipeline writes it into the manifest beside the batches,
the trainer refuses batches that do not satisfy it, and epsilon is computed from it.

Formal guarantees:
  - Every field is public; a plan may be logged, printed and published.
  - Rates are exact fractions of integers; none is a rounded reciprocal.
  - ``from_json(to_json(plan)) == plan``; JSON with unknown, missing or
    ill-typed fields, or of another version, is refused.
  - Equal plans, and only those, have equal fingerprints (up to SHA-256 collisions).

References:
  Chua et al. (2024), arXiv:2411.04205, for the samplers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from fractions import Fraction
from typing import Any

from accounting.core.validation import (
    InputError,
    check_choice,
    check_int,
    header,
    read_fields,
)

#: Bump when the meaning of a field changes or a field is added or removed.
PLAN_VERSION = 1
#: With more examples, the error of binomial tails exceeds
#: `samplers.truncated_poisson.TAIL_SLACK`: it is 1e-7 at 10^16 examples.
MOST_EXAMPLES = 10**12
#: Largest number of runs declared together: each costs noise, even if it is never made.
MOST_RUNS = 1_000
#: Largest number of bands whose noise is computed without error; see
#: `trainer.core.step.noise`.
MOST_BANDS = 256

DETERMINISTIC = "deterministic"
PERSISTENT_SHUFFLE = "persistent-shuffle"
DYNAMIC_SHUFFLE = "dynamic-shuffle"
POISSON = "poisson"
TRUNCATED_POISSON = "truncated-poisson"
BALLS_AND_BINS = "balls-and-bins"
CYCLIC_POISSON = "cyclic-poisson"
TRUNCATED_CYCLIC_POISSON = "truncated-cyclic-poisson"
#: Sampler -> the cyclic sampler that takes its place if the noise has bands.
CYCLIC = {
    POISSON: CYCLIC_POISSON,
    TRUNCATED_POISSON: TRUNCATED_CYCLIC_POISSON,
}
#: Asks for the number of bands by the rule of `accounting.bands`.
AUTO_BANDS = "auto"


def canonical_json(value: Any) -> bytes:
    """Returns the canonical JSON encoding of ``value``, for fingerprints."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def fingerprint(value: Any) -> str:
    """Returns the SHA-256 of ``canonical_json(value)``, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpSgdPlan:
    """How the batches of one training run are sampled.  All fields are public.

    Attributes:
      sampler: One of ``SAMPLERS``, or registered with `sampler_registry`.
      num_examples: Slots of the data set, real or ghost; public under the zero-out
        relation.  At least 1, at most `MOST_EXAMPLES`.
      expected_batch_size: Expected examples per step; gradients are divided by it.  In
        [1, num_examples].
      num_steps: Noisy updates in the whole run.  At least 1.
      num_epochs: Rounds of ``num_steps / num_epochs`` steps each.  Divides
        ``num_steps``.  Dynamic shuffling and balls-and-bins draw anew in each epoch;
        Poisson sampling does not depend on it.
      truncated_batch_size: For truncated samplers, the cap on the examples of one step;
        in [expected_batch_size, num_examples].  None for all others.
      bands: For cyclic samplers, the number of groups of examples; each step samples
        from one group, in turn.  At least 2, at most num_examples / expected_batch_size
        and `MOST_BANDS`.  None for all other samplers, whose JSON has no such field.

    Raises:
      InputError: a value out of range; the message has name, value and bound.

    Example:
      >>> plan = DpSgdPlan(
      ...     sampler="truncated-poisson", num_examples=10_000,
      ...     expected_batch_size=500, num_steps=40, num_epochs=2,
      ...     truncated_batch_size=700)
      >>> plan.sampling_probability
      Fraction(1, 20)
      >>> plan.steps_per_epoch
      20
    """

    sampler: str
    num_examples: int
    expected_batch_size: int
    num_steps: int
    num_epochs: int = 1
    truncated_batch_size: int | None = None
    bands: int | None = None

    def __post_init__(self) -> None:
        check_choice("sampler", self.sampler, names())
        check_int("num_examples", self.num_examples, at_least=1, at_most=MOST_EXAMPLES)
        _check_batch_size(self.expected_batch_size, self.num_examples)
        check_int("num_steps", self.num_steps, at_least=1)
        check_int("num_epochs", self.num_epochs, at_least=1, at_most=self.num_steps)
        if self.num_steps % self.num_epochs:
            raise InputError(
                f"Expected num_epochs={self.num_epochs} to divide "
                f"num_steps={self.num_steps}."
            )
        self._check_of_sampler()

    def _check_of_sampler(self) -> None:
        """Refuses a plan that lacks a field of its sampler, or has one of another."""
        found, least = rules(self.sampler), self.expected_batch_size
        # A step with bands samples from one group, which must have enough examples.
        most = min(MOST_BANDS, self.num_examples // least)
        instead = f"lower --batch-size, or take --sampler {TRUNCATED_POISSON}"
        for name, is_needed, other, bounds, remedy in (
            ("truncated_batch_size", found.truncates, TRUNCATED_POISSON,
             (least, self.num_examples), "or auto"),
            ("bands", found.cyclic, CYCLIC_POISSON, (2, most), instead),
        ):  # fmt: skip
            value = getattr(self, name)
            if is_needed:
                option = f"--{name.replace('_', '-')}"
                remedy = f"Give {option} from {bounds[0]} to {bounds[1]}, {remedy}."
                check_int(
                    name, value, at_least=bounds[0], at_most=bounds[1], remedy=remedy
                )
            elif value is not None:
                raise InputError(
                    f"Expected {name}={value!r} to be None for "
                    f"sampler={self.sampler!r}. Omit it, or take --sampler {other}."
                )

    @property
    def sampling_probability(self) -> Fraction:
        """Probability that an example is in a given step, before truncation.

        With ``bands``, the probability that it is in a given step of its group.
        """
        sampled = self.expected_batch_size * (self.bands or 1)
        return Fraction(sampled, self.num_examples)

    @property
    def expected_uses(self) -> Fraction:
        """Expected number of steps of an example, before truncation."""
        return Fraction(self.expected_batch_size * self.num_steps, self.num_examples)

    @property
    def num_group_steps(self) -> int:
        """Largest number of steps that may hold one example, all of its group."""
        return -(-self.num_steps // (self.bands or 1))

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return self.num_steps // self.num_epochs

    @property
    def epochs_in_words(self) -> str:
        """The number of epochs, as `epochs_in_words` says it."""
        return epochs_in_words(
            self.num_examples,
            self.expected_batch_size,
            num_steps=self.num_steps,
            num_epochs=self.num_epochs,
        )

    @property
    def largest_batch_size(self) -> int | None:
        """Largest possible number of examples in a step; None if it has no bound."""
        if rules(self.sampler).equal_batches:
            return -(-self.num_examples // self.steps_per_epoch)
        return self.truncated_batch_size

    @property
    def num_shuffles(self) -> int:
        """Number of uniformly random orders of all rows that a run draws.

        Epoch e uses order ``e % num_shuffles``.
        """
        shuffles = rules(self.sampler).shuffles
        return {None: 0, PER_RUN: 1, PER_EPOCH: self.num_epochs}[shuffles]

    @functools.cached_property  # every stream of a job asks for it
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of this plan, 64 hexadecimal digits."""
        return fingerprint(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``version``."""
        fields = {**header(PLAN_VERSION), **dataclasses.asdict(self)}
        if self.bands is None:  # a plan without bands keeps its fingerprint
            del fields["bands"]
        return fields

    @classmethod
    def from_json(cls, fields: Any) -> DpSgdPlan:
        """Returns the plan that ``to_json`` wrote.

        Raises:
          InputError: unknown or missing fields, ill-typed values, another version.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or fields.get("bands") is None:
            names.remove("bands")  # None is not written
        return cls(**read_fields(fields, names, kind="plan", version=PLAN_VERSION))


def together(plan: DpSgdPlan, num_runs: int) -> DpSgdPlan:
    """Returns the one plan whose epsilon is that of several runs together.

    N runs of a plan of T steps in E epochs are one run of N T steps in N E epochs.

    Theorem.  Let number of runs, plan, noise and privacy unit be fixed before the first
    run, and let each run sample by randomness of its own.  Let all else be chosen from
    what earlier runs released: model, clip, learning rate, and whether to make a run at
    all.  Then what all runs release is private with every (epsilon, delta) that the
    accountant proves for the returned plan.

    Proof.  A plan is E rounds of T / E steps.  Where the sampler ``composes``, the rows
    of a round are drawn independently of those of other rounds, by the same law (or,
    without chance, are fixed).  The accountant's bounds hold whatever each step
    computes, if it has a sensitivity of one clip norm and was chosen from earlier
    releases.  So the rounds of N runs, one after another, are N E rounds such as those
    of the returned plan: to begin a new run there, with another model, is such a
    choice, and clip norms only set the unit.  Runs that are not made, or end early,
    release a function of what they would have released otherwise.

    Runs at the same time are covered, too.  If no run reads results of another one that
    has not ended, the runs are in some order.  And steps of Poisson sampling are rounds
    of their own, in whatever order they are taken.

    The returned plan has N times E epochs, which may differ from what N T steps would
    fill: each run uses a row once in each of its own epochs.  Persistent shuffles are
    refused: a run repeats its order, and the next run repeats another one, which no
    single plan describes.

    With k ``bands``, each run draws its groups and begins a cycle of k steps: an
    example is in at most N ceil(T / k) steps.  T is rounded up to whole cycles, so that
    a group of the returned plan has as many.  Its bounds hold whatever the groups are,
    which need not be the same in two runs.

    Args:
      plan: The plan of each run.
      num_runs: N, from 1 to `MOST_RUNS`.

    Raises:
      InputError: a number out of range, or a sampler whose runs do not compose.

    Example:
      >>> plan = DpSgdPlan(
      ...     sampler="balls-and-bins", num_examples=100, expected_batch_size=10,
      ...     num_steps=20, num_epochs=2)
      >>> together(plan, 3).num_steps, together(plan, 3).num_epochs
      (60, 6)
    """
    check_int("of_runs", num_runs, at_least=1, at_most=MOST_RUNS)
    if num_runs == 1:
        return plan
    if not rules(plan.sampler).composes:
        raise InputError(
            f"Expected of_runs={num_runs} to be 1 for sampler={plan.sampler!r}: its "
            "runs are not proven to be one run of all their epochs, such as where each "
            "repeats an order of its own. Take --sampler truncated-poisson, or omit "
            "--of-runs."
        )
    steps, epochs = plan.num_steps * num_runs, plan.num_epochs * num_runs
    if plan.bands is not None:
        steps, epochs = plan.num_group_steps * plan.bands * num_runs, num_runs
    return dataclasses.replace(plan, num_steps=steps, num_epochs=epochs)


def check_epochs(plan: DpSgdPlan) -> None:
    """Refuses a plan whose epochs cannot use every example once, as its sampler does.

    Raises:
      InputError: the number of steps of an epoch is not n/b to the nearest integer.
    """
    if not rules(plan.sampler).once_per_epoch:
        return
    needed = steps_per_epoch(plan.num_examples, plan.expected_batch_size)
    if plan.steps_per_epoch != needed:
        raise InputError(
            f"Expected steps_per_epoch={plan.steps_per_epoch} to be {needed} for "
            f"sampler={plan.sampler!r}, which uses every example once per epoch. Give "
            "--epochs instead of --num-steps."
        )


def _check_batch_size(expected_batch_size: int, num_examples: int) -> None:
    check_int(
        "expected_batch_size",
        expected_batch_size,
        at_least=1,
        at_most=num_examples,
        remedy=f"Give --batch-size from 1 to {num_examples}.",
    )


def steps_per_epoch(num_examples: int, expected_batch_size: int) -> int:
    """Returns ``num_examples / expected_batch_size`` to the nearest integer.

    Halves round up, as in the paper's 35,938 steps for 36.8M examples and batches of
    1,024.

    Args:
      num_examples: Slots of the data set.
      expected_batch_size: Expected examples per step.

    Raises:
      InputError: a value out of range.

    Example:
      >>> steps_per_epoch(36_800_000, 1024)
      35938
    """
    check_int("num_examples", num_examples, at_least=1)
    _check_batch_size(expected_batch_size, num_examples)
    return (2 * num_examples + expected_batch_size) // (2 * expected_batch_size)


def epochs_in_words(
    num_examples: int, expected_batch_size: int, *, num_steps: int, num_epochs: int
) -> str:
    """Returns how often an example is expected to be used, in words.

    Steps that make no whole epochs have ``num_epochs=1`` in a plan, which is no number
    of passes over the data.

    Args:
      num_examples: Slots of the data set.
      expected_batch_size: Expected examples per step.
      num_steps: Steps in all.
      num_epochs: Epochs of the plan.

    Example:
      >>> epochs_in_words(1000, 10, num_steps=100, num_epochs=1)
      '1 epoch'
      >>> epochs_in_words(1000, 10, num_steps=250, num_epochs=1)
      '2.5 epochs'
    """
    if num_steps != num_epochs * steps_per_epoch(num_examples, expected_batch_size):
        return f"{num_steps * expected_batch_size / num_examples:.4g} epochs"
    return f"{num_epochs:,} epoch{'s' * (num_epochs != 1)}"


def steps_and_epochs(
    num_examples: int,
    expected_batch_size: int,
    *,
    epochs: int | None,
    num_steps: int | None,
) -> tuple[int, int]:
    """Returns ``num_steps`` and ``num_epochs``, given one of epochs and steps.

    A number of steps that is not a multiple of an epoch's counts as one epoch, which
    samplers that use every example once per epoch refuse.

    Args:
      num_examples: Slots of the data set.
      expected_batch_size: Expected examples per step.
      epochs: Passes over the data; None if ``num_steps`` is given.
      num_steps: Steps in all; None if ``epochs`` is given.

    Example:
      >>> steps_and_epochs(1000, 10, epochs=3, num_steps=None)
      (300, 3)
      >>> steps_and_epochs(1000, 10, epochs=None, num_steps=200)
      (200, 2)
      >>> steps_and_epochs(1000, 10, epochs=None, num_steps=250)
      (250, 1)

    Raises:
      InputError: not exactly one of ``epochs`` and ``num_steps`` is given, or a value
        is out of range.
    """
    if (epochs is None) == (num_steps is None):
        remedy = "Give one." if epochs is None else "Omit one."
        raise InputError(f"Expected exactly one of --epochs and --num-steps. {remedy}")
    per_epoch = steps_per_epoch(num_examples, expected_batch_size)
    if epochs is not None:
        check_int("epochs", epochs, at_least=1)
        return epochs * per_epoch, epochs
    assert num_steps is not None  # exactly one is given
    check_int("num_steps", num_steps, at_least=1)
    whole = num_steps % per_epoch == 0
    return num_steps, num_steps // per_epoch if whole else 1


# -- what plans of each sampler must satisfy -------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRules:
    """Properties of a sampler that its plans depend on.

    Attributes:
      once_per_epoch: Whether every example is in exactly one step of each epoch.
      equal_batches: Whether an epoch is cut into steps of nearly equal sizes.
      truncates: Whether the plan must have a ``truncated_batch_size``.
      cyclic: Whether the plan must have ``bands``: an example is in steps of its group
        alone, every ``bands`` steps.
      shuffles: When a run draws a uniformly random order of all rows that it cuts into
        steps: ``PER_RUN``, ``PER_EPOCH`` or, without shuffling, None.
      composes: Whether runs that sample each by itself have, one after another, the law
        of one run of all their epochs: no draw of a run is used in two epochs.
    """

    once_per_epoch: bool
    equal_batches: bool = False
    truncates: bool = False
    cyclic: bool = False
    shuffles: str | None = None
    composes: bool = False


PER_RUN, PER_EPOCH = "run", "epoch"
_BY_CHANCE = PlanRules(once_per_epoch=False, composes=True)
_CAPPED = dataclasses.replace(_BY_CHANCE, truncates=True)
_EQUAL = PlanRules(once_per_epoch=True, equal_batches=True, composes=True)
_RULES = {
    DETERMINISTIC: _EQUAL,
    PERSISTENT_SHUFFLE: dataclasses.replace(_EQUAL, shuffles=PER_RUN, composes=False),
    DYNAMIC_SHUFFLE: dataclasses.replace(_EQUAL, shuffles=PER_EPOCH),
    POISSON: _BY_CHANCE,
    TRUNCATED_POISSON: _CAPPED,
    BALLS_AND_BINS: dataclasses.replace(_BY_CHANCE, once_per_epoch=True),
    CYCLIC_POISSON: dataclasses.replace(_BY_CHANCE, cyclic=True),
    TRUNCATED_CYCLIC_POISSON: dataclasses.replace(_CAPPED, cyclic=True),
}
#: The samplers of this package; others may be registered.
SAMPLERS = tuple(_RULES)


def names() -> tuple[str, ...]:
    """Returns the samplers that are registered, in order of registration."""
    return tuple(_RULES)


def rules(sampler: str) -> PlanRules:
    """Returns what the plans of a sampler must satisfy.

    Raises:
      InputError: there is no such sampler.
    """
    return _RULES[check_choice("sampler", sampler, names())]


def register_rules(sampler: str, found: PlanRules) -> None:
    """Registers, in this process, what plans of a sampler must satisfy.

    Args:
      sampler: Name of the sampler, which must not be taken; see
        `sampler_registry.register`.
      found: What a plan must satisfy.

    Raises:
      InputError: the name is taken.
    """
    if sampler in _RULES:
        raise InputError(
            f"Expected sampler={sampler!r} not to be registered yet. Take another name."
        )
    _RULES[sampler] = found
