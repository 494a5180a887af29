"""The public file that says how the columns of a table become numbers."""
