"""Raw tables to numeric Parquet, and synthetic tables."""
