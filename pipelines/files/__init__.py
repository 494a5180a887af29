"""Files in folders and stores, and how work on them is stopped."""
