"""A run: its record, checkpoints, identity and outputs."""
