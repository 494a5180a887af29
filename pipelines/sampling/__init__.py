"""Which example is in which step: a pure function of key and position."""
