"""What must not change while the code is made smaller, and the command that compares.

    python -m tests.frozen                        # batches, accountant, sums
    python -m tests.frozen tables                 # AUC and log loss of ten tables
    python -m tests.frozen steps --base 8c4dedc2  # a step beside that commit's
    python -m tests.frozen faults                 # planted, which tests must catch

A commit that mends a fault changes only the frozen answers that it names, with
``--freeze``.
"""
