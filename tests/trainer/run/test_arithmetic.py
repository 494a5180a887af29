"""The arithmetic of a step is that of float32, whatever the process was told."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.run.test_views_of_runs import network
from trainer.core.tf_compat import keras, tf
from trainer.keras_model import make_private
from trainer.run import preflight


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Seen: one row changed a sum by 6e9 where the bound is 0.5.
        ("XLA_FLAGS", "--xla_cpu_fast_math_honor_nans=false"),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2"),
        ("TF_SET_ONEDNN_FPMATH_MODE", "BF16"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("DNNL_DEFAULT_FPMATH_MODE", "BF16"),
        ("TF_CONV2D_USE_FP16_ACCUMULATE", "true"),
        ("TF_OF_THE_FUTURE", ""),
    ],
)
def test_a_run_is_refused_where_a_library_is_told_anything_unknown(
    name: str, value: str, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    request = request_for()
    with pytest.raises(InputError, match=f"`unset {name}`") as caught:
        preflight.check(request)
    assert "\n" not in str(caught.value)
    assert not value or value not in str(caught.value)
    assert not request.run.exists()


_FEWER_BITS = [f"auto_mixed_precision{x}" for x in ("", "_mkl", "_onednn_bfloat16")]


def _tell(told: bool) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(told)
    tf.config.optimizer.set_jit(told)
    tf.config.run_functions_eagerly(told)  # seen to fail: a step ended in an error
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_FEWER_BITS, told))


def _assert_undone() -> None:
    options = tf.config.optimizer.get_experimental_options()
    assert not any(options[name] for name in _FEWER_BITS)
    assert not options["remapping"]
    assert not tf.config.optimizer.get_jit()
    assert not tf.config.functions_run_eagerly()
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


def test_a_notebook_is_told_no_other_arithmetic(
    small_batches: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the check was one of `dpsgd train` alone."""

    def private() -> Any:
        return make_private(
            network(), batches=small_batches.path, run=tmp_path / "run",
            noise_multiplier=0.8, l2_norm_clip=1.0, delta=1e-3,
        )  # fmt: skip

    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with pytest.raises(InputError, match="`unset XLA_FLAGS`"):
        private()
    monkeypatch.delenv("XLA_FLAGS")
    model = private()
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    try:
        _tell(True)
        model.fit(verbose=0)
        _assert_undone()
    finally:
        _tell(False)
