"""What no proof can go below: no privacy claim depends on it."""
