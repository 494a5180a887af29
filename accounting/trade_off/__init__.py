"""What epsilon and delta mean for membership tests."""
