"""``dpsgd audit``: how large epsilon is at least, by attacking the mechanism itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accounting import delta_flags
from accounting import plan as plans
from accounting.plan import DpSgdPlan
from accounting.validation import InputError, check_float, check_int
from trainer import plan_flags
from trainer.method_settings import DP_SGD_RELEASES, NON_PRIVATE
from trainer.settings import DENSE_NOISE, LAZY_NOISE

if TYPE_CHECKING:
    from accounting.audit import Verdict
    from accounting.audit_noise import EffectiveNoise

MECHANISM = "mechanism"
TRAINER = "trainer"
#: Trials by default: about a minute at most, on a few hundred steps.
_TRIALS = {MECHANISM: 20_000, TRAINER: 8192}
_MOST_TRIALS = 10**8
MEANING = (
    "A lower bound is a fact about this mechanism on its worst-case data; no better "
    "proof can go below it. Its absence proves nothing: privacy comes from the "
    "accountant's upper bound, and an audit looks for faults in code or claim."
)


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
    help=f"In all.  Default: {_TRIALS[MECHANISM]:,}, or {_TRIALS[TRAINER]:,} of "
    "trainer, 4,096 in each run.",
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

    The exit code is 1 if the claimed epsilon is refuted.

    \b
    Example, of a run, and of a shuffle that is sold under Poisson's epsilon:
      dpsgd audit run
      dpsgd audit --sampler dynamic-shuffle --claim poisson --num-examples 10000 \\
          --batch-size 100 --epochs 1 --epsilon 1.5 --delta 1e-5 --plot audit.png
    """
    from accounting import audit_noise

    check_float("confidence", flags["confidence"], above=0.5, below=1.0)
    subject = _of_plan(flags) if run is None else _of_run(run, flags)
    trials = _TRIALS[flags["level"]] if flags["trials"] is None else flags["trials"]
    check_int("trials", trials, at_least=100, at_most=_MOST_TRIALS)
    if plot is not None:
        _check_plot(plot)
    audit = _audit_mechanism if flags["level"] == MECHANISM else _audit_trainer
    verdict, notes = audit(subject, trials, flags["confidence"])
    # Of batches that are known to be made otherwise it would say nothing.
    honest = subject.claimed == subject.plan.sampler
    effective = (
        audit_noise.effective_noise(verdict.claim, verdict.findings) if honest else []
    )
    title = f"{subject.plan.sampler} batches, {flags['level']} level"
    if plot is not None:
        from accounting import audit_plot

        audit_plot.draw(verdict, title, plot)
    if as_json:
        fields = {
            "level": flags["level"],
            "audited": subject.plan.to_json(),
            "notes": notes,
            "meaning": MEANING,
            **verdict.to_json(),
            "if_batches_are_as_claimed": [
                dataclasses.asdict(found) for found in effective
            ],
        }
        click.echo(json.dumps(fields, indent=2))
    else:
        _print(subject, title, verdict, notes, effective)
    if verdict.violated:
        ctx.exit(1)


# -- what is audited -------------------------------------------------------------------


def _of_run(run: Path, flags: dict[str, Any]) -> Subject:
    from trainer import privacy

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
    from accounting import bounds

    needed = ("sampler", "num_examples", "batch_size", "delta")
    plan_flags.check_complete(flags, needed, command="audit")
    if (flags["noise_multiplier"] is None) == (flags["epsilon"] is None):
        raise InputError("Expected exactly one of --noise-multiplier and --epsilon.")
    plan = plan_flags.plan(flags)
    noise = flags["noise_multiplier"]
    if noise is None:
        claimed = _claimed(plan, flags["claim"] or plan.sampler)
        noise = bounds.noise_multiplier(
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
) -> tuple[Verdict, list[str]]:
    from accounting import audit
    from pipelines.console import Bars
    from trainer import audit_mechanism

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
    verdict = audit.judge(claim, *scores, confidence=confidence, slack=case.slack)
    return verdict, [case.scaled or "nothing is scaled: all steps, examples, noise"]


def _audit_trainer(
    subject: Subject, trials: int, confidence: float
) -> tuple[Verdict, list[str]]:
    import numpy as np

    from accounting import audit
    from pipelines.console import Bars
    from trainer import audit_training

    # The claim is that of runs which are still to be made.
    audit.check(subject.noise_multiplier, subject.delta)
    small = audit_training.small_run(
        subject.plan, subject.noise_multiplier, subject.l2_norm_clip
    )
    num_runs = -(-trials // audit_training.NUM_CANARIES)
    with Bars(["runs"]) as bars:
        bars.set_total("runs", num_runs)
        found = []
        for number in range(num_runs):
            # Both ways in which a run may add its noise, in turn.
            kind = (DENSE_NOISE, LAZY_NOISE)[number % 2]
            run = dataclasses.replace(small, embedding_noise=kind)
            found.append(audit_training.carry_out(run))
            bars.advance("runs", 1)
    plan = found[0].plan
    claim = audit.claim(
        _claimed(plan, subject.claimed), subject.noise_multiplier, subject.delta
    )
    verdict = audit.judge(
        claim,
        np.concatenate([trials.real for trials in found]),
        np.concatenate([trials.ghost for trials in found]),
        confidence=confidence,
        slack=sum(trials.slack for trials in found),
    )
    note = (
        f"{num_runs} small run(s) of dp-sgd, same sampler, noise and clip norm: "
        f"n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
        f"T={plan.num_steps:,}; the claim is that of the small run; noise is dense in "
        "odd and lazy in even runs"
    )
    return verdict, [note]


# -- what is shown ---------------------------------------------------------------------


def _print(
    subject: Subject,
    title: str,
    verdict: Verdict,
    notes: Iterable[str],
    effective: list[EffectiveNoise],
) -> None:
    from rich.console import Console
    from rich.table import Table

    from accounting import audit

    plan, claim = subject.plan, verdict.claim
    click.echo(
        f"{title}: n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
        f"T={plan.num_steps:,}, {plan.num_epochs:,} epoch(s), noise multiplier "
        f"{subject.noise_multiplier:.6g}\n"
        f"claimed, by the accounting of {claim.plan.sampler}: epsilon <= "
        f"{claim.epsilon:.4f} at delta {claim.delta!r}"
    )
    for note in notes:
        click.echo(f"scale: {note}")
    table = Table(title=f"{verdict.trials:,} trials")
    table.add_column("found, with confidence", no_wrap=True)
    for found in verdict.findings:
        table.add_column(audit.percent(found.confidence), justify="right")
    table.add_column("claimed", justify="right")
    for row in _rows(verdict, effective):
        table.add_row(*row)
    Console().print(table)
    click.echo("The verdict is of the first two lines, which assume nothing.")
    if effective:
        click.echo(
            "*  if batches are made as claimed, and only the noise may differ; epsilon "
            "is the accountant's for that noise"
        )
    click.echo(
        "** if errors trade off as those of two Gaussians, as they do for "
        "deterministic batches alone"
    )
    click.echo(f"verdict: {verdict.text}")
    click.echo(MEANING)


def _rows(verdict: Verdict, effective: list[EffectiveNoise]) -> list[list[str]]:
    claim, findings = verdict.claim, verdict.findings
    last = findings[-1]
    rows = [
        [
            f"epsilon at delta {claim.delta:.3g}",
            *(f">= {found.epsilon_lower_bound:.4f}" for found in findings),
            f"<= {claim.epsilon:.4f}",
        ],
        [
            f"delta at epsilon {last.other_epsilon:.4f}",
            *(f">= {found.other_delta:.3g}" for found in findings),
            f"<= {last.other_delta_claimed:.3g}",
        ],
    ]
    if effective:
        noises = [found.noise_multiplier for found in effective]
        rows += [
            [
                "noise multiplier *",
                *("unknown" if x is None else f"<= {x:.4f}" for x in noises),
                f"{claim.noise_multiplier:.4f}",
            ],
            [
                "epsilon *",
                *(f">= {found.epsilon:.4f}" for found in effective),
                f"<= {claim.epsilon:.4f}",
            ],
        ]
    gaussian = [f">= {found.gaussian_epsilon:.4f}" for found in findings]
    return [*rows, ["epsilon **", *gaussian, ""]]
