"""The arithmetic of a step is that of float32, whatever the process was told."""

from __future__ import annotations

from typing import Any

import pytest

from accounting.core.validation import InputError
from trainer.core.run import arithmetic
from trainer.run import preflight
from trainer.tf_compat import tf
from trainer.train import train


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Seen: one row changed a sum by 6e9 where the bound is 0.5.
        ("XLA_FLAGS", "--xla_cpu_fast_math_honor_nans=false"),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2"),
        ("TF_SET_ONEDNN_FPMATH_MODE", "BF16"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("DNNL_DEFAULT_FPMATH_MODE", "BF16"),
        ("TF_CONV2D_USE_FP16_ACCUMULATE", "1"),
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
    assert not request.run.exists()


def test_what_leaves_float32_as_it_is_is_recorded_or_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    found = arithmetic.variables()
    assert found["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert "TF_CPP_MIN_LOG_LEVEL" not in found


def test_settle_undoes_what_a_process_was_told(
    request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer_bits = ["auto_mixed_precision", "auto_mixed_precision_onednn_bfloat16"]
    tf.config.experimental.enable_tensor_float_32_execution(True)
    tf.config.optimizer.set_jit(True)
    tf.config.optimizer.set_experimental_options(dict.fromkeys(fewer_bits, True))
    train(request_for())
    options = tf.config.optimizer.get_experimental_options()
    assert not any(options[name] for name in fewer_bits)
    assert not options["remapping"]
    assert not tf.config.optimizer.get_jit()
    assert not tf.config.experimental.tensor_float_32_execution_enabled()
    # The user's code runs before.
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with pytest.raises(InputError, match="XLA_FLAGS"):
        arithmetic.settle()
