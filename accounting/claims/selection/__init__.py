"""Private tuning: only the best of a random number of runs is released."""
