"""A folder of batches: read, and verified."""
