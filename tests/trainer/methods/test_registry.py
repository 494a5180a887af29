"""A method from outside trains like a built-in one; what it lacks is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import pytest

from accounting.core import accountant
from accounting.core.plan import DpSgdPlan
from accounting.core.settings import Field, Settings
from accounting.core.validation import InputError
from tests.command_line import invoke
from tests.trainer.run.whole_runs import LINEAR, KillAt, Planted
from tests.trainer.zoo import arrays, batch, linear, make_model
from trainer.core.run.run_record import read_run
from trainer.core.step import grid
from trainer.core.step.bounded_sum import BoundedSum
from trainer.core.step.clipping import (
    ExampleGradients,
    SingleExamples,
    example_gradient,
)
from trainer.gradients import paths
from trainer.model.trainable_model import TrainableModel
from trainer.run import hooks
from trainer.run.hooks import Hooks
from trainer.run.preflight import Request
from trainer.settings import methods
from trainer.settings.methods import Method, MethodSettings, as_dp_sgd, gradients_text
from trainer.settings.train_settings import TrainSettings
from trainer.train import train

NAME = "small-clip"
PRIVATE = {"noise_multiplier": 1.0, "l2_norm_clip": 0.4}
OWN = {"clip_share": 0.5}


def _small(model: TrainableModel, settings: TrainSettings) -> ExampleGradients:
    """Takes a share of each gradient; the clip is the core's."""
    share = settings.method_settings["clip_share"]

    def gradient(row: Any) -> tuple[list[Any], Any]:
        return [share * value for value in example_gradient(model, row)], True

    return SingleExamples(model, gradient)


def _sentence(settings: Mapping[str, Any]) -> str:
    return f"SMALL: per-example gradients, to clip_share={settings['clip_share']!r}"


HOOKS = Hooks(gradients=_small)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share(Settings):
    """Its own setting.

    Attributes:
      clip_share: Share of the clip norm that is used.
    """

    clip_share: Annotated[float, Field(gt=0, le=1), "Try 0.5."]


LEAST = Method(hooks=lambda: None, whole_tables=lambda _: None)
WHOLE = Method(
    hooks=lambda: HOOKS,
    whole_tables=lambda _: None,
    accounting=as_dp_sgd,
    sentence=_sentence,
    settings=Share,
)

Register = Callable[[Method], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Registers a toy method until the test ends."""
    monkeypatch.setattr(methods, "_ENTRIES", dict(methods._ENTRIES))
    return functools.partial(methods.register, NAME)  # type: ignore[return-value]


def _settings(**more: Any) -> TrainSettings:
    return TrainSettings(method=NAME, method_settings=OWN, **{**PRIVATE, **more})


# -- from settings to gradients --------------------------------------------------------


def test_a_method_from_outside_sums_its_own_gradients(
    register: Register, rows: Any
) -> None:
    with pytest.raises(InputError, match=f"method='{NAME}' to be one of"):
        _settings()
    register(WHOLE)
    settings, model = _settings(), make_model(linear)
    data = batch(rows(4))
    found = arrays(hooks.gradient_sum(model, settings)(*data))
    ours = TrainSettings(noise_multiplier=1.0, l2_norm_clip=0.4 / OWN["clip_share"])
    same = arrays(hooks.gradient_sum(model, ours)(*data))
    for one, other in zip(found, same, strict=True):
        np.testing.assert_allclose(one, OWN["clip_share"] * other, rtol=1e-5, atol=1e-6)
    assert hooks.choose_path(model, settings) == paths.choose_path(model)


def test_a_method_from_outside_names_a_claim(register: Register) -> None:
    assert WHOLE.claim == "added method"
    with pytest.raises(InputError, match=f"claim=None of method='{NAME}'"):
        register(dataclasses.replace(WHOLE, claim=None))


@pytest.mark.parametrize("multiplier", [1.0, 2.0**20])
@pytest.mark.parametrize("most", [None, 1 << 36])
def test_the_grid_is_of_the_plan_the_clip_and_the_noise_of_the_run(
    most: int | None, multiplier: float
) -> None:
    # Seen to fail if the grid is of one parameter, of the expected examples of a step,
    # or of a multiplier of 1.
    plan = DpSgdPlan(
        sampler="truncated-poisson" if most else "poisson",
        num_examples=10**12,
        expected_batch_size=1 << 30,
        num_steps=10,
        truncated_batch_size=most,
    )
    model, settings = make_model(linear), TrainSettings(**PRIVATE)
    found = hooks.step_sum(model, settings, plan, multiplier)
    assert isinstance(found, BoundedSum)
    assert found.grid == grid.make(
        l2_norm_clip=0.4,
        noise_multiplier=multiplier,
        num_values=sum(v.shape.num_elements() for v in model.variables),
        most_examples=most or 10**12,
    )


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({}, "--clip-share for method='small-clip'. Try 0.5"),
        ({"clip_share": 2.0}, "clip_share=2.0 <= 1"),
        ({**OWN, "bam_radius": 0.1}, "no bam_radius=0.1 .* --method bam"),
        ({**OWN, "clip_shar": 0.1}, "no clip_shar=0.1 .* no method has it. Omit it"),
    ],
)
def test_a_setting_is_of_its_method(
    own: dict[str, float], message: str, register: Register
) -> None:
    register(WHOLE)
    with pytest.raises(InputError, match=message):
        MethodSettings(method=NAME, method_settings=own)
    with pytest.raises(InputError, match=r"no clip_share=0\.5 .*--method small-clip"):
        MethodSettings(method="bam", method_settings={"bam_radius": 0.1, **OWN})


def test_a_method_says_whether_it_reads_whole_tables(register: Register) -> None:
    lazy = {"optimizer": "sgd", "embedding_noise": "lazy"}
    register(dataclasses.replace(WHOLE, whole_tables=lambda _: "it reads all rows"))
    with pytest.raises(InputError, match="not exact here: it reads all rows"):
        _settings(**lazy)


# -- a run -----------------------------------------------------------------------------


@pytest.mark.usefixtures("lean_results")
def test_a_method_from_outside_runs_and_goes_on_from_the_command_line(
    register: Register, small_batches: Any, held_out: Any, tmp_path: pathlib.Path
) -> None:
    register(WHOLE)
    request = Request(
        settings=_settings(model=LINEAR, target_delta=1e-3),
        batches=small_batches.path,
        held_out=held_out,
        run=tmp_path / "run",
        checkpoint_every=1,
    )
    with pytest.raises(Planted):
        train(request, KillAt(4))
    other = dataclasses.replace(request.settings, method_settings={"clip_share": 0.25})
    with pytest.raises(InputError, match=r"method_settings=.*0\.25.*as when the run"):
        train(dataclasses.replace(request, settings=other))
    done = invoke(
        [
            "train", f"--batches={request.batches}", f"--eval={held_out}",
            f"--out={request.run}", f"--method={NAME}", "--clip-share=0.5",
            "--noise-multiplier=1",
            "--l2-norm-clip=0.4", "--delta=1e-3", f"--model={LINEAR}",
            "--checkpoint-every=1",
        ],
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "continuing after step" in done.output
    record, manifest = read_run(request.run)
    assert (record.method, record.method_settings) == (NAME, OWN)
    said = json.loads((request.run / "privacy.json").read_text())
    assert "SMALL: per-example gradients, to clip_share=0.5" in said["mechanism"]
    dp_sgd_epsilon = accountant.epsilon(manifest.plan, noise_multiplier=1, delta=1e-3)
    assert said["epsilon"] == dp_sgd_epsilon.guarantee


# -- what is not brought ---------------------------------------------------------------


def test_what_a_method_does_not_bring_is_refused(register: Register) -> None:
    register(LEAST)
    model, settings = make_model(linear), TrainSettings(method=NAME, **PRIVATE)  # type: ignore[arg-type]
    for ask, reason in (
        (lambda: methods.theorem_of(NAME, {}, 0.4), "no epsilon is known"),
        (lambda: gradients_text(NAME, {}), "no privacy statement"),
        (lambda: hooks.gradient_sum(model, settings), "to bring Hooks, not NoneType"),
    ):
        with pytest.raises(InputError, match=reason) as error:
            ask()
        assert f"method={NAME!r}" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_name_means_one_method_and_a_setting_has_one_owner(
    register: Register,
) -> None:
    register(WHOLE)
    for taken in (NAME, "dp-sgd"):
        with pytest.raises(InputError, match="not to be registered yet"):
            methods.register(taken, WHOLE)
    for setting in ("bam_radius", "clip_share"):
        owner = dataclasses.replace(
            WHOLE,
            settings=dataclasses.make_dataclass(
                "Other", [(setting, Annotated[float, Field(gt=0)])], kw_only=True
            ),
        )
        with pytest.raises(
            InputError, match=f"setting {setting!r} of method='another'"
        ):
            methods.register("another", owner)
