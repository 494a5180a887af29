"""``dpsgd compare``, and flags that commands of many runs share."""
