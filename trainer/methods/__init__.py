"""How each training method defines a step."""
