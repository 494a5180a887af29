"""``dpsgd audit``: how large epsilon is at least, by attacking the mechanism itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accounting import plan as plans
from accounting.cli import delta_flags
from accounting.plan import DpSgdPlan
from accounting.validation import InputError, check_float, check_int
from trainer.cli import plan_flags
from trainer.settings.method_settings import DP_SGD_RELEASES, NON_PRIVATE

if TYPE_CHECKING:
    from accounting.auditing.joint_tests import JointVerdict

MECHANISM = "mechanism"
TRAINER = "trainer"
#: Trials by default: about a minute at most, on a few hundred steps.
_TRIALS = {MECHANISM: 20_000, TRAINER: 8192}
_MOST_TRIALS = 10**8
#: Faults that an audit of each level cannot see, whatever the number of trials.
CANNOT_SEE = {
    MECHANISM: (
        "faults of training: clipping, padding, physical batches, lazy noise, "
        "optimizers and models; --level trainer looks at some of them",
        "faults of the batch job: files, engines, several machines",
        "examples whose steps depend on other examples, since there is one canary",
        "keys that others know or that two runs share, and a weak random generator",
        "what leaves by other ways than weights: files, messages, logs, timing",
        "several rows of one person",
    ),
    TRAINER: (
        "faults that only other models, losses, optimizers, methods, averages or code "
        "of yours meet: linear models are trained by dp-sgd with plain SGD",
        "faults that only long, large or resumed runs meet, or other engines and "
        "several machines",
        "faults rarer than one in the number of trials, or smaller than the spread of "
        "what is found",
        "batches that were sampled in another way, where trials are too few to tell",
        "keys that others know or that two runs share, and a weak random generator",
        "what leaves by other ways than weights: files, messages, logs, timing",
        "what the rounding of floating point gives away",
        "several rows of one person",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited.

    Attributes:
      plan: How the batches are really made.
      claimed: How they are said to be made.
      noise_multiplier: Above 0.
      l2_norm_clip: Of the run; of trainer trials.
      delta: Of the claim.
    """

    plan: DpSgdPlan
    claimed: str
    noise_multiplier: float
    l2_norm_clip: float
    delta: float


@click.command(name="audit")
@plan_flags.options
@click.option(
    "--claim",
    type=click.Choice(plans.SAMPLERS),
    help="Hold it against the epsilon of this sampler at the same noise.  Default: of "
    "the sampler itself.",
)
@click.option("--epsilon", type=float, help="Instead: the noise this claim needs.")
@click.option(
    "--level",
    type=click.Choice((MECHANISM, TRAINER)),
    default=MECHANISM,
    show_default=True,
    help="mechanism: sampler and noise, all steps, on the worst data.  trainer: small "
    "runs of `batches` and `train` from end to end.",
)
@click.option(
    "--trials",
    type=int,
    help=f"In all.  Default: {_TRIALS[MECHANISM]:,}, or of trainer "
    f"{_TRIALS[TRAINER]:,}, its least: 4,096 in each run.",
)
@click.option(
    "--confidence",
    type=float,
    default=0.999,
    show_default=True,
    help="Of the verdict: that a true claim is not called violated.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it, e.g. a.png.")
@click.pass_context
def audit_command(
    ctx: click.Context,
    run: Path | None,
    as_json: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Attack a run's mechanism, and bound its epsilon from below.

    Many times over, one example (the canary) or a ghost goes through the real sampler
    and the real noise, on the data that is worst for it, and an optimal test guesses
    which it was.  From how often the guesses are right follows an epsilon that the
    mechanism has at least.  Keys are new in every trial; no data, batch or key of RUN
    is used, only its plan, noise and delta.

    At the trainer level, dense and lazy noise are judged separately.  The contributions
    of each batch are also subtracted from the released weights; what remains must be
    the claimed noise.

    The exit code is 1 if the claimed epsilon is refuted, or if what runs is not the
    mechanism that it was proven for.

    \b
    Example, of a run, and of a shuffle that is sold under Poisson's epsilon:
      dpsgd audit run
      dpsgd audit --sampler dynamic-shuffle --claim poisson --num-examples 10000 \\
          --batch-size 100 --epochs 1 --epsilon 1.5 --delta 1e-5 --plot audit.png
    """
    from trainer.auditing import audit_report

    check_float("confidence", flags["confidence"], above=0.5, below=1.0)
    subject = _of_plan(flags) if run is None else _of_run(run, flags)
    trials = _TRIALS[flags["level"]] if flags["trials"] is None else flags["trials"]
    check_int("trials", trials, at_least=100, at_most=_MOST_TRIALS)
    if plot is not None:
        _check_plot(plot)
    audit = _audit_mechanism if flags["level"] == MECHANISM else _audit_trainer
    verdict, notes = audit(subject, trials, flags["confidence"])
    report = audit_report.Report(
        level=flags["level"],
        audited=subject.plan,
        verdict=verdict,
        notes=notes,
        cannot_see=CANNOT_SEE[flags["level"]],
    )
    if plot is not None:
        from accounting.auditing import audit_plot

        audit_plot.draw(verdict.closest, report.title, plot)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        report.print()
    if verdict.violated:
        ctx.exit(1)


# -- what is audited -------------------------------------------------------------------


def _of_run(run: Path, flags: dict[str, Any]) -> Subject:
    from trainer.run import privacy

    allowed = ("claim", "level", "trials", "confidence")
    record, manifest = plan_flags.read_run(run, flags, allowed=allowed)
    if record.method not in (*DP_SGD_RELEASES, NON_PRIVATE):
        raise InputError(
            f"Expected method={record.method!r} to be one of "
            f"{', '.join(DP_SGD_RELEASES)}: only what DP-SGD releases is audited."
        )
    noise, delta = privacy.check_run(
        record,
        manifest,
        delta=flags["delta"],
        allow_large_delta=flags["allow_large_delta"],
    )
    assert record.l2_norm_clip is not None  # of a private run
    return _subject(
        manifest.plan,
        flags,
        noise_multiplier=noise,
        l2_norm_clip=record.l2_norm_clip,
        delta=delta,
    )


def _of_plan(flags: dict[str, Any]) -> Subject:
    from accounting import accountant

    needed = ("sampler", "num_examples", "batch_size", "delta")
    plan_flags.check_complete(flags, needed, command="audit")
    if (flags["noise_multiplier"] is None) == (flags["epsilon"] is None):
        raise InputError("Expected exactly one of --noise-multiplier and --epsilon.")
    plan = plan_flags.plan(flags)
    noise = flags["noise_multiplier"]
    if noise is None:
        claimed = _claimed(plan, flags["claim"] or plan.sampler)
        noise = accountant.noise_multiplier(
            claimed, epsilon=flags["epsilon"], delta=flags["delta"]
        ).guarantee
    return _subject(
        plan, flags, noise_multiplier=noise, l2_norm_clip=1.0, delta=flags["delta"]
    )


def _subject(
    plan: DpSgdPlan,
    flags: dict[str, Any],
    *,
    noise_multiplier: float,
    l2_norm_clip: float,
    delta: float,
) -> Subject:
    delta_flags.warn(delta, plan.num_examples)
    return Subject(
        plan=plan,
        claimed=flags["claim"] or plan.sampler,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=l2_norm_clip,
        delta=delta,
    )


def _claimed(plan: DpSgdPlan, sampler: str) -> DpSgdPlan:
    """Returns the plan as it is said to be."""
    if sampler == plan.sampler:
        return plan
    if sampler == plans.TRUNCATED_POISSON:
        raise InputError(
            "Expected no --claim truncated-poisson for batches that have no cap: take "
            "--claim poisson, whose epsilon is that of a large cap."
        )
    return dataclasses.replace(plan, sampler=sampler, truncated_batch_size=None)


def _check_plot(path: Path) -> None:
    """Refuses before minutes of trials what would be refused after them."""
    from accounting.plots import check_path

    check_path(path)


# -- trials ----------------------------------------------------------------------------


def _audit_mechanism(
    subject: Subject, trials: int, confidence: float
) -> tuple[JointVerdict, list[str]]:
    from accounting.auditing import audit, joint_tests
    from pipelines.cli.console import Bars
    from trainer.auditing import audit_mechanism

    claimed = _claimed(subject.plan, subject.claimed)
    claim = audit.claim(claimed, subject.noise_multiplier, subject.delta)
    case = audit_mechanism.worst_case(subject.plan)
    with Bars(["trials"]) as bars:
        bars.set_total("trials", trials)
        scores = [
            audit_mechanism.simulate(
                case,
                subject.noise_multiplier,
                count,
                real=real,
                advance=lambda done: bars.advance("trials", done),
            )
            for real, count in ((True, trials // 2), (False, trials - trials // 2))
        ]
    evidence = joint_tests.Evidence(
        name=MECHANISM, real=scores[0], ghost=scores[1], slack=case.slack
    )
    verdict = joint_tests.judge(claim, [evidence], confidence=confidence)
    return verdict, [case.scaled or "nothing is scaled: all steps, examples, noise"]


def _audit_trainer(
    subject: Subject, trials: int, confidence: float
) -> tuple[JointVerdict, list[str]]:
    from accounting.auditing import audit, joint_tests
    from pipelines.cli.console import Bars
    from trainer.auditing import audit_training

    # The claim is that of runs which are still to be made.
    audit.check(subject.noise_multiplier, subject.delta)
    runs = audit_training.runs(
        subject.plan, subject.noise_multiplier, subject.l2_norm_clip, trials
    )
    with Bars(["runs"]) as bars:
        bars.set_total("runs", len(runs))
        outcomes = []
        for run in runs:
            outcomes.append(audit_training.carry_out(run))
            bars.advance("runs", 1)
    plan = next(found.plan for found in outcomes if found.run.has_trials)
    claim = audit.claim(
        _claimed(plan, subject.claimed), subject.noise_multiplier, subject.delta
    )
    verdict = joint_tests.judge(
        claim, audit_training.evidence(outcomes), confidence=confidence
    )
    few = next(found.plan for found in outcomes if not found.run.has_trials)
    note = (
        f"{len(runs)} small runs of dp-sgd, same sampler, noise and clip norm: "
        f"n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
        f"T={plan.num_steps:,}, of dense and of lazy noise; the claim is that of these "
        f"runs. Few: n={few.num_examples:,}, b={few.expected_batch_size:,}, "
        f"T={few.num_steps:,}, for checks alone, dense on the vectorised path"
    )
    return verdict, [note]
