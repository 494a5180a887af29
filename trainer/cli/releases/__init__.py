"""Commands of what is released beside one model: ranges, metrics, several runs."""
