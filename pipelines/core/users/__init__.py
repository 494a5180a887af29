"""Which rows of a user are kept, and the note that says so."""
