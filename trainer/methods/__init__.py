"""What each training method makes of a step."""
