"""Files in folders and stores, and what commands that write them share."""
