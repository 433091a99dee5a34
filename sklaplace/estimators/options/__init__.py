"""Options: constructor parameters, checked once before any training."""
