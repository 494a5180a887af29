"""Privacy loss distributions: dominating pairs, composition, and their profiles."""
