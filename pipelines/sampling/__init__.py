"""Which examples are in which step: a pure function of key, plan, block and row."""
