"""What epsilon and delta mean for a test of membership."""
