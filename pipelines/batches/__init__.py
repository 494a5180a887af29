"""The format of batches: written, read, verified."""
