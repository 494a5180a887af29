"""Commands that prepare tables, bound users, and make and verify batches."""
