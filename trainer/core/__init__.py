"""What must be right for the epsilon of a run to be true."""
