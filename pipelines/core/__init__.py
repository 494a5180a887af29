"""What must be right for batches to be as the plan says.

In this order a reviewer reads which examples are in which step, with which weight, and
whether the files can be trusted:

    keys                       secrets, and the random numbers made of them
    choices                    the steps of each row: the definition of every sampler
    rows, resample             the rows of a file, and all batches of them
    batches                    the format, the manifest, the reader and its checks
    users                      which rows of a user are kept: only for users
"""
