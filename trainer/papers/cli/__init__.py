"""The commands of these experiments."""
