"""The processes that take one private step together."""
