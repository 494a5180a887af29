"""The rows that batches are sampled from: their files, blocks and digests."""
