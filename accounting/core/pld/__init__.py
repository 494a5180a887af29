"""Privacy losses of steps, and bounds on their sums."""
