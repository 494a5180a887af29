"""The rows that batches are sampled from: files, blocks, identity."""
