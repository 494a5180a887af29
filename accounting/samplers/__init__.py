"""The bounds of each sampler: what is proven for its batches, and what is disproven."""
