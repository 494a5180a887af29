"""Runs several ``dpsgd`` commands in one process, which imports Beam only once.

python -m tests.engines.harness.run_commands '[["batches", "--out", ...], [...]]'
"""

from __future__ import annotations

import json
import sys

from dpsgd.command_line import run


def main() -> None:
    """Runs the commands in order; stops at the first that fails."""
    for arguments in json.loads(sys.argv[1]):
        if status := run(arguments):
            sys.exit(status)


if __name__ == "__main__":
    main()
