"""The privacy report of a run: one HTML page, made from its public files."""
