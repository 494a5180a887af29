"""``dpsgd train`` with one secret for all runs, whose results can then be compared.

python -m tests.cluster_train.one_secret --batches batches ...
"""

from __future__ import annotations

import sys

from dpsgd.command_line import main
from trainer.core.run import session

if __name__ == "__main__":
    session.new_secret = lambda: b"5" * 32
    sys.argv[1:] = ["train", *sys.argv[1:]]
    main()
