"""Options: check constructor parameters before training."""
