"""The bias of clipping along runs, of data that is declared public."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

import trainer.train
from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from tests.trainer.flat_settings import train_settings
from tests.trainer.run.whole_runs import LINEAR
from trainer.papers.bias import measure_bias
from trainer.papers.settings import BiasSettings
from trainer.settings.bias_settings import COLUMNS
from trainer.settings.train_settings import TrainSettings

pytestmark = pytest.mark.usefixtures("lean_results")

MEASURED: dict[str, dict[str, Any]] = {"dp-sgd": {}, "bam": {"bam_radius": 0.1}}


def settings_of(**changes: Any) -> TrainSettings:
    """Of runs of a linear model."""
    fields = {"noise_multiplier": 0.8, "target_delta": 1e-3}
    return train_settings(model=LINEAR, **fields, **changes)


@pytest.fixture
def settings_for(
    small_batches: Any, held_out: pathlib.Path, tmp_path: pathlib.Path
) -> Any:
    def make(*methods: str, **changes: Any) -> BiasSettings:
        trained = tuple(
            settings_of(method=name, l2_norm_clip=0.1, **MEASURED[name])
            for name in methods
        )
        fields = {
            "batches": small_batches.path,
            "held_out": held_out,
            "out": tmp_path / "bias",
            "trained": trained,
            "data_is_public": True,
        }
        return BiasSettings(**{**fields, **changes})

    return make


def test_every_method_has_a_line_for_every_step_beside_no_public_file(
    settings_for: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(*MEASURED)
    said: list[str] = []
    report = measure_bias(settings, said.append)
    assert said[0].startswith("NOT PRIVATE")
    fields = report.write(settings.out)
    num_steps = read_manifest(settings.batches).plan.num_steps
    for method in fields["methods"]:
        assert [line["step"] for line in method["steps"]] == [*range(1, num_steps + 1)]
        assert {*method["mean"]} == {*COLUMNS}
        assert method["mean"]["bias"] > 0
        assert (method["mean"]["ascent_cosine"] is None) == (
            method["method"] == "dp-sgd"
        )
    assert json.loads((settings.out / "non_private_bias.json").read_text()) == fields
    names = {p.relative_to(settings.out) for p in settings.out.rglob("*bias*")}
    assert names == {
        *(pathlib.Path(f"non_private_bias.{end}") for end in ("json", "md", "png")),
        *(
            pathlib.Path("runs", method, "private", "non_private_clipping_bias.csv")
            for method in MEASURED
        ),
    }
    # Finished runs are not made again; of other settings they are refused.
    monkeypatch.setattr(trainer.train, "train", None)
    assert measure_bias(settings).to_json() == fields
    assert len(measure_bias(settings_for("dp-sgd")).to_json()["methods"]) == 1
    other = settings_of(l2_norm_clip=0.2)
    with pytest.raises(InputError, match=r"dp-sgd\.settings\.json beside it has"):
        measure_bias(settings_for(trained=(other,)))
