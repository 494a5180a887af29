"""Several commands of ``dpsgd`` in one process: importing Beam outlasts a small job.

python -m tests.engines.harness.run_commands '[["batches", "--out", ...], [...]]'
"""

from __future__ import annotations

import json
import sys

from dpsgd import cli


def main() -> None:
    """Runs the commands one after another; ends with the first that fails."""
    for arguments in json.loads(sys.argv[1]):
        if status := cli.main(arguments, standalone_mode=False):
            sys.exit(status)


if __name__ == "__main__":
    main()
