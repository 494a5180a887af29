"""Contribution bounding: at most k rows per user, before rows are sampled."""
