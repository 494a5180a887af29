"""A model with its loss, its metrics and its evaluation."""
