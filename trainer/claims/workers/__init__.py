"""The processes that take each private step together, and the integers they sum."""
