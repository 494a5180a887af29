"""A method from outside trains as one of ours; what it does not bring is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from tests.trainer.zoo import arrays, batch, linear, make_model
from trainer.gradients import clipping
from trainer.gradients.clipping import GradientSum
from trainer.methods import registry
from trainer.methods.base import Sums
from trainer.model.trainable_model import TrainableModel
from trainer.run import privacy
from trainer.settings import method_settings
from trainer.settings.method_settings import (
    METHODS,
    MIXED_ITERATES,
    NOISY_SUMS,
    NON_PRIVATE,
    Method,
    MethodSettings,
    Setting,
    check_described,
    gradients_text,
)
from trainer.settings.train_settings import TrainSettings

NAME = "half-clip"
PRIVATE = {"noise_multiplier": 1.0, "l2_norm_clip": 0.4}
PLAN = DpSgdPlan(
    sampler="poisson", num_examples=1000, expected_batch_size=10, num_steps=100
)


def _half(model: TrainableModel, _: TrainSettings, clip: float | None) -> GradientSum:
    """Within the clip norm, and so as private as DP-SGD."""
    assert clip is not None
    return clipping.clipped_sum(model, l2_norm_clip=clip / 2)


SUMS = Sums(
    choose_path=lambda model, _: clipping.choose_path(model), gradient_sum=_half
)
LEAST = Method(sums=lambda: None, whole_tables=lambda _: None)
WHOLE = Method(
    sums=lambda: SUMS,
    whole_tables=lambda _: None,
    releases=NOISY_SUMS,
    sentence=lambda _: "HALF: per-example gradients, halved",
)

Register = Callable[[Method], TrainSettings]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers a toy method until the test ends, and returns settings that name it."""
    monkeypatch.setattr(method_settings, "_ENTRIES", dict(method_settings._ENTRIES))

    def register(method: Method) -> TrainSettings:
        method_settings.register(NAME, method)
        return TrainSettings(method=NAME, **PRIVATE)  # type: ignore[arg-type]

    return register


def test_a_method_from_outside_sums_its_own_gradients(
    registered: Register, rows: Any
) -> None:
    with pytest.raises(InputError, match=f"method='{NAME}' to be one of"):
        TrainSettings(method=NAME, **PRIVATE)  # type: ignore[arg-type]
    settings, model = registered(WHOLE), make_model(linear)
    data = batch(rows(4))
    found = arrays(registry.gradient_sum(model, settings)(*data))
    ours = TrainSettings(noise_multiplier=1.0, l2_norm_clip=0.2)
    same = arrays(registry.gradient_sum(model, ours)(*data))
    for one, other in zip(found, same, strict=True):
        np.testing.assert_array_equal(one, other)
    assert registry.choose_path(model, settings) == clipping.choose_path(model)


def test_a_method_from_outside_is_accounted_for_and_stated(
    registered: Register,
) -> None:
    settings = registered(WHOLE)
    described = settings.describe_method()
    check_described(NAME, described)
    privacy.check_sampler(NAME, PLAN)
    mixing = privacy.mixing_of(NAME, described, settings.l2_norm_clip)
    said = privacy.plan_statement(
        PLAN,
        noise_multiplier=1.0,
        l2_norm_clip=settings.l2_norm_clip,
        delta=1e-5,
        gradients=gradients_text(NAME, described),
        mixing=mixing,
    )
    assert "HALF: per-example gradients, halved" in said.to_text()
    ours = privacy.plan_statement(
        PLAN, noise_multiplier=1.0, l2_norm_clip=0.4, delta=1e-5
    )
    assert said.epsilon == ours.epsilon


QUESTIONS: dict[str, tuple[Callable[[TrainSettings], Any], str]] = {
    "accounting": (
        lambda settings: privacy.mixing_of(NAME, {}, 0.4),
        "to say what it releases: no epsilon is known",
    ),
    "statement": (
        lambda settings: gradients_text(NAME, {}),
        "to say what it clips: no privacy statement",
    ),
    "gradients": (
        lambda settings: registry.gradient_sum(make_model(linear), settings),
        "to bring Sums, not NoneType",
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_method_does_not_bring_is_refused(
    registered: Register, question: str
) -> None:
    ask, reason = QUESTIONS[question]
    settings = registered(LEAST)
    with pytest.raises(InputError, match=reason) as error:
        ask(settings)
    assert f"method={NAME!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_method_is_not_taken_for_dp_sgd() -> None:
    for ask in (
        lambda: gradients_text("unheard-of", {}),
        lambda: privacy.mixing_of("unheard-of", {}, 1.0),
        lambda: privacy.check_sampler("unheard-of", PLAN),
        lambda: check_described("unheard-of", {}),
    ):
        with pytest.raises(InputError, match="method='unheard-of' to be one of"):
            ask()


def test_training_without_privacy_has_no_epsilon_and_no_statement() -> None:
    with pytest.raises(InputError, match="no epsilon is known"):
        privacy.mixing_of(NON_PRIVATE, {}, None)
    with pytest.raises(InputError, match="no privacy statement"):
        gradients_text(NON_PRIVATE, {})


def test_a_name_means_one_method_and_a_setting_has_one_owner(
    registered: Register,
) -> None:
    registered(WHOLE)
    for taken in (NAME, "dp-sgd"):
        with pytest.raises(InputError, match="not to be registered yet"):
            method_settings.register(taken, WHOLE)
    for setting in ("bam_radius", "no_field"):
        owner = dataclasses.replace(
            WHOLE, settings={setting: Setting(check=lambda name, value: None)}
        )
        with pytest.raises(
            InputError, match=f"setting {setting!r} of method='another'"
        ):
            method_settings.register("another", owner)


def test_a_method_releases_what_the_accountant_knows() -> None:
    with pytest.raises(InputError, match="releases='everything' to be one of"):
        dataclasses.replace(WHOLE, releases="everything")
    with pytest.raises(InputError, match="beside the settings linf_factor, mix_width"):
        dataclasses.replace(WHOLE, releases=MIXED_ITERATES)


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_of_the_package_bring_what_a_run_needs(name: str) -> None:
    method = method_settings.get(name)
    assert isinstance(method.sums(), Sums)
    private = name != NON_PRIVATE
    assert (method.releases is not None) == (method.sentence is not None) == private
    fields = {field.name for field in dataclasses.fields(MethodSettings)}
    assert set(method.settings) <= fields
