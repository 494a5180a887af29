"""What ``make_private``'s ``fit`` takes: weights of examples, epochs and callbacks."""
