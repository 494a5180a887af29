"""Lower bounds on epsilon from many attacks on a mechanism."""
