"""What must be right for batches to be as the plan says; it imports nothing outside."""
