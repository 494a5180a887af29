"""The privacy of a run, computed by ``accounting`` from what was executed.

A run may stop before its plan ends.  The weights after k of T steps are a function of
the iterates after 1, ..., T steps.  So the epsilon of the whole plan bounds the
release, even if released iterates, for example their validation metrics, decided when
to stop.  The epsilon of k steps does not: it is for a k that is fixed in advance.

Formal guarantees:
  - A ``StoppedStatement`` claims the epsilon of the whole plan, and says so.
  - A run that stopped early has no statement if the guarantee of its method is not one
    of released noisy sums.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accounting import statement
from accounting.core import accountant, claim
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_claimed_delta
from accounting.statement import PrivacyStatement
from pipelines.batches.folder import CERTIFICATE_NAME, read_certificate
from pipelines.core.batches.manifest import Certificate, Manifest
from pipelines.core.users import Bounded, UserBound
from pipelines.files.storage import pretty_json, write_atomically
from trainer.core import claim_names
from trainer.core.run.run_record import RunRecord, check_execution
from trainer.report.run_files import PRIVACY_NAME, PRIVACY_TEXT_NAME
from trainer.settings import methods
from trainer.settings.methods import NON_PRIVATE, check_described, gradients_text
from trainer.settings.train_settings import TrainSettings

if TYPE_CHECKING:
    from accounting.core.claim import Theorem
    from accounting.core.intervals import NoiseBounds

NOT_PRIVATE = (
    "This run is not private: gradients were not clipped and no noise was added. "
    "No epsilon can be stated."
)
NO_DELTA = (
    "No epsilon is stated, since no delta was given. "
    "`dpsgd account RUN --delta D` states one."
)


def theorem_of_settings(settings: TrainSettings) -> Theorem | None:
    """Returns the theorem for the settings of a run; None if DP-SGD's holds.

    Raises:
      InputError: the method does not say how it is accounted for.
    """
    optimizer = settings.describe_optimizer()
    return _theorem(settings, optimizer, settings.selection_described)


def theorem_of_run(record: RunRecord) -> Theorem | None:
    """Returns the theorem for an executed private run; None if DP-SGD's holds.

    Raises:
      InputError: the method does not say how it is accounted for, or a setting of it
        is missing, unknown or refused.
    """
    check_described(record.method, record.method_settings)
    return _theorem(record, record.optimizer, record.selection)


def _theorem(
    run: TrainSettings | RunRecord,
    optimizer: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> Theorem | None:
    clip = run.l2_norm_clip
    assert clip is not None  # checked, of a private run
    theorem = methods.theorem_of(run.method, run.method_settings, clip, optimizer)
    if not selection:
        return theorem
    if theorem is not None:
        raise InputError(
            f"Expected {theorem.name} to be of one run: its theorem has no profile of "
            "which the best of several follows. Take another --method."
        )
    from accounting.claims.selection import Selected  # after --help: SciPy

    return Selected(**selection, l2_norm_clip=clip)


def unit_of(
    description: dict[str, Any], plan: DpSgdPlan, theorem: Theorem | None = None
) -> dict[str, Any]:
    """Returns the privacy unit of batches, as arguments of ``plan_statement``.

    Args:
      description: The data set's own, with the note of `dpsgd prepare`.
      plan: How the batches were sampled.
      theorem: Theorem of a method with its own accounting; None for DP-SGD's.
    """
    bounded = Bounded.of(description)
    if bounded is None:
        return {}
    if theorem is not None and theorem.is_for_rows_alone:
        raise no_search_of_users()
    return {
        "max_examples_per_user": bounded.max_examples_per_user,
        "neighboring_relation": relation_of(plan, bounded, theorem),
        "unit": bounded.unit,
    }


def no_search_of_users() -> InputError:
    """Returns the refusal of the best of several runs of a table with users."""
    return InputError(
        "Expected examples without users: the best of several runs is accounted for by "
        "the profile of a run for one row, not by that for all rows of a user. Give "
        "--of-runs, which covers users, or omit --runs."
    )


def relation_of(
    plan: DpSgdPlan, bounded: UserBound | None, theorem: Theorem | None = None
) -> str:
    """Returns the neighbouring relation under which batches are accounted for.

    No step draws an empty slot of bounded users, so that ``num_examples`` only bounds
    their examples.  Of truncated batches, the bounds under zero-out are proven for
    exactly that number, and can be too small for fewer; those under add-or-remove are
    proven for fewer, too.  All other bounds hold for fewer under zero-out.

    Args:
      plan: How the batches were sampled.
      bounded: How users are bounded; None if they are not.
      theorem: Theorem of a method with its own accounting; None for DP-SGD's.

    Raises:
      InputError: the theorem is not proven under that relation.
    """
    if bounded is None or plan.truncated_batch_size is None:
        return REPLACE_SPECIAL
    if theorem is not None:
        raise InputError(
            f"Expected batches without a cap for {theorem.name} and users: its theorem "
            "is proven under zero-out, and truncated batches of users are accounted "
            "for under add-or-remove. Make batches with --sampler poisson."
        )
    return ADD_OR_REMOVE_ONE


def count_of(description: dict[str, Any]) -> int:
    """Returns the maximum number of examples per user, 1 if the unit is an example."""
    bounded = Bounded.of(description)
    return bounded.max_examples_per_user if bounded else 1


def noise_bounds(
    plan: DpSgdPlan,
    *,
    epsilon: float,
    delta: float,
    theorem: Theorem | None = None,
    bounded: UserBound | None = None,
    of_runs: int = 1,
) -> NoiseBounds:
    """Returns bounds on the noise with which ``plan`` is (epsilon, delta)-private.

    Args:
      plan: How batches are sampled.
      epsilon: Target, above 0.
      delta: Target, in (0, 1).
      theorem: Theorem of a method with its own accounting; None for DP-SGD's.
      bounded: How users are bounded; None if the unit is an example.
      of_runs: Number of runs of the plan that are private together.

    Raises:
      InputError: nothing is proven for the plan's sampler or unit or for several runs,
        or no noise suffices.
    """
    plan = claim.plan_of_all(plan, of_runs, theorem)
    count = bounded.max_examples_per_user if bounded else 1
    if theorem is not None:
        claim.check_unit(theorem, count)
    relation = relation_of(plan, bounded, theorem)
    if theorem is None:
        return accountant.noise_multiplier(
            plan,
            epsilon=epsilon,
            delta=delta,
            max_examples_per_user=count,
            neighboring_relation=relation,
        )
    found = theorem.noise_multiplier(plan, epsilon=epsilon, delta=delta)
    # A lower bound for DP-SGD does not hold for another mechanism.
    return dataclasses.replace(found, necessary=None, necessary_method=None)


#: The privacy statement of a run that executes a plan, cached per argument tuple: a run
#: asks before its first step and after its last.
plan_statement = functools.lru_cache(statement.privacy_statement)


def check_run(
    record: RunRecord,
    manifest: Manifest,
    *,
    delta: float | None,
    allow_large_delta: bool = False,
    allow_stopped: bool = False,
) -> tuple[float, float]:
    """Returns noise multiplier and delta of a private run that executed its plan.

    Args:
      record: Record of the run.
      manifest: Manifest of the batches.
      delta: Delta to state; that of the record if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      allow_stopped: Whether to accept a run of the first steps of the plan.

    Raises:
      InputError: the run is not private, not complete, or of other batches, or there
        is no delta.
    """
    if record.method == NON_PRIVATE:
        raise InputError(
            "Expected method='non-private' to be a private one: the run has no clip "
            "and no noise, and no epsilon is stated for it."
        )
    check_execution(record, manifest, allow_stopped=allow_stopped)
    delta = delta if delta is not None else record.target_delta
    if delta is None:
        raise InputError("Expected --delta; the run was trained without one.")
    check_claimed_delta(delta, allow_large=allow_large_delta)
    assert record.noise_multiplier is not None  # checked by the record
    return record.noise_multiplier, delta


def run_statement(
    record: RunRecord,
    manifest: Manifest,
    *,
    delta: float | None,
    allow_large_delta: bool = False,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
    certificate: Certificate | None = None,
) -> Any:
    """Returns the privacy statement of a run.

    It is a ``StoppedStatement`` for a run that stopped early.

    Args:
      record: Record of the run.
      manifest: Manifest of the batches.
      delta: Delta to state; that of the record if None.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      neighboring_relation: One of `neighboring_relation.RELATIONS`; zero-out becomes
        ``relation_of``.
      max_examples_per_user: k; above 1 the privacy unit is a user.
      certificate: From ``read_certificate`` of the run's folder; without it the
        statement relies on the batch job.

    Raises:
      InputError: ``check_run`` refuses the run, it stopped where nothing is proven, or
        the certificate is about other batches.
    """
    is_stopped = not record.complete
    noise_multiplier, delta = check_run(
        record,
        manifest,
        delta=delta,
        allow_large_delta=allow_large_delta,
        allow_stopped=is_stopped,
    )
    if is_stopped:
        _check_stopped(record)
    theorem = theorem_of_run(record)
    unit = _unit_asked_for(manifest, max_examples_per_user, theorem)
    if neighboring_relation != REPLACE_SPECIAL:
        unit["neighboring_relation"] = neighboring_relation
    whole = plan_statement(
        manifest.plan,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=record.l2_norm_clip,
        delta=delta,
        gradients=gradients_text(
            record.method,
            record.method_settings,
            views=record.model.get("views", 1),
        ),
        theorem=theorem,
        allow_large_delta=allow_large_delta,
        of_runs=record.of_runs,
        **unit,
    )
    whole = dataclasses.replace(
        whole,
        learned_before=_learned_before(record),
        batches_certified=_are_certified(record, certificate),
        batches_used_before=record.batches_used_before,
        claims={name: claim_names.CLAIMS[name] for name in record.relies_on},
    )
    if not is_stopped:
        return whole
    fields = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    return StoppedStatement(**fields, num_steps_executed=record.num_steps_executed)


def _are_certified(record: RunRecord, certificate: Certificate | None) -> bool:
    """Whether the batches of a run are certified; refuses a certificate of others."""
    if certificate is None:
        return False
    if not certificate.is_about(record.manifest_fingerprint, record.records_id):
        raise InputError(
            f"Expected {CERTIFICATE_NAME} to be about the batches of this run; they "
            "have another manifest or other records. Remove it, or copy that of "
            "`dpsgd verify --resample` from the batches of the run."
        )
    return True


def _unit_asked_for(
    manifest: Manifest, max_examples_per_user: int, theorem: Theorem | None
) -> dict[str, Any]:
    """Returns the unit of the batches or, if they state none, the requested one."""
    unit = unit_of(manifest.dataset, manifest.plan, theorem)
    unit = unit or {"max_examples_per_user": max_examples_per_user}
    found = unit["max_examples_per_user"]
    if max_examples_per_user not in (1, found):
        raise InputError(
            f"Expected max_examples_per_user={max_examples_per_user} to be {found}, as "
            "`dpsgd prepare` left it. Omit it."
        )
    return unit


def _learned_before(record: RunRecord) -> tuple[str, ...]:
    """Returns what the claim assumes public, though examples may have influenced it."""
    weights = record.model.get("initial_weights")
    if weights is None:
        return ()
    return (
        "the initial weights: the run started from weights that the user declares "
        f"public (SHA-256 {weights['sha256']})",
    )


def stated(
    run: pathlib.Path,
    record: RunRecord,
    manifest: Manifest,
    *,
    allow_large_delta: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Returns the privacy statement of a run, or why it has none, as text and as JSON.

    Other arguments as for `run_statement`.

    Args:
      run: Folder of the run.

    Raises:
      InputError: ``check_run`` refuses the run.
    """
    if record.method == NON_PRIVATE:
        return NOT_PRIVATE, {"private": False, "reason": NOT_PRIVATE}
    if record.target_delta is None:
        return NO_DELTA, {"epsilon": None, "reason": NO_DELTA}
    found = run_statement(
        record,
        manifest,
        delta=None,
        allow_large_delta=allow_large_delta,
        certificate=read_certificate(run),
    )
    return found.to_text(), found.to_json()


def write_statement(
    run: pathlib.Path, *args: Any, **more: Any
) -> tuple[str, dict[str, Any]]:
    """Writes what `stated` returns into the folder of a run, and returns it.

    Args:
      run: Folder of the run.
      *args: As for `stated`.
      **more: As for `stated`.
    """
    text, fields = stated(run, *args, **more)
    write_atomically(run / PRIVACY_NAME, pretty_json(fields))
    data = text.rstrip("\n").encode() + b"\n"
    write_atomically(run / PRIVACY_TEXT_NAME, data)
    return text, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoppedStatement(PrivacyStatement):
    """A privacy claim for the first steps of a plan.

    Attributes:
      num_steps_executed: Number of executed steps.
    """

    num_steps_executed: int

    @property
    def stopped(self) -> str:
        """The number of executed steps, and why epsilon is that of the whole plan."""
        return (
            f"after {self.num_steps_executed:,} of T={self.plan.num_steps:,} steps; "
            "epsilon is of all T, which bounds every prefix, also where released "
            "iterates decided when to stop; a smaller one needs a number of steps "
            "that is fixed beforehand"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        return {
            **super().to_json(),
            "num_steps_executed": self.num_steps_executed,
            "stopped": self.stopped,
        }

    def to_text(self) -> str:
        """Returns the statement as a few lines of text."""
        claim, newline, rest = super().to_text().partition("\n")
        return f"{claim}{newline}  stopped     {self.stopped}.\n{rest}"


def _check_stopped(record: RunRecord) -> None:
    """Refuses, by an InputError, an incomplete run whose steps have no statement."""
    done = f"the run stopped after step {record.num_steps_executed}"
    if not methods.get(record.method).has_dp_sgd_accounting:
        raise InputError(
            f"Expected a run of all steps of its plan for method={record.method!r}, "
            f"whose guarantee is of the whole run; {done}. Train to the end."
        )
