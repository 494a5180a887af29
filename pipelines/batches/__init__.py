"""The format of batches: encoded, read and verified."""
