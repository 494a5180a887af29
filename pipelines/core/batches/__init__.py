"""The files of batches: their format, what describes them, and who checks them."""
