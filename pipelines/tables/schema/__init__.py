"""The schema of a table: a public file that says how its columns become numbers."""
