"""The commands around batches."""
