"""The loop over the steps, its checkpoints, and the record of what was executed."""
