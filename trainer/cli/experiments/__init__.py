"""Commands of many runs: compare, simulate, bias, variance, shift."""
