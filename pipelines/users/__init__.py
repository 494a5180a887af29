"""Contributions of users bounded, before rows are sampled."""
