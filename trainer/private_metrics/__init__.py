"""Metrics of held-out rows as one Gaussian release."""
