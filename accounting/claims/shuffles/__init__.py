"""Shuffled batches: amplification by null clones, and lower bounds."""
