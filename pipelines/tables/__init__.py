"""Tables as numbers: Criteo text, synthetic or real, to Parquet."""
