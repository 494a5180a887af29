"""What the flex template's launcher starts: ``dpsgd batches``, on Dataflow.

The launcher gives the template's parameters as ``--name=value``; names are those of the
command's options with underscores, Beam's own stay as they are.
"""

from __future__ import annotations

import sys

from dpsgd.command_line import main

#: Parameters of metadata.json that are options of ``dpsgd batches``.
OPTIONS = (
    "input", "out", "key_file", "sampler", "batch_size", "epochs", "epsilon", "delta",
    "truncated_batch_size",
)  # fmt: skip


def arguments(given: list[str]) -> list[str]:
    """Returns the command line of ``dpsgd`` for what the launcher gave."""
    changed = []
    for argument in given:
        name, equals, value = argument.removeprefix("--").partition("=")
        spelled = name.replace("_", "-") if name in OPTIONS else name
        changed.append(f"--{spelled}{equals}{value}")
    return ["batches", "--runner=DataflowRunner", *changed]


if __name__ == "__main__":
    sys.argv = ["dpsgd", *arguments(sys.argv[1:])]
    main()
