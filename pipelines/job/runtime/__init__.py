"""Steps of independent tasks, on threads or on an engine, and their errors."""
