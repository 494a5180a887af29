"""The processes that take one private step together, and the integers they sum."""
