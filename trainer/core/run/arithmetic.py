"""The arithmetic of a step is that of float32, whatever the process was told.

Below the graph that was checked, TensorFlow, oneDNN, XLA and CUDA multiply with fewer
bits, or assume that no value is NaN, where a variable of the environment or an option
of the process says so.  With XLA's fastest arithmetic one row was seen to change a sum
by 10^10 times its bound.

`variables` refuses an environment that tells these libraries anything, unless it is
known to leave float32 as it is.  After `settle`, TensorFlow neither rounds the factors
of products on a GPU (TensorFloat-32), nor rewrites a graph to fewer bits, nor compiles
it by XLA of its own accord, nor runs its Python in its place
(``run_functions_eagerly``).  A session calls `settle` before its steps.

Public: everything.
"""

from __future__ import annotations

import os

from accounting.core.validation import InputError

#: Prefixes of the variables that TensorFlow, oneDNN, XLA and CUDA's libraries read.
_READ = ("TF_", "ONEDNN_", "DNNL_", "XLA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_")
#: Variables that change no bit: log levels, the numbers of threads (see ``threads``),
#: and the variables of Terraform, which may be secret.
_CHANGE_NOTHING = (
    "TF_CPP_", "TF_NUM_INT", "ONEDNN_VERBOSE", "DNNL_VERBOSE",
    "TF_VAR_", "TF_CLI_", "TF_TOKEN_", "TF_IN_AUTOMATION", "TF_DATA_DIR", "TF_INPUT",
    "TF_LOG", "TF_PLUGIN_CACHE_", "TF_REGISTRY_", "TF_WORKSPACE",
)  # fmt: skip
#: Variables that may change the last bits, and no more: those that choose kernels, or
#: where memory comes from.
_FLOAT32 = (
    "TF_ENABLE_ONEDNN_OPTS", "TF_DETERMINISTIC_OPS", "TF_CUDNN_DETERMINISTIC",
    "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR", "TF_GPU_THREAD_", "TF_CONFIG",
    "TF_USE_LEGACY_KERAS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "XLA_PYTHON_CLIENT_", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


def variables() -> dict[str, str]:
    """Returns the variables of the environment on which the last bits may depend.

    Raises:
      InputError: one of them may change more than the last bits.
    """
    found = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_READ) and not name.startswith(_CHANGE_NOTHING)
    }
    for name in found:
        if not name.startswith(_FLOAT32):
            raise InputError(
                f"Expected no {name} in the environment: it may take bits from the "
                "products of a step, or checks from its sums, and the clip is proven "
                f"for float32. Give `unset {name}`."
            )
    return found


def settle() -> None:
    """Makes TensorFlow compute what a graph says, in float32.

    Raises:
      InputError: as for `variables`, since the user's code may have set one.
    """
    from trainer.core.tf_compat import tf  # ``variables`` is asked before it is loaded

    variables()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.optimizer.set_jit(False)
    tf.config.run_functions_eagerly(False)
    fewer_bits = ("", "_mkl", "_onednn_bfloat16")
    tf.config.optimizer.set_experimental_options(
        {f"auto_mixed_precision{name}": False for name in fewer_bits}
    )
