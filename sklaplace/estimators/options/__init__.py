"""Options: validation of constructor parameters before any training."""
