"""The settings that TensorFlow and Keras are imported with."""

from __future__ import annotations

import os
import subprocess
import sys


def test_another_backend_of_keras_is_refused_and_not_overridden() -> None:
    """Seen to fail: Keras ran on TensorFlow, whatever was asked for."""
    command = [sys.executable, "-c", "import trainer.core.tf_compat"]
    chosen = {**os.environ, "KERAS_BACKEND": "jax"}
    ended = subprocess.run(
        command, env=chosen, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "KERAS_BACKEND=jax. Set KERAS_BACKEND=tensorflow" in ended.stderr
