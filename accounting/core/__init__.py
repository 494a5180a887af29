"""What must be right for the epsilon of a run: see docs/reviewing.md."""
